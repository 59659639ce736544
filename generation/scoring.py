"""The likelihood of a text under a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from thinker.data.tokenizers.text_bytes import count_bytes
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation.decoders.decoder import pass_lengths
from thinker.generation.ranking import top_logprobs
from thinker.generation.sampling_params import check_text
from thinker.model import KVCache, Thinker
from thinker.runtime.checks import check_computed, describe
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress


@dataclass(frozen=True)
class Score:
    """Likelihood of a text under the model, after the BOS token."""

    token_ids: list[int]
    logprobs: list[float]  # of each token given all earlier tokens, in nats
    top_logprobs: list[dict[int, float]]  # of the most likely tokens, per position
    n_bytes: int

    def __repr__(self) -> str:
        size = f"{len(self.token_ids):,} tokens, {self.n_bytes:,} bytes"
        return f"Score({size}: {self.nats:.4f} nats, {self.bits_per_byte:.4f} bits per byte)"

    @property
    def nats(self) -> float:
        """The negative log-likelihood of the whole text."""
        return math.fsum(-logprob for logprob in self.logprobs)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of UTF-8; 0 for an empty text."""
        return self.nats / math.log(2) / max(self.n_bytes, 1)


@torch.no_grad()
def score_text(
    model: Thinker,
    tokenizer: Tokenizer,
    new_cache: Callable[[int, int], KVCache],
    context_len: float,
    text: str,
    *,
    n_top: int = 0,
    progress: bool = False,
) -> Score:
    """Compute the log-probability of every token of a text.

    A text longer than the context is read in windows that overlap by half; with unbounded caches,
    it is read in one pass. Tokens inside a bidirectional prefix are not counted.

    Args:
        new_cache: from a number of rows and of positions to an empty cache.
        n_top: number of top log-probabilities per position.
        progress: show a progress bar.

    Raises UserError if the whole text is inside the bidirectional prefix.
    """
    if type(n_top) is not int or n_top < 0:
        raise UserError(f"n_top is {describe(n_top)}; use an integer of at least 0")
    ids = tokenizer.encode(check_text(text, "the text"))
    inputs = [tokenizer.bos_id, *ids]  # inputs[i] predicts ids[i]
    n_skipped = max(0, model.config.prefix - 1)  # ids inside the prefix
    if n_skipped and len(ids) <= n_skipped:
        prefix = f"the model's bidirectional prefix ({model.config.prefix})"
        raise UserError(
            f"the text has {len(inputs)} tokens, all inside {prefix}; use a longer text"
        )
    logprobs: list[float] = []
    likeliest: list[dict[int, float]] = []
    bar = Progress(
        desc="scoring", total=len(ids), unit=" tokens", leave=False, delay=1, disable=not progress
    )
    start = 0  # of the window
    while n_skipped + len(logprobs) < len(ids):
        end = min(start + context_len, len(ids))
        cache = new_cache(1, end - start)
        chunk_start = start
        for length in pass_lengths(cache, end - start, cache.pass_block):
            chunk_end = chunk_start + length
            n_counted = n_skipped + len(logprobs)
            chunk = torch.tensor([inputs[chunk_start:chunk_end]], device=model.device)  # (1, T)
            logits = model(chunk, cache=cache)[0, :, : tokenizer.vocab_size].float()
            new = logits.log_softmax(dim=-1)  # (T, V); ids above the tokenizer's are padding
            new = new[max(0, n_counted - chunk_start) :]  # those of the overlap are counted
            targets = torch.tensor(ids[n_counted:chunk_end], device=new.device)
            bar.update(len(targets))
            if len(targets):
                logprobs += new.gather(1, targets[:, None])[:, 0].tolist()
                if n_top:
                    likeliest += [top_logprobs(row, n_top) for row in new]
            chunk_start = chunk_end
        overlap = max((end - start) // 2, n_skipped)
        start = max(0, end - overlap)
    bar.close()
    check_computed(logprobs)
    n_bytes = count_bytes(tokenizer, text, ids, n_skipped)
    return Score(ids[n_skipped:], logprobs, likeliest, n_bytes)
