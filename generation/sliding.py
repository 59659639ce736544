"""Texts longer than the context: at the border the model goes on from the newest half, read again from position 0."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion, Sequence
from thinker.model import KVCache


def decode_sliding(
    generator: Any, sequences: list[Sequence], start: Callable[[list[Sequence]], tuple[KVCache | None, Tensor]]
) -> Iterator[tuple[int, str]]:
    """Decode sequences, and again all those that stopped at the border, until every text has ended.

    start(sequences) reads them: it returns a cache that holds them and the logits after each, (B, 1, V).

    A sequence slides alone: when it has context_len + 1 tokens, the last of which the model has not read, it reads the
    newest context_len // 2 as a text of their own. What it samples is as if every step had read these tokens from
    scratch, in a batch too. Penalties still count the whole text.
    """
    while sequences:
        yield from generator.decode(sequences, *start(sequences))
        for sequence in sequences if generator.window is not None else ():
            sequence.completion.n_evicted = max(0, len(sequence.tokens) - 1 - generator.sinks - generator.window)
        sequences = [sequence for sequence in sequences if sequence.completion.finish_reason != "stop"]
        sequences = [sequence for sequence in sequences if sequence.n_after_sliding]
        for sequence in sequences:
            _slide(sequence, generator.context_len)


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


def continue_text(generator: Any, tokens: list[int], n_known: int, params: SamplingParams) -> Sequence:
    """A sequence that goes on from a text of any length, whose tokens after the first `n_known` are new.

    It has forgotten what a text that was sampled to this length has, but no new tokens. Raises UserError if these do
    not fit into the context, or the whole text where the Generator does not slide.
    """
    context_len, n_forgotten = generator.context_len, 0
    if generator.slide and len(tokens) > context_len:
        per_slide = context_len + 1 - kept_when_sliding(context_len)
        n_forgotten = min(math.ceil((len(tokens) - context_len) / per_slide) * per_slide, n_known)
    completion = Completion("", n_slides=int(n_forgotten > 0))
    sequence = generator.new_sequence(0, completion, params, tokens[n_forgotten:])
    sequence.forgotten = tokens[:n_forgotten]
    return sequence


def describe_context_end(generator: Any, completions: list[Completion], max_new_tokens: int) -> dict[str, str]:
    """What happened to texts at the end of the Generator's context: a name for each thing, and the line to say once."""
    lines = {}
    if any(completion.n_slides for completion in completions):
        newest = f"the newest {kept_when_sliding(generator.context_len)} tokens are read again there; --no-slide stops"
        lines["slid"] = f"longer than the model's context of {generator.context_len} tokens: {newest}"
    if any(one.finish_reason == "length" and len(one.token_ids) < max_new_tokens for one in completions):
        hint = "; with --window W it continues, remembering the newest W tokens" if generator.supports_window else ""
        lines["ended"] = f"the text ends where the model's context does, at {generator.context_len} tokens{hint}"
    sinks, window = generator.sinks, generator.window
    end = sinks + max(completion.n_evicted for completion in completions)
    if end > sinks:
        evicted = f"evicted at the end: tokens {sinks + 1} to {end} of {end + window + 1}"
        lines["evicted"] = f"{evicted}; remembered: the first {sinks} and the newest {window}"
    return lines
