"""A decoder runs the model on new tokens and samples from its logits: the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from typing import Protocol

from torch import Tensor

from thinker.generation.sequence import SampledToken, Sequence
from thinker.model import KVCache, Thinker

PREFILL_CHUNK = 512  # positions per pass, which bounds the memory
TOKENS_PER_STEP = 64  # of a continuous batch on a CPU, so that a long prompt delays nobody for long


class Decoder(Protocol):
    """Runs a model on new positions of a cache.

    Attributes:
        model: the model, prepared for inference.
        name: what runs its steps, for people.
        option: the option of Generator() that asks for this decoder, for messages.
        is_exact: whether its logits are those of the model, up to rounding.
        is_batch_invariant: whether a text has the same logits, to the bit, in any batch and however
            it is split into passes.
        has_kernels: whether the matrices of its model use kernels in C.
        kernel_problem: why they do not run the model, although nobody asked for that; or "".
        steps_per_read: tokens per row that sample() may draw before the end of a text is known.
        compile_seconds: time spent on compiling so far.
        tokens_per_step: to read in a step of a continuous batch, if it reads rows.
        rows_problem: why it does not read rows, after reads_rows() said so; "" if it never does.
    """

    model: Thinker
    name: str
    option: str
    is_exact: bool
    is_batch_invariant: bool
    has_kernels: bool
    kernel_problem: str
    steps_per_read: int
    compile_seconds: float
    tokens_per_step: int
    rows_problem: str

    @staticmethod
    def supports(kind: type[KVCache]) -> bool:
        """Whether it can read caches of this class."""

    def reads_rows(self, kind: type[KVCache]) -> bool:
        """Whether it is a RowDecoder for caches of this class."""

    def prefill(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Read tokens (B, T) into a cache. Returns the logits after the last ones, (B, 1, V)."""

    def step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Read the newest token of each row, and drafts after it: (B, T) -> logits (B, T, V)."""

    def sample(
        self,
        sequences: list[Sequence],
        cache: KVCache | None,
        logits: Tensor,
        max_steps: int,
        rows: list[int] | None = None,
    ) -> list[list[SampledToken]]:
        """Sample 1 to `max_steps` tokens per sequence, the first from logits (B, 1, V).

        All of them but the last are read into the cache. `rows`: the rows of the sequences in the
        cache (default: all, in order).
        """

    def report(self) -> str:
        """What it says about its steps, for people; "" if nothing."""


class RowDecoder(Decoder, Protocol):
    """A decoder that reads any tokens of any rows in one pass."""

    def read(
        self, cache: KVCache, rows: list[int], tokens: list[int], wanted: AbstractSequence[int]
    ) -> Tensor:
        """Append each token to its row of a cache, in any order of rows.

        Returns the logits after the tokens with the indices `wanted`, (len(wanted), V).
        """


def pass_lengths(cache: KVCache, length: int, block: int | None) -> Iterator[int]:
    """Cut the next `length` positions of a cache into passes. The first one holds a whole prefix.

    `block`: a pass ends at a multiple of it, if it is not None.
    """
    start = cache.lengths[0]
    end = start + length
    while start < end:
        limit = PREFILL_CHUNK if block is None else block - start % block
        n = min(max(limit, cache.prefix - start), end - start)
        yield n
        start += n
