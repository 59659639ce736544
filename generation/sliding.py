"""Texts longer than the context: at the border the model goes on from the newest half, read again from position 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from thinker.generation.sequence import Completion, Sequence


def decode_sliding(
    sequences: list[Sequence], decode: Callable[[list[Sequence]], Iterator[tuple[int, str]]], context_len: float
) -> Iterator[tuple[int, str]]:
    """decode(sequences), and again all those that stopped at the border, until every text has ended.

    A sequence slides alone: when it has context_len + 1 tokens, the last of which the model has not read, it reads the
    newest context_len // 2 as a text of their own. What it samples is as if every step had read these tokens from
    scratch, in a batch too. Penalties still count the whole text.
    """
    while sequences:
        yield from decode(sequences)
        sequences = [sequence for sequence in sequences if sequence.completion.finish_reason != "stop"]
        sequences = [sequence for sequence in sequences if sequence.n_after_sliding]
        for sequence in sequences:
            _slide(sequence, int(context_len))


def _slide(sequence: Sequence, context_len: int) -> None:
    n_kept = kept_when_sliding(context_len)
    n_before = len(sequence.tokens) - n_kept
    sequence.forgotten += sequence.tokens[:n_before]
    sequence.tokens = sequence.tokens[n_before:]
    sequence.n_remaining = min(sequence.n_after_sliding, context_len + 1 - n_kept)
    sequence.n_after_sliding -= sequence.n_remaining
    sequence.completion.n_slides += 1


def kept_when_sliding(context_len: int) -> int:
    """The number of tokens that are read again."""
    return max(1, context_len // 2)


def describe_context_end(generator: Any, completions: list[Completion], max_new_tokens: int) -> Iterator[str]:
    """What to say, once, of texts that reached the end of the Generator's context: a line per thing that happened."""
    if n_slides := max(completion.n_slides for completion in completions):
        newest = f"the newest {kept_when_sliding(generator.context_len)} tokens were read again, {n_slides} time(s)"
        yield f"longer than the model's context of {generator.context_len} tokens: there {newest}; --no-slide stops"
    if any(one.finish_reason == "length" and len(one.token_ids) < max_new_tokens for one in completions):
        hint = "; with --window W it continues, remembering the newest W tokens" if generator.supports_window else ""
        yield f"the text ends where the model's context does, at {generator.context_len} tokens{hint}"
    sinks, window = generator.sinks, generator.window
    end = sinks + max(completion.n_evicted for completion in completions)
    if end > sinks:
        evicted = f"evicted at the end: tokens {sinks + 1} to {end} of {end + window + 1}"
        yield f"{evicted}; remembered: the first {sinks} and the newest {window}"
