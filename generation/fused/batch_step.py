"""One decoding step of a batch: products by cuBLAS, and the kernels of batch_kernels.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinker.generation.decoders.inference_model import InferenceNorm
from thinker.generation.fused import batch_kernels as kernels
from thinker.generation.fused.decode_buffers import OPTIONS, DecodeBuffers, Launch, next_power_of_2
from thinker.model import KVCache, Thinker
from thinker.model.layers import Linear

PART = 1024  # logits that a program of the sampling kernels reads
BLOCK = 1024  # values of an MLP that a program reads
NO_OVERLAP = {"OVERLAP": False, "num_warps": 4, **OPTIONS}  # cuBLAS does not take part


class Product(NamedTuple):
    """x (texts, n_in) times a matrix -> out (texts, n_out)."""

    x: Tensor
    linear: Linear
    out: Tensor

    def run(self) -> None:
        """Start it."""
        weight = self.linear.weight.t()
        if self.linear.bias is None:
            torch.mm(self.x, weight, out=self.out)
        else:
            torch.addmm(self.linear.bias, self.x, weight, out=self.out)


class BatchStep(DecodeBuffers):
    """A step of several texts, and the choice of their next tokens, from buffers that stay in
    place."""

    def __init__(self, model: Thinker, cache: KVCache, n_texts: int) -> None:
        """See DecodeBuffers; the model: see unsupported() and is_dense()."""
        super().__init__(model, cache, n_texts, PART, model.dtype)
        config = model.config
        self.x = self.zeros(n_texts, config.d_model)
        self.normed = self.zeros(n_texts, config.d_model, dtype=model.dtype)
        self.added = self.zeros(n_texts, config.d_model, dtype=model.dtype)
        self.hidden = self.zeros(n_texts, config.d_ff, dtype=model.dtype)
        self.gate_up = self.zeros(n_texts, 2 * config.d_ff, dtype=model.dtype)
        heads = [config.head_counts(layer) for layer in range(config.n_layers)]
        widest = max(n_heads for n_heads, _ in heads)
        widest_qkv = max(n_heads + 2 * n_kv_heads for n_heads, n_kv_heads in heads)
        self.qkv = self.zeros(n_texts * widest_qkv * config.head_dim, dtype=model.dtype)
        self.attended = self.zeros(n_texts * widest * config.head_dim, dtype=model.dtype)
        self.launches = list(self._launches())
        self.summing = self.summary_launch()
        self.sampling = self.sample_launch(NO_OVERLAP)

    def step(self) -> None:
        """Read a token of each text into the cache, which computes the logits."""
        for launch in self.launches:
            launch.run()

    def sample(self) -> None:
        """Choose the next tokens from the logits."""
        self.summing.run()
        self.sampling.run()

    def summarize(self) -> None:
        """Do nothing: sample() summarizes the logits."""

    def _launches(self) -> Iterator[Launch | Product]:
        model = self.model
        first = model.blocks[0].attention_norm
        read = (self.tokens, model.embedding.weight)
        arguments = (*read, self.x, first.weight, self.normed)
        yield Launch(kernels.embed_and_norm_kernel, (self.n_texts,), arguments, self._norm(first))
        norms = [block.attention_norm for block in model.blocks[1:]]
        norms.append(model.norm)
        for block, layer, next_norm in zip(model.blocks, self.cache.layers, norms):
            attention, mlp = block.attention, block.mlp
            qkv = self._first(self.qkv, attention.qkv_proj.out_features)
            attended = self._first(self.attended, attention.o_proj.in_features)
            yield Product(self.normed, attention.qkv_proj, qkv)
            read = (layer.keys, layer.values, qkv, attended)
            yield self.attention(attention, *read, NO_OVERLAP)
            yield Product(attended, attention.o_proj, self.added)
            yield self._residual(block.mlp_norm)
            yield Product(self.normed, mlp.gate_up_proj, self.gate_up)
            yield self._activation(model.config.d_ff)
            yield Product(self.hidden, mlp.down_proj, self.added)
            yield self._residual(next_norm)
        yield Product(self.normed, model.lm_head, self.logits)

    def _first(self, buffer: Tensor, width: int) -> Tensor:
        """The first numbers of a buffer as (n_texts, width)."""
        return buffer[: self.n_texts * width].view(self.n_texts, width)

    def _norm(self, norm: InferenceNorm) -> dict[str, Any]:
        """The constants of a kernel that writes a norm."""
        C = self.model.config.d_model
        return {"C": C, "EPS": norm.eps, "PADDED": next_power_of_2(C), **OPTIONS}

    def _residual(self, norm: InferenceNorm) -> Launch:
        arguments = (self.added, self.x, norm.weight, self.normed)
        grid = (self.n_texts,)
        return Launch(kernels.residual_and_norm_kernel, grid, arguments, self._norm(norm))

    def _activation(self, d_ff: int) -> Launch:
        grid = (self.n_texts, math.ceil(d_ff / BLOCK))
        constants = {"F": d_ff, "BLOCK": BLOCK, **OPTIONS}
        return Launch(kernels.activation_kernel, grid, (self.gate_up, self.hidden), constants)


def is_dense(model: Thinker) -> bool:
    """Whether all matrices are plain: those in 8 bits would have to be expanded for a batch."""
    matrices = [model.lm_head]
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        matrices += [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    return all(type(matrix) is Linear for matrix in matrices)
