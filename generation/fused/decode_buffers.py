"""What decoding steps of a single text and of a batch share: launches, buffers, sampling."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinker.generation.decoders.inference_model import FusedAttention, InferenceNorm
from thinker.generation.fused import attention_kernel, sampling_kernels
from thinker.model import KVCache, Thinker

MAX_STEPS = 16  # tokens to sample before the host waits for them
KEYS = 64  # that a program of the attention kernel reads at once
MAX_SHARES = 16  # programs that share the keys of a head
SHARED_KEYS = 512  # of the capacity, per such program
# Of every kernel. Triton means to stop fusing multiplications and additions by itself.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}
ENOUGH_PROGRAMS = 128  # about one per multiprocessor of a large GPU


class Launch(NamedTuple):
    """A kernel with its arguments; Triton calls the number of programs a grid."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    constants: dict[str, Any]

    def run(self) -> None:
        """Start the kernel."""
        device = self.arguments[0].device
        on_device = contextlib.nullcontext()
        if device.type == "cuda":  # Triton starts kernels on the current device
            on_device = torch.cuda.device(device)
        with on_device:
            self.kernel[self.grid](*self.arguments, **self.constants)


class DecodeBuffers:
    """The tensors of a step of `n_texts` texts, which stay in place, and the choice of tokens.

    A subclass has step(), which reads the tokens and computes the logits, and sample(), which
    chooses the next tokens.

    Attributes:
        tokens: (n_texts,) int64, the tokens to read, which sample() replaces.
        positions: (n_texts,) int32, their positions, which sample() advances; -1: no text.
        rows: (n_texts,) int32, the rows of the cache that the texts have.
        logits: (n_texts, V), after the tokens.
        n_ids: (1,) int32, the number of ids that may be sampled, the first ones.
        temperatures, uniforms, n_sampled, sampled, logprobs: as in sample_kernel().
    """

    def __init__(
        self, model: Thinker, cache: KVCache, n_texts: int, part: int, dtype: torch.dtype
    ) -> None:
        """`cache`: whose tensors the kernels read and write. `part`: logits that a program of the
        sampling kernels reads. `dtype`: of the logits."""
        config = model.config
        self.model = model
        self.cache = cache
        self.n_texts = n_texts
        self.part = part
        self.capacity = cache.layers[0].keys.shape[2]
        self.tokens = self.zeros(n_texts, dtype=torch.int64)
        self.places = self.zeros(2, n_texts, dtype=torch.int32)  # as one upload
        self.positions, self.rows = self.places
        self.logits = self.zeros(n_texts, config.vocab_size, dtype=dtype)
        self.summary = self.zeros(n_texts, 3, math.ceil(config.vocab_size / part))
        self.temperatures = self.zeros(n_texts)
        self.n_ids = self.zeros(1, dtype=torch.int32).fill_(config.vocab_size)
        self.uniforms = self.zeros(n_texts, MAX_STEPS, dtype=torch.float64)
        self.n_sampled = self.zeros(n_texts, dtype=torch.int32)
        self.sampled = self.zeros(n_texts, MAX_STEPS, dtype=torch.int32)
        self.logprobs = self.zeros(n_texts, MAX_STEPS)
        heads = [config.head_counts(layer) for layer in range(config.n_layers)]
        H = max(n_heads for n_heads, _ in heads)
        K = max(n_kv_heads for _, n_kv_heads in heads)
        self.n_shares = n_shares(n_texts * K, self.capacity)
        n_parts = n_texts * K * self.n_shares * padded_group(H // K)
        n_done = self.zeros(n_texts * K, dtype=torch.int32)
        D = config.head_dim
        self.scratch = (self.zeros(n_parts), self.zeros(n_parts), self.zeros(n_parts, D), n_done)
        every_position = torch.arange(self.capacity, device=model.device)
        self.rope = model.rope(every_position, self.capacity, torch.float32)  # (S, D) each

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new tensor on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.model.device)

    def attention(
        self,
        attention: FusedAttention,
        keys: Tensor,
        values: Tensor,
        qkv: Tensor,
        out: Tensor,
        options: dict[str, Any],
    ) -> Launch:
        """The attention of a layer: qkv (n_texts, (H + 2 K) D) -> out (n_texts, H D)."""
        norm = attention.qk_norm
        has_norm = isinstance(norm, InferenceNorm)
        gain = qkv  # a pointer that the kernel does not read
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
            "SPLITS": self.n_shares,
            **options,
        }
        read = (qkv, gain, *self.rope, keys, values)
        written = (out, *self.scratch)
        sizes = (self.capacity, attention.scale)
        arguments = (*read, *written, self.positions, self.rows, *sizes)
        grid = (attention.n_kv_heads, self.n_shares, self.n_texts)
        return Launch(attention_kernel.attention_kernel, grid, arguments, constants)

    def summary_launch(self) -> Launch:
        """Summarize the logits of all texts."""
        grid = (self.summary.shape[2], self.n_texts)
        arguments = (self.logits, self.summary, self.temperatures, self.n_ids)
        constants = {"V": self.logits.shape[1], "ROWS": self.part, **OPTIONS}
        return Launch(sampling_kernels.summary_kernel, grid, arguments, constants)

    def sample_launch(self, options: dict[str, Any]) -> Launch:
        """Choose the next token of each text from the logits and their summary."""
        n_parts = self.summary.shape[2]
        constants = {
            "V": self.logits.shape[1],
            "N_PARTS": n_parts,
            "PADDED": next_power_of_2(n_parts),
            "ROWS": self.part,
            "STEPS": MAX_STEPS,
            **options,
        }
        drawn = (self.logits, self.summary, self.temperatures, self.uniforms, self.n_sampled)
        results = (self.positions, self.tokens, self.sampled, self.logprobs, self.n_ids)
        return Launch(
            sampling_kernels.sample_kernel, (self.n_texts,), (*drawn, *results), constants
        )


def n_shares(n_heads: int, capacity: int) -> int:
    """Programs that share the keys of a head, of `n_heads` heads of keys in all texts.

    A batch has enough programs without. A long text gets more, as its keys take longer to read.
    """
    if n_heads >= ENOUGH_PROGRAMS:
        return 1
    return min(max(2, capacity // SHARED_KEYS), MAX_SHARES)


def padded_group(group: int) -> int:
    """Rows of the query heads that share keys: 1, or at least 16, which tl.dot needs."""
    return 1 if group == 1 else max(16, next_power_of_2(group))


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
