"""The likelihood of a text under a Generator's model."""

from typing import Any

import torch
from tqdm import tqdm

from thinker.data.tokenizers.text_bytes import count_bytes
from thinker.generation.batch_sampling import top_logprobs
from thinker.generation.prompts import check_text, pass_lengths
from thinker.generation.sequence import Score
from thinker.runtime.checks import check_computed, describe
from thinker.runtime.errors import UserError


@torch.no_grad()
def score_text(generator: Any, text: str, n_top: int = 0, progress: bool = False) -> Score:
    """Compute the log-probability of every token of a text.

    A text longer than the context is read in windows that overlap by half; with `window`, it is read in one pass.
    Tokens inside a bidirectional prefix are not counted. `n_top`: number of top log-probabilities per position.
    `progress`: show a progress bar. Raises UserError if the whole text is inside the bidirectional prefix.
    """
    if type(n_top) is not int or n_top < 0:
        raise UserError(f"n_top is {describe(n_top)}; use an integer of at least 0")
    ids = generator.tokenizer.encode(check_text(text, "the text"))
    tokens = [generator.tokenizer.bos_id, *ids]
    n_skipped = max(0, generator.config.prefix - 1)  # ids inside the prefix
    if n_skipped and len(ids) <= n_skipped:
        prefix = f"the model's bidirectional prefix ({n_skipped + 1}); use a longer text"
        raise UserError(f"the text has {len(tokens)} tokens, all inside {prefix}")
    logprobs: list[float] = []
    likeliest: list[dict[int, float]] = []
    start, bar = (
        0,
        tqdm(
            desc="scoring",
            total=len(ids),
            unit=" tokens",
            leave=False,
            delay=1,
            disable=not progress,
        ),
    )
    while n_skipped + len(logprobs) < len(ids):
        end = min(start + generator.context_len, len(ids))
        cache = generator.new_cache(generator.model, 1, end - start)
        chunk_start = start  # tokens[start:end] predict ids[start:end]
        for length in pass_lengths(0, end - start, generator.config.prefix, generator.cache_bits):
            chunk = tokens[chunk_start : chunk_start + length]
            logits = generator.model(
                torch.tensor([chunk], device=generator.model.device), cache=cache
            )[0]
            logits = logits[
                :, : generator.tokenizer.vocab_size
            ].float()  # ids above the tokenizer's are padding
            n_counted = n_skipped + len(logprobs)
            new = logits.log_softmax(dim=-1)[
                max(0, n_counted - chunk_start) :
            ]  # (T, V), not yet counted
            targets = torch.tensor(ids[n_counted : chunk_start + len(chunk)], device=new.device)
            bar.update(len(targets))
            if len(targets):
                logprobs += new.gather(1, targets[:, None])[:, 0].tolist()
                likeliest += [top_logprobs(row, n_top) for row in new] if n_top else []
            chunk_start += length
        start = max(0, end - max((end - start) // 2, n_skipped))
    bar.close()
    check_computed(logprobs)
    return Score(
        ids[n_skipped:], logprobs, likeliest, count_bytes(generator.tokenizer, text, ids, n_skipped)
    )
