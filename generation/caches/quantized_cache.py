"""KV cache in 8 or 4 bits: each key and value of a head is a vector of codes times a scale.

With 4 bits, the newest are also kept unrounded, because a query attends most to those next to it:
that takes away six sevenths of the change of the loss (docs/development/experiments.md). With 8
bits, there is nothing to gain from that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinker.generation.caches.full_cache import FullCaches
from thinker.generation.setup import Setup
from thinker.model import Thinker
from thinker.model.config import ThinkerConfig
from thinker.model.kv_cache import KVCache, LayerCache
from thinker.model.masks import CacheSlots
from thinker.model.patterns.pattern import Pattern
from thinker.runtime.checks import describe
from thinker.runtime.errors import UserError
from thinker.runtime.memory import check_memory

if TYPE_CHECKING:
    from thinker.model.kernels.linear_attention import LinearState

BLOCK = 16  # with 4 bits, a query reads the keys of its own block and of the block before unrounded
RING = 4 * BLOCK  # newest positions that are kept for that
# Positions of a row that a pass may add before their queries read the ring: 2 blocks.
MAX_PER_PASS = RING - 2 * BLOCK
FORMS = {8: "int8", 4: "int4"}


def quantize_vectors(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x (..., D) -> codes (..., D), int8, and scale (...), bf16.

    The largest number becomes the lowest code.
    """
    x = x.float()
    lowest, highest = (-127, 127) if bits == 8 else (-8, 7)
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scale = largest / lowest
    scale = torch.where(scale.abs() < 1e-30, 1e-30, scale).to(torch.bfloat16)
    codes = (x / scale.float()).round_().clamp_(lowest, highest).to(torch.int8)
    return codes, scale.squeeze(-1)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., D) as they are stored.

    (..., D) int8, or with 4 bits (..., D / 2) uint8 as in native/cached.h.
    """
    if bits == 8:
        return codes
    pairs = (codes + 8).to(torch.uint8).unflatten(-1, (-1, 2, 8))  # (..., D / 16, 2, 8)
    low, high = pairs.unbind(-2)  # (..., D / 16, 8) each
    return (low | high << 4).flatten(-2)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack_codes(), (..., D) int8."""
    if bits == 8:
        return packed
    pairs = packed.unflatten(-1, (-1, 8))  # (..., D / 16, 8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(-3).to(torch.int8) - 8


@dataclass
class QuantizedLayer(LayerCache):
    """One layer's keys and values as codes (B, K, max_len, D or D / 2), with scales (B, K,
    max_len).

    The vector of position p is also in slot p % n_newest of the rings (B, K, n_newest, D), which
    are empty with 8 bits.
    """

    bits: int
    key_scale: Tensor
    value_scale: Tensor
    newest_keys: Tensor
    newest_values: Tensor
    tensors = ("keys", "values", "key_scale", "value_scale", "newest_keys", "newest_values")
    no_truncate_reason = (
        "the newest positions, which are kept unrounded, have been overwritten; use 8 bits"
    )

    @property
    def n_newest(self) -> int:
        """Slots of the rings."""
        return self.newest_keys.shape[2]

    def update(
        self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As LayerCache.update().

        With 4 bits, all keys and values of the pass itself are returned unrounded.
        """
        positions = slots.slot_mapping.expand(len(k), -1)  # (B, T)
        kv_len = k.shape[2] if slots.kv_len is None else slots.kv_len
        keys = self._store_and_read(
            self.keys, self.key_scale, self.newest_keys, k, positions, kv_len
        )
        values = self._store_and_read(
            self.values, self.value_scale, self.newest_values, v, positions, kv_len
        )
        return q, keys, values

    def _store_and_read(
        self,
        codes: Tensor,
        scale: Tensor,
        newest: Tensor,
        x: Tensor,
        positions: Tensor,
        kv_len: int,
    ) -> Tensor:
        """Store vectors x (B, K, T, D) at positions (B, T).

        Returns those of the first `kv_len` positions.
        """
        rows = torch.arange(len(x), device=x.device)[:, None]  # (B, 1)
        new_codes, new_scale = quantize_vectors(x, self.bits)  # (B, K, T, D), (B, K, T)
        codes[rows, :, positions] = pack_codes(new_codes, self.bits).transpose(1, 2)  # (B, T, K, D)
        scale[rows, :, positions] = new_scale.transpose(1, 2)
        y = unpack_codes(codes[:, :, :kv_len], self.bits).float()  # (B, K, kv_len, D)
        y = y * scale[:, :, :kv_len, None].float()
        y = y.to(x.dtype)
        if self.n_newest:
            first = positions[:, :1]  # (B, 1)
            before = first - torch.arange(1, 2 * BLOCK, device=x.device)  # (B, 31)
            is_exact = before >= ((first // BLOCK - 1) * BLOCK).clamp_min(0)
            at = torch.where(is_exact, before, first)  # `first` is overwritten below
            y[rows, :, at] = newest[rows, :, at % self.n_newest]
            y[rows, :, positions] = x.transpose(1, 2)
            last = positions[:, -self.n_newest :]
            newest[rows, :, last % self.n_newest] = x[:, :, -self.n_newest :].transpose(1, 2)
        return y


class QuantizedCache(KVCache):
    """A KVCache that stores full layers in `bits` bits.

    Layers with a window or linear attention, which are small, stay as they are.
    """

    def __init__(
        self,
        config: ThinkerConfig,
        batch_size: int,
        max_len: int,
        device: torch.device | str,
        dtype: torch.dtype,
        slack: int = 0,
        bits: int = 8,
    ) -> None:
        self.bits = bits
        super().__init__(config, batch_size, max_len, device, dtype, slack)
        if bits == 4:  # so that each query reads the same keys unrounded as alone
            self.pass_block = BLOCK

    def _new_layer(self, pattern: Pattern, B: int, K: int) -> LayerCache | LinearState:
        layer = super()._new_layer(pattern, B, K)
        # A pattern that fits a ring buffer stays in a short cache, too, for the same results.
        if pattern.fits_ring_buffer or type(layer) is not LayerCache:
            return layer
        width = self.head_dim
        dtype = torch.int8
        n_newest = 0
        if self.bits == 4:
            width = self.head_dim // 2
            dtype = torch.uint8
            n_newest = RING

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(B, K, *shape, device=self.device, dtype=dtype)

        codes = [empty(self.max_len, width, dtype=dtype) for _ in range(2)]
        scales = [empty(self.max_len, dtype=torch.bfloat16) for _ in range(2)]
        newest = [empty(n_newest, self.head_dim, dtype=self.dtype) for _ in range(2)]
        return QuantizedLayer(*codes, self.slack, self.bits, *scales, *newest)

    def _can_truncate_layer(self, layer: LayerCache | LinearState, lengths: list[int]) -> bool:
        if not isinstance(layer, QuantizedLayer) or not layer.n_newest:
            return super()._can_truncate_layer(layer, lengths)
        for new, old, high_water in zip(lengths, self.lengths, self.high_water):
            if new not in (0, old) and max(high_water, old) - new > MAX_PER_PASS:
                return False
        return True


def cache_bytes(
    model: Thinker, batch_size: int, max_len: int, slack: int = 0, bits: int | None = None
) -> int:
    """Memory of a cache in `bits` bits, or with None in the dtype of the model."""
    shape = model.config, batch_size, max_len, "meta", model.dtype, slack
    if bits is None:
        return KVCache(*shape).nbytes
    return QuantizedCache(*shape, bits).nbytes


def make_cache(
    model: Thinker, batch_size: int, max_len: int, slack: int = 0, bits: int | None = None
) -> KVCache:
    """An empty cache in `bits` bits, or with None that of the model.

    Raises UserError if it exceeds the memory.
    """
    if bits is None:
        return model.new_cache(batch_size, max_len, slack)
    size = cache_bytes(model, batch_size, max_len, slack, bits)
    check_memory({"cache": size}, model.device, "use fewer or shorter texts")
    return QuantizedCache(model.config, batch_size, max_len, model.device, model.dtype, slack, bits)


class QuantizedCaches(FullCaches):
    """Makes QuantizedCaches (see CacheFactory)."""

    option = "cache_bits"

    def __init__(self, setup: Setup, bits: int) -> None:
        """Raises UserError if `bits` does not suit the model or the other options."""
        if bits not in FORMS:
            wanted = "use 8 or 4, or None for the dtype of the model"
            raise UserError(f"cache_bits is {describe(bits)}; {wanted}")
        setup.need_cache("cache_bits")
        config = setup.config
        cache = QuantizedCache(config, 1, config.max_seq_len, "meta", torch.bfloat16, bits=bits)
        if not any(isinstance(layer, QuantizedLayer) for layer in cache.layers):
            raise UserError(
                "cache_bits has no effect: no layer of this model keeps the keys of the whole text"
            )
        if bits == 4 and config.head_dim % 16:
            raise UserError(
                "a cache in 4 bits needs a head_dim that is a multiple of 16, "
                f"not {config.head_dim}; use 8 bits"
            )
        self.bits = bits

    def new(self, model: Thinker, batch_size: int, max_len: int, slack: int = 0) -> KVCache:
        """As CacheFactory.new()."""
        return make_cache(model, batch_size, max_len, slack, self.bits)

    def bytes_per_text(self, model: Thinker, max_len: int) -> int:
        """As FullCaches.bytes_per_text(), in few bits."""
        return cache_bytes(model, 1, max_len, bits=self.bits)
