"""Texts longer than the context: when it is full, the model continues from the newest half, read from position 0."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from thinker.features.retrieval.block_store import stored_bytes
from thinker.features.retrieval.retrieval_cache import n_stored_blocks
from thinker.generation.sampler import SamplingParams
from thinker.generation.sequence import Completion, Sequence
from thinker.model import KVCache
from thinker.runtime.memory import format_bytes


def decode_sliding(
    generator: Any,
    sequences: list[Sequence],
    start: Callable[[list[Sequence]], tuple[KVCache | None, Tensor]],
) -> Iterator[tuple[int, str]]:
    """Decode sequences until every text has ended, sliding those that fill the context.

    start(sequences) reads them; it returns their cache and the logits after each, (B, 1, V).
    When a sequence has context_len + 1 tokens, it continues from its newest context_len // 2 tokens as a new text. The
    samples equal those of reading these tokens from scratch at every step. Penalties still count the whole text.
    """
    while sequences:
        yield from generator.decode(sequences, *start(sequences))
        for sequence in sequences if generator.window is not None else ():
            _count_evicted(generator, sequence)
        sequences = [
            sequence for sequence in sequences if sequence.completion.finish_reason != "stop"
        ]
        sequences = [sequence for sequence in sequences if sequence.n_after_sliding]
        for sequence in sequences:
            slide(sequence, generator.context_len)


def _count_evicted(generator: Any, sequence: Sequence) -> None:
    n_read, completion = len(sequence.tokens) - 1, sequence.completion
    window, sinks, block = generator.window, generator.sinks, generator.retrieve_block
    completion.n_evicted = max(0, n_read - sinks - window)
    if generator.retrieve:
        n_blocks = n_stored_blocks(n_read, window, sinks, block)
        completion.n_evicted = n_blocks * block
        completion.stored_bytes = stored_bytes(generator.config, n_blocks, block)


def slide(sequence: Sequence, context_len: int) -> None:
    """Make the newest half of a full context a new text."""
    n_kept = kept_when_sliding(context_len)
    n_before = len(sequence.tokens) - n_kept
    sequence.forgotten += sequence.tokens[:n_before]
    sequence.tokens = sequence.tokens[n_before:]
    sequence.n_remaining = min(sequence.n_after_sliding, context_len + 1 - n_kept)
    sequence.n_after_sliding -= sequence.n_remaining
    sequence.completion.n_slides += 1


def kept_when_sliding(context_len: int) -> int:
    """Number of tokens that are kept when a text slides."""
    return max(1, context_len // 2)


def continue_text(
    generator: Any, tokens: list[int], n_known: int, params: SamplingParams
) -> Sequence:
    """Return a sequence that continues a text whose tokens after the first `n_known` are new. May raise UserError."""
    context_len, n_forgotten = generator.context_len, 0
    if generator.slide and len(tokens) > context_len:
        per_slide = context_len + 1 - kept_when_sliding(context_len)
        n_forgotten = min(math.ceil((len(tokens) - context_len) / per_slide) * per_slide, n_known)
    completion = Completion("", n_slides=int(n_forgotten > 0))
    sequence = generator.new_sequence(0, completion, params, tokens[n_forgotten:])
    sequence.forgotten = tokens[:n_forgotten]
    return sequence


def describe_context_end(
    generator: Any, completions: list[Completion], max_new_tokens: int
) -> dict[str, str]:
    """Describe what happened at the end of the context: lines to print once, by name."""
    lines = {}
    if any(completion.n_slides for completion in completions):
        kept = f"its newest {kept_when_sliding(generator.context_len)} (see --no-slide)"
        lines["slid"] = (
            f"the context of {generator.context_len} tokens is full: the text continues from {kept}"
        )
    short = [
        one
        for one in completions
        if one.finish_reason == "length" and len(one.token_ids) < max_new_tokens
    ]
    if any(one.prompt_tokens + len(one.token_ids) > generator.context_len for one in short):
        hint = "; use --window N for longer texts" if generator.supports_window else ""
        lines["ended"] = f"stopped at the end of the context ({generator.context_len} tokens){hint}"
    sinks, window = generator.sinks, generator.window
    end = sinks + max(completion.n_evicted for completion in completions)
    if end > sinks:
        evicted = f"evicted tokens {sinks + 1} to {end} of {end + window + 1}"
        lines["evicted"] = f"{evicted}; the window keeps the first {sinks} and the newest {window}"
    if generator.retrieve and end > sinks:
        size = format_bytes(sum(completion.stored_bytes for completion in completions))
        used = (
            f"each query retrieves up to {generator.retrieve} blocks of {generator.retrieve_block}"
        )
        lines["evicted"] = f"stored tokens {sinks + 1} to {end} in {size}; {used}"
    return lines
