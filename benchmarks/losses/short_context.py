"""Loss of a model that sees only the last 16 tokens, on tales.

Trains the quickstart's model on windows of that length, for longer and longer, and measures the
loss of whole validation stories in which each token is predicted from such a window. A lower bound
that no training can beat is printed next to it: a fact whose last mention is outside the window is
as uncertain as when it was first sampled.
"""

import argparse
import re
from typing import Any

import torch

from thinker.benchmarks.training_runs import ROOT
from thinker.data.text import tales
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.model import Thinker
from thinker.training.config.load import load_config
from thinker.training.run import build_trainer

LN_2 = 0.6932


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--tokens", type=int, default=16, help="length of the window in tokens")
    parser.add_argument(
        "--minutes",
        type=float,
        nargs="+",
        default=[3.0, 6.0, 12.0],
        help="training times in minutes",
    )
    parser.add_argument("--stories", type=int, default=300, help="number of validation stories")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train for each number of minutes and print loss and lower bound."""
    width, path = arguments.tokens, ROOT / "configs" / "quickstart.yaml"
    base = load_config(path, [])
    rows = []
    for minutes in arguments.minutes:
        config = load_config(
            path,
            [f"run.dir=runs/short-context-{width}-{minutes:g}", f"data.seq_len={width}",
             f"train.batch_size={base.train.batch_size * base.data.seq_len // width}",
             f"model.max_seq_len={base.data.seq_len}", f"train.max_minutes={minutes}", "train.max_steps=null",
             "train.eval_every=null", "train.sample_every=null", "data.packing=contiguous",
             f"data.max_documents={max(base.data.max_documents, int(15000 * minutes))}"],
        )  # fmt: skip
        trainer = build_trainer(config)
        trainer.train()
        tokenizer, tokens = trainer.corpus.tokenizer, trainer.state.tokens
        generated = (
            tales.generate_story(config.run.seed, index)
            for index in range(config.data.max_documents)
        )
        by_text = {story.text: story for story in generated}
        stories = [
            by_text[tokenizer.decode(shard.tokens[start:end].tolist())]
            for shard in trainer.corpus.val.shards
            for start, end in zip(shard.offsets[:-1], shard.offsets[1:])
        ][: arguments.stories]
        entropy, lower_bound = compute_bounds(tokenizer, stories, width)
        loss = sliding_window_loss(
            trainer.model, tokenizer, [story.text for story in stories], width
        )
        rows.append(
            {
                "minutes": minutes,
                "tokens": tokens,
                "loss": loss,
                "entropy": entropy,
                "bound": lower_bound,
            }
        )
        print(
            f"{minutes:g} minutes, {tokens:,} tokens: {loss:.4f} nats per token, {loss / entropy:.3f} times the "
            f"entropy {entropy:.4f}; the lower bound with {width} tokens is {lower_bound / entropy:.3f} times"
        )
    return {"tokens": width, "runs": rows}


@torch.no_grad()
def sliding_window_loss(
    model: Thinker, tokenizer: Tokenizer, stories: list[str], width: int
) -> float:
    """Nats per token over whole stories, with each token predicted from at most `width` tokens
    before it."""
    model.eval()
    nats, n_targets = 0.0, 0
    for story in stories:
        ids = torch.tensor([tokenizer.bos_id, *tokenizer.encode(story), tokenizer.eos_id])
        inputs, targets = ids[:-1], ids[1:]
        log_probs = (
            model(inputs[None, :width])[0].float().log_softmax(-1)
        )  # (width, V): their whole context fits
        nats -= log_probs.gather(1, targets[:width, None]).sum().item()
        if len(inputs) > width:
            windows = inputs.unfold(0, width, 1)[1:]  # (n, width)
            log_probs = (
                model(windows, last_logits_only=True)[:, 0].float().log_softmax(-1)
            )  # (n, V)
            nats -= log_probs.gather(1, targets[width:, None]).sum().item()
        n_targets += len(targets)
    return nats / n_targets


def compute_bounds(
    tokenizer: Tokenizer, stories: list[tales.Story], width: int
) -> tuple[float, float]:
    """The entropy, and the lower bound of the loss with windows of `width` tokens, both in nats per
    token.

    The bound adds the cost of each mention of a fact whose word does not occur in the window before
    it. Facts are sampled independently and uniformly, so such a mention costs as much as the first
    one. Of a name only what its gender leaves open is added, because a pronoun may give the gender
    away.
    """
    entropy = lost = n_tokens = 0.0
    for story in stories:
        token_ends, end = [], 0  # in bytes
        for token in tokenizer.encode(story.text):
            end += len(tokenizer.token_bytes(token))
            token_ends.append(end)
        entropy -= story.log_prob
        n_tokens += len(token_ends) + 1
        for choice in story.choices:
            if choice.kind != "fact":
                continue
            nats = -choice.log_prob - (LN_2 if choice.name in ("hero", "friend") else 0.0)
            previous = None  # the last token of the previous mention
            for match in re.finditer(rf"\b{re.escape(choice.value)}\b", story.text, re.IGNORECASE):
                first_token = sum(end <= match.start() for end in token_ends)
                if previous is not None and first_token - previous > width:
                    lost += max(nats, 0.0)
                previous = sum(end <= match.end() - 1 for end in token_ends)
    return entropy / n_tokens, (entropy + lost) / n_tokens
