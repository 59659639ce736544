"""KV cache: keys and values of earlier positions, so that decoding computes only the new ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinker.model.attention_dispatch import AttentionMask
from thinker.model.config import ThinkerConfig
from thinker.model.kernels import load_kernel
from thinker.model.masks import CacheSlots, ForwardContext, MaskBuilder
from thinker.model.patterns.pattern import CAUSAL, INVALID_POSITION, Pattern, TokenInfo
from thinker.runtime.checks import describe
from thinker.runtime.device import to_device
from thinker.runtime.errors import UserError

if TYPE_CHECKING:
    from thinker.model.kernels.linear_attention import LinearState


@dataclass(frozen=True)
class CacheMemory:
    """What a file keeps of a cache: the options that it was made with, and its tensors by name."""

    options: dict[str, int]
    tensors: dict[str, Tensor]


@dataclass
class LayerCache:
    """One layer's keys and values, (B, K, max_len, D) each."""

    keys: Tensor
    values: Tensor
    slack: int  # newest positions that can be removed even if old ones have been overwritten
    tensors = ("keys", "values")  # attributes with one row per sequence of the batch
    size = math.inf  # positions before old ones are overwritten; inf: never, max_len is the limit
    no_truncate_reason = ""

    def prepare(
        self, cache: KVCache, pattern: Pattern, positions: Tensor
    ) -> tuple[AttentionMask, CacheSlots]:
        """Return the mask and slots of new positions, (T,) or (B, T), which `cache` already
        counts."""
        end = max(cache.lengths)
        if end == positions.shape[-1]:  # the first chunk
            mask = cache.build_mask(pattern, positions, positions, aligned=True)
            return mask, CacheSlots(positions)
        slots = CacheSlots(positions, end)
        has_bias = cache.mask_builder.has_bias
        if positions.shape == (1,) and pattern == CAUSAL and not has_bias:
            return AttentionMask(), slots  # the last position attends to every key
        keys = torch.arange(end, device=positions.device)
        return cache.build_mask(pattern, positions, keys), slots

    def update(
        self, q: Tensor, k: Tensor, v: Tensor, slots: CacheSlots
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store new keys and values (B, K, T, D). Returns q and the keys and values to attend to,
        (B, K, S, D) each."""
        keys, values = k, v
        if slots.kv_len is not None:
            keys = self.keys[:, :, : slots.kv_len]
            values = self.values[:, :, : slots.kv_len]
            is_ring = self.size < math.inf
            if is_ring and k.shape[2] > 1:  # read the old ring before it is overwritten
                keys = torch.cat((keys, k), dim=2)
                values = torch.cat((values, v), dim=2)
        self._store(self.keys, k, slots.slot_mapping)
        self._store(self.values, v, slots.slot_mapping)
        return q, keys, values

    @staticmethod
    def _store(stored: Tensor, new: Tensor, slot_mapping: Tensor) -> None:
        """Write (B, K, T, D) to the slots (T,), or (B, T) if they differ by row."""
        if slot_mapping.dim() == 1:
            stored.index_copy_(2, slot_mapping, new)
            return
        rows = torch.arange(len(slot_mapping), device=slot_mapping.device)[:, None]  # (B, 1)
        stored[rows, :, slot_mapping] = new.transpose(1, 2)  # (B, T, K, D)


@dataclass
class RingLayer(LayerCache):
    """The first `n_global` positions, a ring buffer of the newest, and one unread slot; positions
    stay absolute."""

    n_global: int
    no_truncate_reason = "the window has been overwritten; use a larger new_cache(slack=...)"

    @property
    def size(self) -> int:
        """Number of slots that queries read."""
        return self.keys.shape[2] - 1

    def slot_mapping(self, positions: Tensor) -> Tensor:
        """Slot of each new position, (T,) or (B, T). Positions that newer ones overwrite get the
        unread slot."""
        ring = self.size - self.n_global
        is_global = positions < self.n_global
        in_ring = self.n_global + (positions - self.n_global) % ring
        slots = torch.where(is_global, positions, in_ring)
        is_overwritten = ~is_global & (positions < positions[..., -1:] + 1 - ring)
        return torch.where(is_overwritten, self.size, slots)

    def slot_positions(self, lengths: Tensor, kv_len: int) -> Tensor:
        """Position in each of the first `kv_len` slots of rows filled to `lengths`, (B,) -> (B,
        kv_len)."""
        slots = torch.arange(kv_len, device=lengths.device)
        newest = lengths[:, None] - 1  # (B, 1)
        in_ring = newest - (newest - slots) % (self.size - self.n_global)
        in_ring = torch.where(in_ring < self.n_global, INVALID_POSITION, in_ring)
        positions = torch.where(slots < self.n_global, slots, in_ring)
        return torch.where(positions > newest, INVALID_POSITION, positions)

    def prepare(
        self, cache: KVCache, pattern: Pattern, positions: Tensor
    ) -> tuple[AttentionMask, CacheSlots]:
        """See LayerCache.prepare(); the high-water mark of each row determines what the ring
        contains."""
        T = positions.shape[-1]
        slots = CacheSlots(self.slot_mapping(positions))
        if max(cache.lengths) == T:  # the first chunk
            return cache.build_mask(pattern, positions, positions, aligned=True), slots
        rows_differ = positions.dim() == 2
        high_water = cache.high_water
        if T > 1:  # the ring is read before the new keys are written
            high_water = cache.high_water_before
        slots.kv_len = min(max(high_water), self.size)
        lengths = high_water if rows_differ else high_water[:1]
        lengths = to_device(lengths, positions.device)
        keys = self.slot_positions(lengths, slots.kv_len)  # (B or 1, kv_len)
        if T > 1:  # new keys follow those in the ring, without the old keys that they replace
            keys = torch.where(keys < positions[..., :1], keys, INVALID_POSITION)
            keys = torch.cat((keys, positions.expand(len(keys), -1)), dim=1)
        if not rows_differ:
            keys = keys[0]
        return cache.build_mask(pattern, positions, keys), slots


class KVCache:
    """Cache of all layers. The length of each row is kept on the host, so that reading it never
    waits for the device.

    A layer with full attention preallocates `max_len` keys and values, a layer of bounded distance
    has a ring buffer, and a linear layer has its state. Without full attention the cache is
    unbounded and its memory does not grow.
    """

    bits: int | None = None  # of keys and values; None: they have a floating-point dtype
    pass_block: int | None = None  # a pass of several positions should end at a multiple of it

    def __init__(
        self,
        config: ThinkerConfig,
        batch_size: int,
        max_len: int,
        device: torch.device | str,
        dtype: torch.dtype,
        slack: int = 0,
    ) -> None:
        """`slack`: number of positions that truncate() can always remove, even from ring
        buffers."""
        _check_sizes(batch_size, max_len, slack)
        self.max_len = max_len
        self.slack = slack
        self.device = torch.device(device)
        self.dtype = dtype
        self.head_dim = config.head_dim
        self.prefix = config.prefix
        self.mask_builder = MaskBuilder.of_model(config, dtype, self.device, "auto")
        self.layers: list[LayerCache | LinearState] = []
        for layer, pattern in enumerate(self.mask_builder.patterns):
            _, n_kv_heads = config.head_counts(layer)
            self.layers.append(self._new_layer(pattern, batch_size, n_kv_heads))
        self.n_moves = 0  # times that the tensors of all layers were replaced
        self.lengths = [0] * batch_size
        # The largest length of each row before truncate(), and the same before the last append().
        self.high_water = self.lengths
        self.high_water_before = self.lengths
        self.tokens: Tensor | None = None
        if self.mask_builder.by_token or config.reads_token_before:
            self.tokens = torch.zeros(batch_size, max_len, dtype=int, device=device)

    def _new_layer(self, pattern: Pattern, B: int, K: int) -> LayerCache | LinearState:
        if pattern.n_features:
            shape = (B, K, pattern.n_features, self.head_dim)
            return load_kernel("linear state").empty(shape, self.device)
        size = max(1, (pattern.max_distance or 0) + self.slack) + pattern.n_global
        if size >= self.max_len or not pattern.fits_ring_buffer:
            keys, values = self._new_tensors(B, K, self.max_len)
            return LayerCache(keys, values, self.slack)
        keys, values = self._new_tensors(B, K, size + 1)
        return RingLayer(keys, values, self.slack, pattern.n_global)

    def _new_tensors(self, B: int, K: int, size: int) -> tuple[Tensor, Tensor]:
        keys = torch.zeros(B, K, size, self.head_dim, device=self.device, dtype=self.dtype)
        return keys, torch.zeros_like(keys)

    @property
    def is_unbounded(self) -> bool:
        """Whether the cache accepts any number of positions."""
        return all(layer.size < math.inf for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Memory of all layers in bytes."""
        return sum(getattr(layer, name).nbytes for layer in self.layers for name in layer.tensors)

    def append(self, batch_size: int, length: int, tokens: Tensor | None = None) -> ForwardContext:
        """Add `length` positions per row and return their context. Raises UserError, unchanged, if
        they do not fit."""
        starts = self.reserve(batch_size, length)
        positions = torch.arange(length, device=self.device) + starts[0]  # (T,)
        if min(starts) < max(starts) or min(self.high_water) < max(self.high_water):
            positions = positions + (to_device(starts, self.device) - starts[0])[:, None]  # (B, T)
        token_before = None
        if self.tokens is not None:
            token_before = self._add_tokens(positions.expand(batch_size, -1), tokens)
        prepared: dict[Pattern, tuple[AttentionMask, CacheSlots | None]] = {}
        masks = []
        slots = []
        for layer, pattern in zip(self.layers, self.mask_builder.patterns):
            if pattern not in prepared:
                if pattern.n_features:  # no mask and no slots
                    prepared[pattern] = (AttentionMask(), None)
                else:
                    prepared[pattern] = layer.prepare(self, pattern, positions)
            mask, layer_slots = prepared[pattern]
            masks.append(mask)
            slots.append(layer_slots)
        return ForwardContext(positions, max(self.lengths), masks, slots, token_before=token_before)

    def _add_tokens(self, positions: Tensor, tokens: Tensor) -> Tensor:
        """Keep the ids of new positions, (B, T) each. Returns the id before each row, (B, 1)."""
        at = (positions[:, :1] - 1) % self.max_len
        token_before = self.tokens.gather(1, at)  # any id before position 0
        newest = slice(-self.max_len, None)  # unbounded caches keep the last max_len tokens
        self.tokens.scatter_(1, positions[:, newest] % self.max_len, tokens[:, newest])
        return token_before

    def reserve(self, batch_size: int, length: int) -> list[int]:
        """Add `length` positions to every row and return the previous lengths. Raises the errors of
        append()."""
        starts = self.lengths
        if batch_size != len(starts):
            raise UserError(
                f"the cache has {len(starts)} rows, not {batch_size}; use new_cache({batch_size})"
            )
        if max(starts) + length > self.max_len and not self.is_unbounded:
            used = f"the cache has {self.max_len} positions and {max(starts)} are used"
            raise UserError(
                f"{used}, so {length} more do not fit; raise max_len in new_cache(max_len=...)"
            )
        if min(starts) < self.prefix and (max(starts) > 0 or length < self.prefix):
            raise UserError(
                f"{length} positions after {min(starts)} split the bidirectional prefix; pass "
                f"the first {self.prefix} positions in one call"
            )
        self.lengths = [start + length for start in starts]
        self.high_water_before = self.high_water
        self.high_water = [max(pair) for pair in zip(self.high_water, self.lengths)]
        return starts

    def reserve_rows(self, rows: list[int], length: int) -> list[int]:
        """Add `length` positions to a row each time that it is named. Returns where they begin."""
        starts = []
        lengths = list(self.lengths)
        for row in rows:
            starts.append(lengths[row])
            lengths[row] += length
        assert max(lengths) <= self.max_len
        self.lengths = lengths
        self.high_water_before = self.high_water
        self.high_water = [max(pair) for pair in zip(self.high_water, lengths)]
        return starts

    def build_mask(
        self, pattern: Pattern, queries: Tensor, keys: Tensor, aligned: bool = False
    ) -> AttentionMask:
        """Mask between queries and keys at these positions, (T,) or (B, T) each."""
        query = TokenInfo(queries)
        key = TokenInfo(keys)
        if self.mask_builder.by_token:
            rows = torch.arange(len(self.lengths), device=self.device)[:, None]
            query.token_id = self.tokens[rows, queries]
            key.token_id = self.tokens[rows, keys]
        return self.mask_builder.build(pattern, query, key, aligned)

    def memory(self) -> CacheMemory | None:
        """What a file keeps of the cache, so that a later process goes on with the same bits; None:
        nothing, as a cache can be filled again from the text."""
        return None

    def remember(self, tensors: dict[str, Tensor], length: int) -> None:
        """Take the tensors of memory() of an equal cache with one row of this length. A cache whose
        memory() is None has nothing to take."""
        assert not tensors

    def truncate(self, lengths: list[int]) -> None:
        """Shorten each row to its new length. Raises UserError if keys that it needs have been
        overwritten."""
        for new, old in zip(lengths, self.lengths, strict=True):
            if not 0 <= new <= old:
                raise UserError(
                    f"cannot truncate a row of {old} positions to {new}; use 0 to {old}"
                )
        for layer in self.layers:
            if not self._can_truncate_layer(layer, lengths):
                raise UserError(
                    f"cannot truncate from {self.lengths} to {lengths}: {layer.no_truncate_reason}"
                )
        self.lengths = list(lengths)

    def can_truncate(self, lengths: list[int]) -> bool:
        """Whether truncate() would succeed."""
        return all(self._can_truncate_layer(layer, lengths) for layer in self.layers)

    def _can_truncate_layer(self, layer: LayerCache | LinearState, lengths: list[int]) -> bool:
        for new, old, high_water in zip(lengths, self.lengths, self.high_water):
            is_unchanged = new == old
            keeps_all = high_water <= layer.size
            if not (is_unchanged or keeps_all or high_water - new <= layer.slack):
                return False
        return True

    def select(self, rows: list[int]) -> None:
        """Keep these rows in this order, to drop finished rows or repeat a shared prompt."""
        self.n_moves += 1
        index = to_device(rows, self.device)
        for layer in self.layers:
            for name in layer.tensors:
                setattr(layer, name, getattr(layer, name).index_select(0, index))
        if self.tokens is not None:
            self.tokens = self.tokens[index]
        self.lengths = [self.lengths[row] for row in rows]
        self.high_water = [self.high_water[row] for row in rows]

    def concat_rows(self, other: KVCache) -> None:
        """Append the rows of another cache of the same max_len."""
        self.n_moves += 1
        for layer, other_layer in zip(self.layers, other.layers):
            for name in layer.tensors:
                both = (getattr(layer, name), getattr(other_layer, name))
                setattr(layer, name, torch.cat(both))
        if self.tokens is not None:
            self.tokens = torch.cat((self.tokens, other.tokens))
        self.lengths = self.lengths + other.lengths
        self.high_water = self.high_water + other.high_water


def _check_sizes(batch_size: int, max_len: int, slack: int) -> None:
    for size, least in ((batch_size, 1), (max_len, 1), (slack, 0)):
        if type(size) is not int or size < least:
            raise UserError(
                f"invalid cache size batch_size={describe(batch_size)}, "
                f"max_len={describe(max_len)}, slack={describe(slack)}; use integers of at least "
                f"1 (slack: at least 0)"
            )
