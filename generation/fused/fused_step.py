"""One decoding step of a single text as launches of the kernels of fused_kernels.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.generation.decoders.inference_model import FusedAttention, FusedMLP, InferenceNorm
from thinker.generation.fused import fused_kernels as kernels
from thinker.model import KVCache, Thinker
from thinker.model.layers import Linear

MAX_STEPS = 16  # tokens to sample before the host waits for them
SHARES = 2  # programs that share the keys of a head
KEYS = 64  # that such a program reads at once
MAX_HEAD_DIM = 256
MAX_PARTS = 1 << 14  # of the vocabulary, which one program reads to sample
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


class Launch(NamedTuple):
    """A kernel with its arguments; Triton calls the number of programs a grid."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    constants: dict[str, Any]

    def run(self) -> None:
        """Start the kernel."""
        self.kernel[self.grid](*self.arguments, **self.constants)


def unsupported(model: Thinker) -> str:
    """What the kernels do not know of a model from fuse_for_inference(); "" if they know it."""
    config = model.config
    if not config.is_plain or config.prefix:
        return "its attention or its positions"
    head_dim = config.head_dim
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= MAX_HEAD_DIM:
        return f"heads of {head_dim}"
    if math.ceil(config.vocab_size / SAMPLE_ROWS) > MAX_PARTS:
        return f"a vocabulary of {config.vocab_size}"
    modules: list[tuple[nn.Module, type]] = [(model.norm, InferenceNorm), (model.lm_head, Linear)]
    for block in model.blocks:
        modules += [(block.attention_norm, InferenceNorm), (block.mlp_norm, InferenceNorm)]
        modules += [(block.attention, FusedAttention), (block.mlp, FusedMLP)]
        if type(block.attention) is not FusedAttention or type(block.mlp) is not FusedMLP:
            continue  # which is found below
        modules += [(block.attention.qkv_proj, Linear), (block.attention.o_proj, Linear)]
        modules += [(block.mlp.gate_up_proj, Linear), (block.mlp.down_proj, Linear)]
        if block.mlp.activation is not F.silu:
            return "the activation of its MLP"
        others = (block.attention.o_proj, block.mlp.gate_up_proj, block.mlp.down_proj)
        if any(one.bias is not None for one in others):
            return "a bias"
    for module, kind in modules:
        if type(module) is not kind:
            return f"the module {type(module).__name__}"
    if model.lm_head.bias is not None:
        return "a bias"
    return ""


class FusedStep:
    """A step of one text, and the choice of its next token, from buffers that stay in place.

    Attributes:
        tokens: (1,) int64, the token to read, which sample() replaces.
        positions: (1,) int32, its position, which sample() advances.
        logits: (V,) fp32, after the token.
        n_ids: (1,) int32, the number of ids that may be sampled, the first ones.
        temperatures, uniforms, n_sampled, sampled, logprobs: as in kernels.sample_kernel().
    """

    def __init__(self, model: Thinker, cache: KVCache, overlap: bool) -> None:
        """`cache`: of one text, whose tensors the kernels read and write; see unsupported()."""
        config = model.config
        device = model.device
        self.model = model
        self.cache = cache
        self.overlap = overlap
        self.capacity = cache.layers[0].keys.shape[2]

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        heads = [config.head_counts(layer) for layer in range(config.n_layers)]
        H = max(n_heads for n_heads, _ in heads)
        K = max(n_kv_heads for _, n_kv_heads in heads)
        D = config.head_dim
        self.tokens = torch.zeros(1, dtype=torch.int64, device=device)
        self.positions = integers(1)
        self.x = floats(config.d_model)
        self.qkv = floats((H + 2 * K) * D)
        self.attended = floats(H * D)
        self.hidden = floats(config.d_ff)
        self.logits = floats(config.vocab_size)
        n_parts = math.ceil(config.vocab_size / SAMPLE_ROWS)
        self.summary = floats(3, n_parts)
        self.temperatures = floats(1)
        self.n_ids = integers(1).fill_(config.vocab_size)
        self.uniforms = torch.zeros(MAX_STEPS, dtype=torch.float64, device=device)
        self.n_sampled = integers(1)
        self.sampled = integers(MAX_STEPS)
        self.logprobs = floats(MAX_STEPS)
        n_shares = K * SHARES * padded_group(H // K)
        self.scratch = (floats(n_shares), floats(n_shares), floats(n_shares, D), integers(K))
        every_position = torch.arange(self.capacity, device=device)
        self.rope = model.rope(every_position, self.capacity, torch.float32)  # (S, D) each
        self._step = list(self._step_launches())
        self._sample = self._sample_launch()

    def step(self) -> None:
        """Read the token at the position into the cache, which computes the logits."""
        for launch in self._step:
            launch.run()

    def sample(self) -> None:
        """Choose the next token from the logits and their summary."""
        self._sample.run()

    def summarize(self) -> None:
        """Make the summary of logits that step() has not computed."""
        n_parts = self.summary.shape[1]
        arguments = (self.logits, self.summary, self.temperatures, self.n_ids)
        kernels.summary_kernel[(n_parts,)](*arguments, ROWS=SAMPLE_ROWS)

    def _options(self, n_warps: int) -> dict[str, Any]:
        """Constants of every kernel; the interpreter does not know the option of overlapping."""
        options = {"OVERLAP": self.overlap, "num_warps": n_warps}
        if self.overlap:
            options["launch_pdl"] = True
        return options

    def _step_launches(self) -> Iterator[Launch]:
        model = self.model
        C = model.config.d_model
        constants = {"C": C, "PADDED": next_power_of_2(C), **self._options(4)}
        arguments = (self.tokens, model.embedding.weight, self.x)
        yield Launch(kernels.embed_kernel, (1,), arguments, constants)
        for block, layer in zip(model.blocks, self.cache.layers):
            attention, mlp = block.attention, block.mlp
            yield self._qkv(block.attention_norm, attention.qkv_proj)
            yield self._attention(attention, layer.keys, layer.values)
            width = attention.n_heads * attention.head_dim
            yield self._residual(self.attended, attention.o_proj, width, OUT_TILES)
            yield self._gate(block.mlp_norm, mlp.gate_up_proj)
            yield self._residual(self.hidden, mlp.down_proj, model.config.d_ff, DOWN_TILES)
        yield self._head()

    def _qkv(self, norm: InferenceNorm, linear: Linear) -> Launch:
        n_rows, C = linear.weight.shape
        bias = linear.bias
        has_bias = bias is not None
        if not has_bias:
            bias = norm.weight  # a pointer that the kernel does not read
        constants = {"N_ROWS": n_rows, "C": C, "EPS": norm.eps, "HAS_BIAS": has_bias}
        constants |= self._cut(C, QKV_TILES)
        arguments = (self.x, norm.weight, linear.weight, bias, self.qkv)
        grid = (math.ceil(n_rows / QKV_TILES.rows),)
        return Launch(kernels.normed_product_kernel, grid, arguments, constants)

    def _attention(self, attention: FusedAttention, keys: Tensor, values: Tensor) -> Launch:
        norm = attention.qk_norm
        has_norm = isinstance(norm, InferenceNorm)
        gain = self.x  # a pointer that the kernel does not read
        eps = 0.0
        if has_norm:
            gain = norm.weight
            eps = norm.eps
        group = attention.n_heads // attention.n_kv_heads
        constants = {
            "N_HEADS": attention.n_heads,
            "N_KV": attention.n_kv_heads,
            "D": attention.head_dim,
            "EPS": eps,
            "HAS_NORM": has_norm,
            "PADDED": padded_group(group),
            "KEYS": KEYS,
            "SPLITS": SHARES,
            **self._options(4),
        }
        read = (self.qkv, gain, *self.rope, keys, values)
        written = (self.attended, *self.scratch)
        arguments = (*read, *written, self.positions, self.capacity, attention.scale)
        grid = (attention.n_kv_heads, SHARES, 1)
        return Launch(kernels.attention_kernel, grid, arguments, constants)

    def _residual(self, v: Tensor, linear: Linear, n_columns: int, tiles: Tiles) -> Launch:
        n_rows = linear.weight.shape[0]
        constants = {"N_ROWS": n_rows, "N_COLUMNS": n_columns, **self._cut(n_columns, tiles)}
        grid = (math.ceil(n_rows / tiles.rows),)
        return Launch(kernels.residual_kernel, grid, (v, linear.weight, self.x), constants)

    def _gate(self, norm: InferenceNorm, linear: Linear) -> Launch:
        n_rows, C = linear.weight.shape
        d_ff = n_rows // 2
        constants = {"C": C, "F": d_ff, "EPS": norm.eps, **self._cut(C, GATE_TILES)}
        grid = (math.ceil(d_ff / GATE_TILES.rows),)
        arguments = (self.x, norm.weight, linear.weight, self.hidden)
        return Launch(kernels.gate_kernel, grid, arguments, constants)

    def _head(self) -> Launch:
        norm, linear = self.model.norm, self.model.lm_head
        V, C = linear.weight.shape
        constants = {"C": C, "V": V, "EPS": norm.eps, **self._cut(C, HEAD_TILES)}
        weights = (self.x, norm.weight, linear.weight)
        arguments = (*weights, self.logits, self.summary, self.temperatures, self.n_ids)
        grid = (math.ceil(V / HEAD_TILES.rows),)
        return Launch(kernels.head_kernel, grid, arguments, constants)

    def _sample_launch(self) -> Launch:
        n_parts = self.summary.shape[1]
        constants = {"N_PARTS": n_parts, "PADDED": next_power_of_2(n_parts), "ROWS": SAMPLE_ROWS}
        drawn = (self.logits, self.summary, self.temperatures, self.uniforms, self.n_sampled)
        results = (self.positions, self.tokens, self.sampled, self.logprobs, self.n_ids)
        arguments = (*drawn, *results)
        return Launch(kernels.sample_kernel, (1,), arguments, constants | self._options(8))

    def _cut(self, n_columns: int, tiles: Tiles) -> dict[str, Any]:
        """The constants by which a product is cut."""
        block = min(tiles.block, next_power_of_2(n_columns))
        return {"ROWS": tiles.rows, "BLOCK": block, **self._options(tiles.n_warps)}


def padded_group(group: int) -> int:
    """Rows of the query heads that share keys: 1, or at least 16, which tl.dot needs."""
    return 1 if group == 1 else max(16, next_power_of_2(group))


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
