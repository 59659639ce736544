"""The plain decoder: it calls a copy of the model, whose modules inference_model.py has replaced by
equal, faster ones as far as choose_model.py found them equal."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinker.generation.decoders.decoder import TOKENS_PER_STEP, pass_lengths
from thinker.generation.sampler import sample_steps
from thinker.generation.sequence import SampledToken, Sequence
from thinker.model import KVCache, Thinker

if TYPE_CHECKING:
    from thinker.generation.decoders.packed_read import PackedReader

STEPS_PER_READ = 16  # on a GPU: tokens per row to sample before the host waits for them
MAX_SECONDS = 0.01  # for them in a continuous batch, where a new text waits for their end
# On a GPU. An eager pass of the 124M model takes 6 ms on an H200, because it launches hundreds of
# kernels; the products of so many tokens need about 1 ms of that.
GPU_TOKENS_PER_STEP = 2048


class PlainDecoder:
    """Calls the model for each step (see Decoder)."""

    name = "torch"
    option = ""
    is_exact = True
    is_batch_invariant = False
    has_kernels = False
    compile_seconds = 0.0
    rows_problem = ""

    def __init__(
        self, model: Thinker, kernel_problem: str = "", can_roll_back: bool = True
    ) -> None:
        """`can_roll_back`: whether caches can drop what was sampled after the end of a text."""
        self.model = model
        self.kernel_problem = kernel_problem
        self.steps_per_read = 1
        self.tokens_per_step = TOKENS_PER_STEP
        self.packs_rows = model.device.type == "cuda"
        if self.packs_rows:
            self.tokens_per_step = GPU_TOKENS_PER_STEP
            if can_roll_back:
                self.steps_per_read = STEPS_PER_READ
        self.seconds_per_step = math.inf  # of the newest steps of a continuous batch
        self._reader: PackedReader | None = None

    @staticmethod
    def supports(kind: type[KVCache]) -> bool:
        """As Decoder.supports()."""
        return True

    def reads_rows(self, kind: type[KVCache]) -> bool:
        """As Decoder.reads_rows(). The first call takes the time of a few passes."""
        if not self.packs_rows or kind is not KVCache:
            return False
        if self._reader is None and not self.rows_problem:
            # Imported where it is used, because only servers need it.
            from thinker.generation.decoders.packed_read import new_reader

            self._reader, self.rows_problem = new_reader(self.model)
        return self._reader is not None

    def read(
        self,
        cache: KVCache,
        rows: list[int],
        tokens: list[int] | Tensor,
        wanted: AbstractSequence[int],
    ) -> Tensor:
        """As PackedReader.read(), after reads_rows() has returned True."""
        return self._reader.read(cache, rows, tokens, wanted)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """As Decoder.prefill()."""
        lengths = pass_lengths(cache, tokens.shape[1], cache.pass_block)
        for chunk in tokens.split(list(lengths), dim=1):
            logits = self.model(chunk, cache=cache, last_logits_only=True)
        return logits

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """As Decoder.step()."""
        return self.model(tokens, cache=cache)

    def sample(
        self,
        sequences: list[Sequence],
        cache: KVCache | None,
        logits: Tensor,
        max_steps: int,
        rows: list[int] | None = None,
    ) -> list[list[SampledToken]]:
        """As Decoder.sample()."""
        n_steps = min(self.steps_per_read, max_steps)
        if any(sequence.constraint is not None for sequence in sequences):
            n_steps = 1  # the host decides what may come next
        if rows is not None:
            return self._sample_rows(sequences, cache, logits, n_steps, rows)
        return sample_steps(sequences, logits, n_steps, lambda tokens: self.step(tokens, cache))

    def _sample_rows(
        self,
        sequences: list[Sequence],
        cache: KVCache,
        logits: Tensor,
        n_steps: int,
        rows: list[int],
    ) -> list[list[SampledToken]]:
        """As sample(), for some rows of a cache, for up to MAX_SECONDS."""
        everything = range(len(rows))

        def step(tokens: Tensor) -> Tensor:
            return self.read(cache, rows, tokens[:, 0], everything)[:, None]

        n_steps = max(1, min(n_steps, int(MAX_SECONDS / self.seconds_per_step)))
        start = time.perf_counter()
        sampled = sample_steps(sequences, logits, n_steps, step)
        self.seconds_per_step = (time.perf_counter() - start) / n_steps
        return sampled

    def report(self) -> str:
        """As Decoder.report()."""
        return ""
