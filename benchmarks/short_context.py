"""How much of `tales` can be learned from the last 16 tokens alone?

    python benchmarks/short_context.py [--tokens 16] [--minutes 3 6 12]

Trains the quickstart's model on windows of that many tokens, for longer and longer, and measures the loss of whole
validation stories where each token is predicted from the tokens in such a window before it, no more. Beside it stands
a bound that no training can beat: a fact whose last mention lies outside the window is, for who sees the window alone,
as uncertain as when it was drawn. One line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch

from thinker.benchmarks.environment import describe
from thinker.data import tales
from thinker.data.tokenizer import Tokenizer
from thinker.model import Thinker
from thinker.training.config import load_config
from thinker.training.trainer import Trainer

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"


@torch.no_grad()
def sliding_loss(model: Thinker, tokenizer: Tokenizer, stories: list[str], width: int) -> float:
    """Nats a token over whole stories, each token predicted from at most `width` tokens before it."""
    model.eval()
    nats, count = 0.0, 0
    for story in stories:
        ids = torch.tensor([tokenizer.bos_id, *tokenizer.encode(story), tokenizer.eos_id])
        inputs, targets = ids[:-1], ids[1:]
        log_probs = model(inputs[None, :width])[0].float().log_softmax(-1)  # the first positions see all there is
        nats -= log_probs.gather(1, targets[:width, None]).sum().item()
        if len(inputs) > width:
            windows = inputs.unfold(0, width, 1)[1:]  # (n, width)
            log_probs = model(windows, last_logits_only=True)[:, 0].float().log_softmax(-1)  # (n, V)
            nats -= log_probs.gather(1, targets[width:, None]).sum().item()
        count += len(targets)
    return nats / count


def bound(tokenizer: Tokenizer, stories: list[str], width: int) -> tuple[float, float]:
    """(entropy, entropy plus what is n_evicted outside the window) in nats a token.

    Counted is each mention of a fact whose word stands nowhere in the `width` tokens before it: facts are drawn
    independently and uniformly, so that it costs as much as when it was drawn. Of a name only what its gender, which
    a pronoun may give away, leaves open is counted, and of a word in two mentions within the window the first.
    """
    entropy = n_evicted = count = 0.0
    for text in stories:
        story = tales.parse(text)
        ids = tokenizer.encode(text)
        ends, at = [], 0
        for token in ids:
            at += len(tokenizer.token_bytes(token))
            ends.append(at)
        entropy -= story.log_prob
        count += len(ids) + 1
        for choice in story.choices:
            if choice.kind != "fact":
                continue
            nats = -choice.log_prob - (0.6932 if choice.name in ("hero", "friend") else 0.0)
            last = None
            for match in re.finditer(rf"\b{re.escape(choice.value)}\b", text, re.IGNORECASE):
                token = sum(end <= match.start() for end in ends)  # the token in which the word begins
                if last is not None and token - last > width:
                    n_evicted += max(nats, 0.0)
                last = sum(end <= match.end() - 1 for end in ends)
    return entropy / count, (entropy + n_evicted) / count


def main() -> None:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--minutes", type=float, nargs="+", default=[3.0, 6.0, 12.0])
    parser.add_argument("--stories", type=int, default=300)
    arguments = parser.parse_args()
    width = arguments.tokens
    result = {"benchmark": "short_context", "tokens": width, "machine": describe(), "runs": []}
    for minutes in arguments.minutes:
        base = load_config(QUICKSTART, [])
        batch = base.train.batch_size * base.data.seq_len // width
        config = load_config(
            QUICKSTART,
            [f"run.dir=runs/short-context-{width}-{minutes:g}", f"data.seq_len={width}", f"train.batch_size={batch}",
             f"model.max_seq_len={base.data.seq_len}", f"train.max_minutes={minutes}", "train.max_steps=null",
             "train.eval_every=null", "train.sample_every=null", "data.packing=contiguous",
             f"data.max_documents={max(base.data.max_documents, int(15000 * minutes))}"],
        )  # fmt: skip
        trainer = Trainer(config)
        trainer.train()
        state = trainer.state
        tokenizer = trainer.corpus.tokenizer
        stories = []
        for shard in trainer.corpus.val.shards:
            for start, end in zip(shard.offsets[:-1], shard.offsets[1:]):
                stories.append(tokenizer.decode(shard.tokens[start:end].tolist()))
        stories = stories[: arguments.stories]
        entropy, least = bound(tokenizer, stories, width)
        loss = sliding_loss(trainer.model, tokenizer, stories, width)
        run = {
            "minutes": minutes,
            "tokens_seen": state.tokens,
            "loss": loss,
            "entropy": entropy,
            "bound": least,
        }
        result["runs"].append(run)
        print(
            f"{minutes:g} minutes, {state.tokens:,} tokens: {loss:.4f} nats a token, {loss / entropy:.3f} times the "
            f"entropy {entropy:.4f}; no training on {width} tokens can come below {least / entropy:.3f}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
