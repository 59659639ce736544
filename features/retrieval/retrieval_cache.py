"""KV cache that keeps the blocks which left its window, and retrieves the best of them for each
query."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinker.features.retrieval.block_store import BlockStore
from thinker.model import Thinker
from thinker.model.attention_dispatch import AttentionMask
from thinker.model.kv_cache import CacheMemory, KVCache, RingLayer
from thinker.model.masks import ForwardContext
from thinker.model.patterns.pattern import INVALID_POSITION, Pattern
from thinker.model.positions import Rotation, apply_rotary_emb
from thinker.runtime.device import to_device
from thinker.runtime.errors import UserError


@dataclass
class Eviction:
    """Some rows move one block each from the ring buffer to the store."""

    rows: Tensor  # (R,)
    blocks: Tensor  # (R,), the block's index in its row
    slots: Tensor  # (R, block), its slots in the ring buffer
    rotation: Rotation  # of all slots from now on


@dataclass
class Segment:
    """n new positions per row of a pass. A block can be evicted before them, but not between
    them."""

    columns: slice  # of the pass
    slots: Tensor  # (n,) or (B, n), of their keys in the ring buffer
    rotation: Rotation  # of their queries and keys
    visible: Tensor  # (B or 1, 1, n, 1, S), the slots that each query attends to
    n_stored: int  # blocks in the fullest row
    n_stored_by_row: Tensor | None  # (B, 1, 1, 1) if rows have unequal lengths
    eviction: Eviction | None


@dataclass
class RetrievalLayer(RingLayer):
    """The sinks and a ring buffer of the newest positions, and a store.

    `keys` have no RoPE, `rotated` are with it.
    """

    rotated: Tensor
    store: BlockStore
    n_retrieved: int
    block_rotation: Rotation  # of the keys in retrieved blocks
    search_rotation: Rotation  # of the queries that search for blocks
    tensors = ("keys", "values", "rotated")
    no_truncate_reason = "a retrieval cache cannot restore evicted positions; create a new cache"

    def attend(
        self, segments: list[Segment], q: Tensor, k: Tensor, v: Tensor, scale: float, *_: Any
    ) -> Tensor:
        """Store new keys and values (B, K, T, D) and attend to those visible.

        All are without RoPE: q, y (B, H, T, D).
        """
        parts = []
        for segment in segments:
            columns = segment.columns
            part_q = q[:, :, columns]
            part_k = k[:, :, columns]
            part_v = v[:, :, columns]
            parts.append(self._attend(segment, part_q, part_k, part_v, scale))
        return torch.cat(parts, dim=2)

    def _attend(self, segment: Segment, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if segment.eviction is not None:
            self._evict(segment.eviction)
        _store(self.keys, k, segment.slots)
        _store(self.values, v, segment.slots)
        _store(self.rotated, apply_rotary_emb(k, segment.rotation), segment.slots)
        # Queries per KV head, each with G query heads: (B, K, n, G, D).
        n_kv_heads = k.shape[1]
        plain_q = q.unflatten(1, (n_kv_heads, -1)).transpose(2, 3)
        q = apply_rotary_emb(q, segment.rotation).unflatten(1, (n_kv_heads, -1)).transpose(2, 3)
        n, G = q.shape[2:4]

        keys = self.rotated[:, :, : self.size]  # (B, K, S, D)
        values = self.values[:, :, : self.size]  # (B, K, S, D)
        scores = (q.flatten(2, 3) @ keys.transpose(-2, -1)).unflatten(2, (n, G))  # (B, K, n, G, S)
        scores = scores.masked_fill(~segment.visible, -torch.inf)
        n_retrieved = min(self.n_retrieved, segment.n_stored)
        if n_retrieved > 0:
            block_scores, block_values = self._retrieve(segment, q, plain_q, n_retrieved)
            scores = torch.cat((scores, block_scores), dim=-1)  # (B, K, n, G, S + P)
        weights = (scores.float() * scale).softmax(dim=-1).to(v.dtype)
        y = weights[..., : self.size].flatten(2, 3) @ values
        y = y.unflatten(2, (n, G))  # (B, K, n, G, D)
        if n_retrieved > 0:
            y = y + weights[..., self.size :] @ block_values
        return y.transpose(2, 3).flatten(1, 2)  # (B, H, n, D)

    def _retrieve(
        self, segment: Segment, q: Tensor, plain_q: Tensor, n_retrieved: int
    ) -> tuple[Tensor, Tensor]:
        """Find the best blocks for queries (B, K, n, G, D), with and without RoPE.

        Returns scores (B, K, n, G, P) and values (B, K, n, P, D), P = n_retrieved · block.
        """
        by_row = segment.n_stored_by_row
        search_q = apply_rotary_emb(plain_q, self.search_rotation)
        blocks = self.store.search(search_q, n_retrieved, segment.n_stored, by_row)
        keys, values = self.store.read(blocks, q.dtype)  # (B, K, n, P, D) each
        P = keys.shape[3]
        keys = apply_rotary_emb(keys, tuple(table[:P] for table in self.block_rotation))
        scores = q @ keys.transpose(-2, -1)  # (B, K, n, G, P)
        if by_row is not None:
            is_missing = (blocks >= by_row).repeat_interleave(P // n_retrieved, dim=-1)
            scores = scores.masked_fill(is_missing[:, :, :, None], -torch.inf)
        return scores, values

    def _evict(self, eviction: Eviction) -> None:
        rows = eviction.rows[:, None]
        keys = self.keys[rows, :, eviction.slots].transpose(1, 2)  # (R, K, block, D)
        values = self.values[rows, :, eviction.slots].transpose(1, 2)
        self.store.put(eviction.rows, eviction.blocks, keys, values)
        self.rotated[:, :, : self.size] = apply_rotary_emb(
            self.keys[:, :, : self.size], eviction.rotation
        )


def _store(stored: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write vectors (B, K, n, D) to slots (n,), or (B, n) if rows have unequal lengths."""
    if slots.dim() == 1:
        stored.index_copy_(2, slots, new)
        return
    rows = torch.arange(len(new), device=new.device)[:, None]  # (B, 1)
    stored[rows, :, slots] = new.transpose(1, 2)  # (B, n, K, D)


class RetrievalCache(KVCache):
    """As SinkCache, but blocks that leave the window are stored, and each query retrieves some.

    A query attends to the sinks, then the `retrieve` blocks that it retrieves, in their order, then
    the newest `window` to window + block − 1 positions. They are numbered without gaps, so that no
    distance exceeds what the model was trained on. Each KV head of each layer retrieves its own
    blocks, for each query anew (Quest, arXiv:2406.10774).
    """

    def __init__(
        self,
        model: Thinker,
        batch_size: int,
        window: int,
        sinks: int = 0,
        retrieve: int = 4,
        block: int = 32,
        store_dtype: torch.dtype = torch.int8,
    ) -> None:
        """`window`: a multiple of `block`. `store_dtype`: int8, or a float type to store without
        rounding."""
        assert window % block == 0
        self.window = window
        self.sinks = sinks
        self.retrieve = retrieve
        self.block = block
        self.rope = model.rope
        self.store_dtype = store_dtype
        self.n_positions = context_size(window, sinks, retrieve, block)
        super().__init__(
            model.config, batch_size, sinks + window + block, model.device, model.dtype
        )

    def _new_layer(self, pattern: Pattern, B: int, K: int) -> RetrievalLayer:
        keys, values = self._new_tensors(B, K, self.max_len + 1)
        store = BlockStore(B, K, self.block, self.head_dim, self.device, self.store_dtype)
        n_retrieved = self.retrieve * self.block  # positions
        blocks = torch.arange(self.sinks, self.sinks + n_retrieved, device=self.device)
        farthest = min(self.window + n_retrieved, self.n_positions - 1)
        farthest = torch.tensor([farthest], device=self.device)
        return RetrievalLayer(
            keys,
            values,
            0,
            self.sinks,
            rotated=keys.clone(),
            store=store,
            n_retrieved=self.retrieve,
            block_rotation=self._rotation(blocks),
            search_rotation=self._rotation(farthest),
        )

    def _rotation(self, positions: Tensor) -> Rotation:
        """RoPE's tables without its factor on queries and keys, which they have already."""
        tables = self.rope(positions, self.n_positions, self.dtype)
        return self.rope.without_scaling(tables)

    @property
    def nbytes(self) -> int:
        """Memory of all layers in bytes, including the stores."""
        return super().nbytes + sum(layer.store.nbytes for layer in self.layers)

    def append(self, batch_size: int, length: int, tokens: Tensor | None = None) -> ForwardContext:
        """As SinkCache.append."""
        is_even = min(self.lengths) == max(self.lengths)
        if length > 1 and not is_even:
            reason = "rows of a retrieval cache have unequal lengths"
            raise UserError(f"{reason}; append 1 position at a time, not {length}")
        starts = self.reserve(batch_size, length)
        segments = []
        begin = 0
        while begin < length:
            n_stored = self._n_stored(starts[0] + begin + 1)
            end = length
            if is_even:  # until the next eviction
                next_eviction = self.sinks + self.window + (n_stored + 1) * self.block - 1
                end = min(length, next_eviction - starts[0])
            segments.append(self._segment([start + begin for start in starts], slice(begin, end)))
            begin = end
        # At position 0, RoPE does not rotate: the layers do that, because positions change when
        # blocks are evicted.
        positions = torch.zeros(length, dtype=torch.long, device=self.device)
        masks = []
        for layer in self.layers:
            compute = partial(layer.attend, segments)
            masks.append(AttentionMask(kernel="cache", compute=compute))
        return ForwardContext(positions, 1, masks, [None] * len(masks))

    def _n_stored(self, length: int) -> int:
        """Number of blocks that the last position of a row of this length can retrieve."""
        return n_stored_blocks(length, self.window, self.sinks, self.block)

    def _segment(self, starts: list[int], columns: slice) -> Segment:
        """Prepare new positions: starts[row], starts[row] + 1, ... for these columns of the
        pass."""
        before = [self._n_stored(start) for start in starts]  # blocks of each row
        after = [self._n_stored(start + 1) for start in starts]
        is_even = min(starts) == max(starts)
        ring = self.layers[0]
        n_rows = 1 if is_even else len(starts)
        first = to_device(starts[:n_rows], self.device)[:, None]  # (B or 1, 1)
        n_stored = to_device(after[:n_rows], self.device)[:, None]  # (B or 1, 1)
        n = columns.stop - columns.start
        positions = first + torch.arange(n, device=self.device)  # (B or 1, n)
        in_slots = ring.slot_positions(positions[:, -1] + 1, ring.size)  # (B or 1, S)
        is_sink = in_slots < self.sinks
        end_of_stored = self.sinks + n_stored * self.block
        is_held = (in_slots != INVALID_POSITION) & (is_sink | (in_slots >= end_of_stored))
        is_earlier = in_slots[:, None] <= positions[..., None]  # (B or 1, n, S)
        visible = is_held[:, None] & is_earlier
        # Every stored block that is not retrieved moves what follows it closer to the sinks.
        n_closer = (n_stored - self.retrieve).clamp_min(0) * self.block  # (B or 1, 1)

        eviction = None
        evicting = [row for row in range(len(starts)) if before[row] < after[row]]
        if evicting:
            rows = to_device(evicting, self.device)
            blocks = to_device([before[row] for row in evicting], self.device)
            in_block = torch.arange(self.block, device=self.device)
            evicted = self.sinks + blocks[:, None] * self.block + in_block  # (R, block)
            new_positions = torch.where(is_sink, in_slots, in_slots - n_closer)
            new_positions = new_positions.clamp(0, self.n_positions - 1)  # of unread slots: any
            rotation = self._rotation(new_positions)
            eviction = Eviction(rows, blocks, ring.slot_mapping(evicted), rotation)

        slots = ring.slot_mapping(positions)
        n_stored_by_row = None
        if is_even:
            slots = slots[0]
        else:
            n_stored_by_row = n_stored[..., None, None]
        return Segment(
            columns,
            slots=slots,
            rotation=self._rotation(positions - n_closer),
            visible=visible[:, None, :, None],
            n_stored=max(after),
            n_stored_by_row=n_stored_by_row,
            eviction=eviction,
        )

    def memory(self) -> CacheMemory:
        """As KVCache.memory(): the window of each layer and the blocks of its store."""
        options = {
            "window": self.window,
            "sinks": self.sinks,
            "retrieve": self.retrieve,
            "retrieve_block": self.block,
        }
        tensors = {}
        for index, layer in enumerate(self.layers):
            for part, owner in (("ring", layer), ("store", layer.store)):
                for name in owner.tensors:
                    tensors[f"layers.{index}.{part}.{name}"] = getattr(owner, name)
        return CacheMemory(options, tensors)

    def remember(self, tensors: dict[str, Tensor], length: int) -> None:
        """As KVCache.remember()."""
        for index, layer in enumerate(self.layers):
            for part, owner in (("ring", layer), ("store", layer.store)):
                for name in owner.tensors:
                    old = getattr(owner, name)
                    new = tensors[f"layers.{index}.{part}.{name}"]
                    setattr(owner, name, new.to(old.device))
        self.lengths = [length]
        self.high_water = [length]
        self.high_water_before = [length]
        self.n_moves += 1

    def select(self, rows: list[int]) -> None:
        """As KVCache.select."""
        super().select(rows)
        for layer in self.layers:
            layer.store = copy.copy(layer.store)  # a copy of this cache has the same store
            layer.store.select(rows)

    def concat_rows(self, other: "RetrievalCache") -> None:
        """As KVCache.concat_rows."""
        super().concat_rows(other)
        for layer, other_layer in zip(self.layers, other.layers):
            layer.store.concat_rows(other_layer.store)


def n_stored_blocks(length: int, window: int, sinks: int, block: int) -> int:
    """Number of blocks that have left the window of a text of this length."""
    return max(0, length - sinks - window) // block


def context_size(window: int, sinks: int, retrieve: int, block: int) -> int:
    """Largest number of positions that a query attends to, including its own."""
    return sinks + retrieve * block + window + block - 1
