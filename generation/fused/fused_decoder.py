"""The decoder on a GPU: a step of all texts by few launches of fused kernels, in a CUDA graph."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence as AbstractSequence

import torch
from torch import Tensor

from thinker.generation.decoders.cache_buffers import CacheBuffers, rounded_capacity
from thinker.generation.decoders.decoder import Decoder
from thinker.generation.decoders.plain_decoder import PlainDecoder
from thinker.generation.fused.batch_step import is_dense
from thinker.generation.fused.captured_step import CapturedStep
from thinker.generation.fused.decode_buffers import MAX_STEPS, next_power_of_2
from thinker.generation.fused.fused_step import unsupported
from thinker.generation.sequence import SampledToken, Sequence
from thinker.model import KVCache, proof
from thinker.model.inspection.open_hooks import has_open_hooks
from thinker.runtime.device import to_device
from thinker.runtime.errors import UserError

LEAST_TEMPERATURE = 1e-5  # below, other than 0, the kernels would round it up
MOST_TEMPERATURE = 1e30  # above, it might be infinite in fp32


class FusedDecoder(PlainDecoder):
    """Reads and samples tokens with the kernels of this folder (see Decoder).

    Prompts and drafts are read by the model, texts with filters or constraints are sampled by the
    sampler. Before a step is used, it proves that it has the logits of the model and samples from
    them; if it does not, or fails, another decoder runs all.

    Attributes:
        fused_problem: why the kernels are not used, or "".
    """

    name = "fused kernels"
    option = "compile"

    def __init__(self, fallback: Decoder) -> None:
        """`fallback`: a decoder of a fused model (see fuse_for_inference()), which decodes what
        the kernels do not."""
        super().__init__(fallback.model, fallback.kernel_problem)
        self.fallback = fallback
        self.fused_problem = ""
        unknown = unsupported(self.model)
        if unknown:
            self.fused_problem = f"the kernels do not know {unknown}"
        self._is_dense = not unknown and is_dense(self.model)
        # Hooks of torch, which a user may register at any time.
        self._hooks: list[dict] = []
        self._tensors: list[dict[str, Tensor | None]] = []  # weights, which a user may replace
        for module in self.model.modules():
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]
            self._tensors += [module._parameters, module._buffers]
        self._addresses: list[int] = []  # of the weights, on which the steps were made
        self._seconds = 0.0  # spent on compiling and on capturing
        self._buffers: CacheBuffers | None = None  # where caches move to
        self._steps: dict[int, CapturedStep] = {}  # on their tensors, by number of texts
        self._pool: list[Tensor] = []  # keys of the layers of a cache whose rows come and go
        self._pool_steps: dict[int, CapturedStep] = {}

    @property
    def compile_seconds(self) -> float:
        """As Decoder.compile_seconds."""
        return self._seconds + self.fallback.compile_seconds

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """As Decoder.step()."""
        step = None
        if tokens.shape[1] == 1:
            step = self._step_for(cache, len(tokens))
        if step is None:
            return self.fallback.step(tokens, cache)
        positions = cache.reserve(*tokens.shape)
        return step.run(tokens, list(range(len(tokens))), positions)

    @torch.no_grad()
    def sample(
        self,
        sequences: list[Sequence],
        cache: KVCache | None,
        logits: Tensor,
        max_steps: int,
        rows: list[int] | None = None,
    ) -> list[list[SampledToken]]:
        """As Decoder.sample()."""
        step = None
        is_whole = cache is not None and rows is None
        if is_whole and all(map(_is_simple, sequences)):
            step = self._step_for(cache, len(sequences))
        if step is None:
            return super().sample(sequences, cache, logits, max_steps, rows)
        B = len(sequences)
        n_steps = min(MAX_STEPS, max_steps)
        positions = cache.reserve(B, n_steps - 1)
        return step.sample(sequences, logits, list(range(B)), positions, n_steps)

    def reads_rows(self, kind: type[KVCache]) -> bool:
        """As Decoder.reads_rows()."""
        if self.fused_problem and not self.fallback.reads_rows(kind):
            return False
        return super().reads_rows(kind)

    @torch.no_grad()
    def read(
        self,
        cache: KVCache,
        rows: list[int],
        tokens: list[int] | Tensor,
        wanted: AbstractSequence[int],
    ) -> Tensor:
        """As PlainDecoder.read(). The kernels read a pass in which each row has one token."""
        step = None
        if wanted and len(set(rows)) == len(rows):
            step = self._pool_step(cache, len(rows))
        if step is None:
            return super().read(cache, rows, tokens, wanted)
        if not isinstance(tokens, Tensor):
            tokens = to_device(tokens, self.model.device)
        logits = step.run(tokens[:, None], rows, cache.reserve_rows(rows, 1))[:, 0]
        if list(wanted) == list(range(len(rows))):
            return logits
        return logits[to_device(list(wanted), logits.device)]

    def _sample_rows(
        self,
        sequences: list[Sequence],
        cache: KVCache,
        logits: Tensor,
        n_steps: int,
        rows: list[int],
    ) -> list[list[SampledToken]]:
        """As PlainDecoder._sample_rows()."""
        step = None
        if all(map(_is_simple, sequences)):
            step = self._pool_step(cache, len(rows))
        if step is None:
            return super()._sample_rows(sequences, cache, logits, n_steps, rows)
        positions = cache.reserve_rows(rows, n_steps - 1)
        return step.sample(sequences, logits, rows, positions, n_steps)

    def _step_for(self, cache: KVCache, n_texts: int) -> CapturedStep | None:
        """The step of so many texts, on whose tensors the cache lies; None if there is none."""
        if not self._can_run(cache, n_texts):
            return None
        needed = rounded_capacity(cache)
        n_rows = next_power_of_2(len(cache.lengths))
        buffers = self._buffers
        if buffers is None or buffers.shape[0] < n_rows or buffers.shape[1] < needed:
            self._steps = {}  # frees their memory first
            self._buffers = buffers = None
            try:
                buffers = CacheBuffers(self.model, n_rows, needed)
            except (torch.OutOfMemoryError, UserError) as error:
                self._give_up(f"the kernels failed: {_first_line(error)}")
                return None
            self._buffers = buffers
        step = self._prove_once(self._steps, buffers.buffers, n_texts)
        if step is not None:
            buffers.adopt(cache)
        return step

    def _pool_step(self, cache: KVCache, n_texts: int) -> CapturedStep | None:
        """The step of so many rows of a cache that stays where it is; None if there is none."""
        if not self._can_run(cache, n_texts):
            return None
        keys = [layer.keys for layer in cache.layers]
        is_known = len(keys) == len(self._pool) and all(map(operator.is_, keys, self._pool))
        if not is_known:
            self._pool_steps = {}
            self._pool = keys
        return self._prove_once(self._pool_steps, cache, n_texts)

    def _can_run(self, cache: KVCache, n_texts: int) -> bool:
        """Whether the kernels know what is asked for."""
        if self.fused_problem or type(cache) is not KVCache:
            return False
        if has_open_hooks(self.model) or any(self._hooks):
            return False
        return n_texts == 1 or self._is_dense

    def _prove_once(
        self, steps: dict[int, CapturedStep], cache: KVCache, n_texts: int
    ) -> CapturedStep | None:
        """The step of at least `n_texts` texts on the tensors of a cache, proved when it is made;
        None if it computes something else."""
        n_texts = next_power_of_2(n_texts)
        addresses = self._current_addresses()
        if addresses != self._addresses:  # the kernels would read freed memory
            self._steps.clear()
            self._pool_steps.clear()
            self._addresses = addresses
        if n_texts not in steps:
            start = time.perf_counter()
            try:
                step = CapturedStep(self.model, cache, n_texts)
                if step.agrees_with_model():
                    steps[n_texts] = step
                else:
                    self._give_up("the model computes something else than the kernels")
            except Exception as error:  # of a compiler or a card that they were not tried on
                self._give_up(f"the kernels failed: {_first_line(error)}")
            self._seconds += time.perf_counter() - start
        return steps.get(n_texts)

    def _current_addresses(self) -> list[int]:
        """Where the weights are; none if they have no values, as in traces."""
        addresses: list[int] = []
        if proof.is_fake(self.model):
            return addresses
        for tensors in self._tensors:
            for tensor in tensors.values():
                if tensor is not None:
                    addresses.append(tensor.data_ptr())
        return addresses

    def _give_up(self, problem: str) -> None:
        """Decode without kernels from now on, which frees their memory."""
        self.fused_problem = problem
        self._steps = {}
        self._buffers = None
        self._pool = []
        self._pool_steps = {}

    def report(self) -> str:
        """As Decoder.report()."""
        if self.fused_problem:
            return f"decoded without fused kernels: {self.fused_problem}"
        return self.fallback.report()


def _first_line(error: Exception) -> str:
    """What an error says, without the rest."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_simple(sequence: Sequence) -> bool:
    """Whether the kernels can sample a sequence."""
    temperature = sequence.params.temperature
    is_known = temperature == 0 or LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE
    return sequence.is_unfiltered and sequence.constraint is None and is_known
