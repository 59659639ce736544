"""The one-token step compiled once, whatever the lengths; on a GPU replayed as a CUDA graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from thinker.model import KVCache, Thinker
from thinker.model.activation_hooks import has_open_hooks
from thinker.model.masks import ForwardContext
from thinker.runtime.errors import UserError


class CompiledThinker:
    """model(tokens, cache=cache) for one position per row, through torch.compile.

    On a CPU the length of the cache is a symbol of the one compiled program, which serves batches of one: larger ones
    spend their time in products that compiling does not change. On a GPU the cache is read in full under a mask, so
    that no shape ever changes, and the whole step is captured as a CUDA graph per cache.
    """

    def __init__(self, model: Thinker) -> None:
        self.model = model
        on_cpu = model.device.type == "cpu"
        # The pattern matcher would put SDPA back, and copy the keys. Kernels called from C++ save 3.5 % of a step.
        options = {"pattern_matcher": False, "cpp_wrapper": on_cpu, "size_asserts": False}
        self._compiled = torch.compile(self._step, dynamic=on_cpu, fullgraph=True, options=options)
        self._graph: _Graph | None = None

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """tokens (B, 1) -> logits (B, 1, V)."""
        if has_open_hooks(self.model):
            raise UserError("activations of a compiled model cannot be recorded or patched; leave compile out")
        if not tokens.is_cuda and len(tokens) > 1:
            return self.model(tokens, cache=cache)
        cache.fixed = tokens.is_cuda
        context = cache.append(*tokens.shape)
        context.rope = self.model.rope(context.positions, context.end, self.model.dtype)
        if not tokens.is_cuda:
            return self._compiled(tokens, context, cache)
        inputs = [tokens, *context.rope, context.masks[0].allowed, context.slots[0].slot_mapping]
        if self._graph is None or not self._graph.fits(inputs, cache):
            self._graph = _Graph(self._compiled, inputs, context, cache)
        return self._graph.replay(inputs)

    def _step(self, tokens: Tensor, context: ForwardContext, cache: KVCache) -> Tensor:
        return self.model.lm_head(self.model.forward_blocks(tokens, context, cache))


class _Graph:
    """One step captured on the GPU for one cache: inputs are copied into its own tensors, then it runs by itself."""

    def __init__(self, step: Callable, inputs: list[Tensor], context: ForwardContext, cache: KVCache) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        self.buffer, n_layers = cache.layers[0].keys, len(context.masks)
        tokens, cos, sin, allowed, slot_mapping = self.inputs
        context.masks = [dataclasses.replace(context.masks[0], allowed=allowed)] * n_layers
        context.slots = [dataclasses.replace(context.slots[0], slot_mapping=slot_mapping)] * n_layers
        context.rope = cos, sin
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles; writes the same position again, which changes nothing
                step(tokens, context, cache)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = step(tokens, context, cache)

    def fits(self, inputs: list[Tensor], cache: KVCache) -> bool:
        same_shapes = all(own.shape == new.shape for own, new in zip(self.inputs, inputs))
        return same_shapes and self.buffer is cache.layers[0].keys

    def replay(self, inputs: list[Tensor]) -> Tensor:
        for own, new in zip(self.inputs, inputs):
            own.copy_(new)
        self.graph.replay()
        return self.logits.clone()
