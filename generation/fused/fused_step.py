"""One decoding step of a single text as launches of the kernels of product_kernels.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.generation.decoders.inference_model import FusedAttention, FusedMLP, InferenceNorm
from thinker.generation.decoders.quantized_linear import QuantizedLinear
from thinker.generation.fused import product_kernels as kernels
from thinker.generation.fused.decode_buffers import OPTIONS, DecodeBuffers, Launch, next_power_of_2
from thinker.model import KVCache, Thinker, proof
from thinker.model.layers import Linear
from thinker.model.transformer import Block

MAX_HEAD_DIM = 256
MAX_PARTS = 1 << 14  # of the vocabulary, which one program reads to sample
MAX_WEIGHTS = 1 << 31  # of a matrix, whose entries the kernels count in 32 bits
SAMPLE_ROWS = 16  # logits of such a part


class Tiles(NamedTuple):
    """How a product is cut."""

    rows: int  # outputs of a program
    block: int  # columns at once, at most
    n_warps: int


# The fastest of those that were tried on an H100, for 124M and 1.1B parameters in bf16.
QKV_TILES = Tiles(8, 1024, 4)
OUT_TILES = Tiles(4, 1024, 4)
GATE_TILES = Tiles(8, 1024, 4)
DOWN_TILES = Tiles(4, 2048, 4)
HEAD_TILES = Tiles(SAMPLE_ROWS, 1024, 4)


def unsupported(model: Thinker) -> str:
    """What the kernels do not know of a model from fuse_for_inference(); "" if they know it."""
    config = model.config
    if model.dtype not in proof.TOLERANCES:
        return f"weights in {str(model.dtype).removeprefix('torch.')}"
    if not config.is_plain or config.prefix:
        return "its attention or its positions"
    head_dim = config.head_dim
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= MAX_HEAD_DIM:
        return f"heads of {head_dim}"
    if math.ceil(config.vocab_size / SAMPLE_ROWS) > MAX_PARTS:
        return f"a vocabulary of {config.vocab_size}"
    norms = [model.norm]
    matrices = [model.lm_head]
    without_bias = [model.lm_head]
    if type(model.embedding) is not nn.Embedding:
        return "its embedding"
    for block in model.blocks:
        for part in (block.after_attention, block.after_mlp):
            if type(block) is not Block or type(part) is not nn.Identity:
                return "its blocks"
        attention, mlp = block.attention, block.mlp
        for module, kind in ((attention, FusedAttention), (mlp, FusedMLP)):
            if type(module) is not kind:
                return f"the module {type(module).__name__}"
        if mlp.activation is not F.silu:
            return "the activation of its MLP"
        norms += [block.attention_norm, block.mlp_norm]
        others = [attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
        matrices += [attention.qkv_proj, *others]
        without_bias += others
    for norm in norms:
        if type(norm) is not InferenceNorm:
            return f"the module {type(norm).__name__}"
    for matrix in matrices:
        problem = unsupported_matrix(matrix)
        if problem:
            return problem
    if any(matrix.bias is not None for matrix in without_bias):
        return "a bias"
    return ""


def unsupported_matrix(matrix: nn.Module) -> str:
    """What the kernels do not know of a matrix; "" if they know it."""
    if type(matrix) not in (Linear, QuantizedLinear):
        return f"the module {type(matrix).__name__}"
    if type(matrix) is QuantizedLinear and (matrix.bits != 8 or matrix.native):
        return f"weights in {matrix.bits} bits"
    if matrix.in_features * matrix.out_features >= MAX_WEIGHTS:
        return "a matrix of more than 2^31 weights"
    return ""


class FusedStep(DecodeBuffers):
    """A step of one text, and the choice of its next token, from buffers that stay in place."""

    def __init__(self, model: Thinker, cache: KVCache, n_texts: int, overlap: bool) -> None:
        """See DecodeBuffers; the model: see unsupported(). `overlap`: launch programmatically."""
        assert n_texts == 1
        super().__init__(model, cache, n_texts, SAMPLE_ROWS, torch.float32)
        config = model.config
        heads = [config.head_counts(layer) for layer in range(config.n_layers)]
        widest = max(n_heads for n_heads, _ in heads)
        widest_qkv = max(n_heads + 2 * n_kv_heads for n_heads, n_kv_heads in heads)
        self.overlap = overlap
        self.x = self.zeros(config.d_model)
        self.qkv = self.zeros(widest_qkv * config.head_dim)
        self.attended = self.zeros(widest * config.head_dim)
        self.hidden = self.zeros(config.d_ff)
        self.launches = list(self._launches())
        self.sampling = self.sample_launch(self._options(8))

    def step(self) -> None:
        """Read the token at its position into the cache, which computes the logits."""
        for launch in self.launches:
            launch.run()

    def sample(self) -> None:
        """Choose the next token from the logits and their summary, which step() leaves."""
        self.sampling.run()

    def summarize(self) -> None:
        """Make the summary of logits that step() has not computed."""
        self.summary_launch().run()

    def _options(self, n_warps: int) -> dict[str, Any]:
        """Constants of every kernel; the interpreter does not know the option of overlapping."""
        options = {"OVERLAP": self.overlap, "num_warps": n_warps, **OPTIONS}
        if self.overlap:
            options["launch_pdl"] = True
        return options

    def _launches(self) -> Iterator[Launch]:
        model = self.model
        C = model.config.d_model
        constants = {"C": C, "PADDED": next_power_of_2(C), **self._options(4)}
        arguments = (self.tokens, model.embedding.weight, self.x)
        yield Launch(kernels.embed_kernel, (1,), arguments, constants)
        for block, layer in zip(model.blocks, self.cache.layers):
            attention, mlp = block.attention, block.mlp
            yield self._qkv(block.attention_norm, attention.qkv_proj)
            read = (layer.keys, layer.values, self.qkv, self.attended)
            yield self.attention(attention, *read, self._options(4))
            yield self._residual(self.attended, attention.o_proj, OUT_TILES)
            yield self._gate(block.mlp_norm, mlp.gate_up_proj)
            yield self._residual(self.hidden, mlp.down_proj, DOWN_TILES)
        yield self._head()

    def _qkv(self, norm: InferenceNorm, linear: nn.Module) -> Launch:
        bias = linear.bias
        has_bias = bias is not None
        if not has_bias:
            bias = norm.weight  # a pointer that the kernel does not read
        weights, cut = self._matrix(linear, QKV_TILES)
        n_rows = linear.out_features
        constants = {"N_ROWS": n_rows, "C": linear.in_features, "EPS": norm.eps, **cut}
        constants["HAS_BIAS"] = has_bias
        arguments = (self.x, norm.weight, *weights, bias, self.qkv)
        grid = (math.ceil(n_rows / QKV_TILES.rows),)
        return Launch(kernels.normed_product_kernel, grid, arguments, constants)

    def _residual(self, v: Tensor, linear: nn.Module, tiles: Tiles) -> Launch:
        weights, cut = self._matrix(linear, tiles)
        n_rows = linear.out_features
        constants = {"N_ROWS": n_rows, "N_COLUMNS": linear.in_features, **cut}
        grid = (math.ceil(n_rows / tiles.rows),)
        return Launch(kernels.residual_kernel, grid, (v, *weights, self.x), constants)

    def _gate(self, norm: InferenceNorm, linear: nn.Module) -> Launch:
        weights, cut = self._matrix(linear, GATE_TILES)
        d_ff = linear.out_features // 2
        constants = {"C": linear.in_features, "F": d_ff, "EPS": norm.eps, **cut}
        grid = (math.ceil(d_ff / GATE_TILES.rows),)
        arguments = (self.x, norm.weight, *weights, self.hidden)
        return Launch(kernels.gate_kernel, grid, arguments, constants)

    def _head(self) -> Launch:
        norm, linear = self.model.norm, self.model.lm_head
        weights, cut = self._matrix(linear, HEAD_TILES)
        V = linear.out_features
        constants = {"C": linear.in_features, "V": V, "EPS": norm.eps, **cut}
        written = (self.logits, self.summary)
        arguments = (self.x, norm.weight, *weights, *written, self.temperatures, self.n_ids)
        grid = (math.ceil(V / HEAD_TILES.rows),)
        return Launch(kernels.head_kernel, grid, arguments, constants)

    def _matrix(
        self, linear: nn.Module, tiles: Tiles
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """The weights of a matrix and their scales, and the constants by which it is cut."""
        is_quantized = isinstance(linear, QuantizedLinear)
        if is_quantized:
            weights = (linear.codes, linear.scale)
        else:
            weights = (linear.weight, linear.weight)  # a pointer that the kernel does not read
        block = min(tiles.block, next_power_of_2(linear.in_features))
        cut = {"ROWS": tiles.rows, "BLOCK": max(32, block), "HAS_SCALES": is_quantized}
        return weights, cut | self._options(tiles.n_warps)
