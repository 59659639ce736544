"""The decoder on a GPU: fused kernels for single texts, compiled steps for batches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from thinker.generation import sampler
from thinker.generation.decoders.compiled_decoder import (
    CacheBuffers,
    CompiledDecoder,
    rounded_capacity,
)
from thinker.generation.fused.fused_step import MAX_STEPS, FusedStep, unsupported
from thinker.generation.sampling_params import SamplingParams
from thinker.generation.sequence import SampledToken, Sequence
from thinker.model import KVCache, Thinker, proof
from thinker.model.inspection.open_hooks import has_open_hooks
from thinker.runtime.device import to_device

LEAST_TEMPERATURE = 1e-5  # below, other than 0, the kernels would round it up
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.03}
PROVED_LENGTH = 200  # tokens before the one whose logits are compared, where the cache has room
PROVED_UNIFORMS = (0.0, 0.25, 0.5, 0.75)
LOGPROB_TOLERANCE = 1e-3
OVERLAP_CAPABILITY = (9, 0)  # of cards with programmatic dependent launch


class FusedDecoder(CompiledDecoder):
    """Reads and samples tokens of single texts with the kernels of fused_kernels.py (see Decoder).

    Batches, drafts, filters and constraints run as in CompiledDecoder. At the first text, the
    kernels prove that they have the logits of the model and sample from them; if they do not, or
    fail, CompiledDecoder runs all. On a GPU, they are captured as CUDA graphs.

    Attributes:
        fused_problem: why the kernels are not used, or "".
    """

    def __init__(self, model: Thinker) -> None:
        super().__init__(model)
        self.fused_problem = ""
        unknown = unsupported(model)
        if unknown:
            self.fused_problem = f"the kernels do not know {unknown}"
        self._text: _TextBuffers | None = None

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """As Decoder.step()."""
        if tokens.shape != (1, 1) or has_open_hooks(self.model):
            return super().step(tokens, cache)
        buffers = self._buffers_for(cache)
        if buffers is None:
            return super().step(tokens, cache)
        buffers.adopt(cache)
        (position,) = cache.reserve(1, 1)
        return buffers.run(tokens, position)

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
        buffers = None
        if len(sequences) == 1 and cache is not None and _is_simple(sequences[0]):
            buffers = self._buffers_for(cache)
        if buffers is None or has_open_hooks(self.model):
            return super().sample(sequences, cache, logits, max_steps, rows)
        buffers.adopt(cache)
        n_steps = min(MAX_STEPS, max_steps)
        (position,) = cache.reserve(1, n_steps - 1)
        return [buffers.sample(sequences[0], logits, position, n_steps)]

    def _buffers_for(self, cache: KVCache) -> _TextBuffers | None:
        """The buffers of a text; None if the kernels do not run it."""
        if self.fused_problem or len(cache.lengths) != 1:
            return None
        capacity = rounded_capacity(cache)
        if self._text is None or self._text.shape != (1, capacity):
            self._text = None  # frees its memory first
            start = time.perf_counter()
            try:
                buffers = _TextBuffers(self.model, capacity)
                if buffers.agrees_with_model():
                    self._text = buffers
                else:
                    self.fused_problem = "the model computes something else than the kernels"
            except Exception as error:  # of a compiler or a card that they were not tried on
                first_line = (str(error).splitlines() or [type(error).__name__])[0]
                self.fused_problem = f"the kernels failed: {first_line}"
            self.compile_seconds += time.perf_counter() - start
        return self._text

    def report(self) -> str:
        """As Decoder.report()."""
        if self.fused_problem:
            return f"decoded without fused kernels: {self.fused_problem}"
        return ""


def _is_simple(sequence: Sequence) -> bool:
    """Whether the kernels can sample a sequence."""
    temperature = sequence.params.temperature
    is_known = temperature == 0 or temperature >= LEAST_TEMPERATURE
    return sequence.is_unfiltered and sequence.constraint is None and is_known


class _TextBuffers(CacheBuffers):
    """The tensors of a text with up to `capacity` positions; on a GPU, also CUDA graphs."""

    def __init__(self, model: Thinker, capacity: int) -> None:
        super().__init__(model, 1, capacity)
        self.model = model
        is_cuda = model.device.type == "cuda"
        overlap = is_cuda and torch.cuda.get_device_capability(model.device) >= OVERLAP_CAPABILITY
        self.fused = FusedStep(model, self.buffers, overlap)
        self._read = self.fused.step
        self._read_and_sample = self._step_and_sample
        if is_cuda:
            self._capture()

    def _step_and_sample(self) -> None:
        self.fused.step()
        self.fused.sample()

    def _capture(self) -> None:
        """Compile the kernels, and capture both graphs."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step_and_sample()  # adopt() clears what it writes
            self.fused.summarize()
        torch.cuda.current_stream().wait_stream(side)
        self._read = _graph_of(self.fused.step)
        self._read_and_sample = _graph_of(self._step_and_sample)

    def agrees_with_model(self) -> bool:
        """Whether the kernels have the logits of the model after a text with random keys, and
        sample from them as the sampler does."""
        position = min(PROVED_LENGTH, self.shape[1] - 1, self.model.config.max_seq_len - 1)
        noise = proof.Noise()
        cache = self.model.new_cache(1, position + 1)
        for layer, own in zip(cache.layers, self.buffers.layers):
            for stored, buffer in ((layer.keys, own.keys), (layer.values, own.values)):
                stored.copy_(noise(stored.shape))
                buffer[:, :, : position + 1] = stored
        cache.lengths = [position]
        cache.high_water = cache.high_water_before = [position]
        tokens = torch.full((1, 1), self.model.config.vocab_size // 2, device=self.model.device)
        known = self.model(tokens, cache=cache).float()
        found = self.run(tokens, position)
        if not proof.is_near(found, known, TOLERANCES[self.model.dtype]):
            return False
        return self._samples_alike(found[0])

    def _samples_alike(self, logits: Tensor) -> bool:
        """Whether the kernels draw from their logits (1, V) what the sampler draws."""
        fused = self.fused
        n = len(PROVED_UNIFORMS)
        uniforms = torch.tensor(PROVED_UNIFORMS, dtype=torch.float64, device=logits.device)
        fused.uniforms[:n] = uniforms
        for temperature in (0.0, 1.0):
            fused.temperatures.fill_(temperature)
            fused.n_sampled.zero_()
            fused.summarize()
            for _ in range(n):
                fused.sample()
            params = SamplingParams(1, temperature=temperature)
            rows = logits.expand(n, -1)
            known = sampler.sample(rows, params, uniforms, None, None)
            logprobs = rows.log_softmax(dim=-1).gather(1, known[:, None])[:, 0]
            if fused.sampled[:n].tolist() != known.tolist():
                return False
            if not proof.is_near(fused.logprobs[:n], logprobs, LOGPROB_TOLERANCE):
                return False
        return True

    def run(self, tokens: Tensor, position: int) -> Tensor:
        """Read a token (1, 1) at a position. Returns the logits after it, (1, 1, V)."""
        fused = self.fused
        fused.tokens.copy_(tokens[0])
        fused.positions.fill_(position)
        self._read()
        return fused.logits.clone().view(1, 1, -1)

    def sample(
        self, sequence: Sequence, logits: Tensor, position: int, n_steps: int
    ) -> list[SampledToken]:
        """Sample `n_steps` tokens after logits (1, 1, V), the first for the given position."""
        fused = self.fused
        uniforms = [sequence.uniform(step) for step in range(n_steps)]
        numbers = torch.tensor(uniforms, dtype=torch.float64, device="cpu")
        fused.uniforms[:n_steps] = to_device(numbers, fused.uniforms.device)
        fused.temperatures.fill_(sequence.params.temperature)
        fused.n_sampled.zero_()
        fused.positions.fill_(position - 1)
        fused.logits.copy_(logits[0, 0])
        fused.n_ids.fill_(sequence.tokenizer.vocab_size)
        fused.summarize()
        fused.sample()
        for _ in range(n_steps - 1):
            self._read_and_sample()
        tokens = fused.sampled[:n_steps].tolist()
        logprobs = fused.logprobs[:n_steps].tolist()
        return [(token, logprob, {}) for token, logprob in zip(tokens, logprobs)]


def _graph_of(run: Callable[[], None]) -> Callable[[], None]:
    """What runs the same kernels on the same tensors by one launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
