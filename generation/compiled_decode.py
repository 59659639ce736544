"""The one-token step compiled once, whatever the lengths; on a GPU replayed as a CUDA graph."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from thinker.model import KVCache, Thinker
from thinker.model.activations import is_open
from thinker.model.masks import ForwardContext
from thinker.runtime.errors import UserError


class CompiledThinker:
    """thinker(tokens, cache=cache) for one position a row, through torch.compile.

    On a CPU the length of the cache is a symbol of the one compiled program, which serves batches of one: larger ones
    spend their time in products that compiling does not change. On a GPU the cache is read in full under a mask, so
    that no shape ever changes, and the whole step is captured as a CUDA graph for each cache it meets.
    """

    def __init__(self, model: Thinker) -> None:
        self.model = model
        on_cpu = model.device.type == "cpu"
        options = {
            "pattern_matcher": False,  # it would put SDPA back, and copy the keys for it
            "cpp_wrapper": on_cpu,  # kernels called from C++: 3.5 % of a step of 110M parameters
            "size_asserts": False,
        }
        self._compiled = torch.compile(self._step, dynamic=on_cpu, fullgraph=True, options=options)
        self._graph: _Graph | None = None

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """tokens (B, 1) -> logits (B, 1, V)."""
        if is_open(self.model):
            raise UserError("a compiled model cannot be tapped or edited; leave compile out")
        if not tokens.is_cuda and len(tokens) > 1:
            return self.model(tokens, cache=cache)
        cache.fixed = tokens.is_cuda
        place = cache.append(*tokens.shape)
        rope = self.model.rope(place.positions, place.end, self.model.dtype)
        if not tokens.is_cuda:
            return self._compiled(tokens, rope, place, cache)
        given = [tokens, *rope, place.sights[0].allowed, place.sights[0].slots]
        if self._graph is None or not self._graph.fits(given, cache):
            self._graph = _Graph(self._compiled, given, place, cache)
        return self._graph.replay(given)

    def _step(self, tokens: Tensor, rope: tuple[Tensor, Tensor], place: ForwardContext, cache: KVCache) -> Tensor:
        return self.model.lm_head(self.model.forward_blocks(self.model.embedding(tokens), rope, place, cache))


class _Graph:
    """One step recorded on the GPU: what is given is copied into its own tensors, then it runs without the host."""

    def __init__(self, step, given: list[Tensor], place: ForwardContext, cache: KVCache) -> None:  # noqa: ANN001
        self.given = [tensor.clone() for tensor in given]
        self.buffer = cache.layers[0].keys
        tokens, cos, sin, allowed, slots = self.given
        sight = dataclasses.replace(place.sights[0], allowed=allowed, slots=slots)
        place = dataclasses.replace(place, sights=[sight] * len(place.sights))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles; writes the same position again, which changes nothing
                step(tokens, (cos, sin), place, cache)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = step(tokens, (cos, sin), place, cache)

    def fits(self, given: list[Tensor], cache: KVCache) -> bool:
        """Whether it was recorded for these shapes and this cache."""
        same = all(mine.shape == theirs.shape for mine, theirs in zip(self.given, given))
        return same and self.buffer is cache.layers[0].keys

    def replay(self, given: list[Tensor]) -> Tensor:
        """The logits (B, 1, V)."""
        for mine, theirs in zip(self.given, given):
            mine.copy_(theirs)
        self.graph.replay()
        return self.logits.clone()
