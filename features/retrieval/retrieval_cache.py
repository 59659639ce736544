"""KV cache that keeps the blocks which left its window, and retrieves the best of them for each query."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinker.features.retrieval.block_store import BlockStore
from thinker.model import Thinker
from thinker.model.attention_dispatch import AttentionMask
from thinker.model.kv_cache import KVCache, RingLayer
from thinker.model.masks import ForwardContext
from thinker.model.patterns.patterns import INVALID_POSITION, Pattern
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
    """n new positions per row of a pass. A block can be evicted before them, but not between them."""

    columns: slice  # of the pass
    slots: Tensor  # (n,) or (B, n), of their keys in the ring buffer
    rotation: Rotation  # of their queries and keys
    visible: Tensor  # (B or 1, 1, n, 1, S), the slots that each query attends to
    n_stored: int  # blocks in the fullest row
    n_stored_by_row: Tensor | None  # (B, 1, 1, 1) if rows have unequal lengths
    eviction: Eviction | None


@dataclass
class RetrievalLayer(RingLayer):
    """The sinks and a ring buffer of the newest positions, and a store. `keys` have no RoPE, `rotated` are with it."""

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
        """Store new keys and values (B, K, T, D) and attend to those visible, all without RoPE: q, y (B, H, T, D)."""
        return torch.cat(
            [
                self._attend(part, *(x[:, :, part.columns] for x in (q, k, v)), scale)
                for part in segments
            ],
            2,
        )

    def _attend(self, segment: Segment, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if segment.eviction is not None:
            self._evict(segment.eviction)
        for tensor, new in (
            (self.keys, k),
            (self.values, v),
            (self.rotated, apply_rotary_emb(k, segment.rotation)),
        ):
            if segment.slots.dim() == 2:
                rows = torch.arange(len(new), device=new.device)[:, None]  # (B, 1)
                tensor[rows, :, segment.slots] = new.transpose(1, 2)  # (B, n, K, D)
            else:
                tensor.index_copy_(2, segment.slots, new)
        q, plain_q = (  # (B, K, n, G, D), G query heads per KV head
            x.unflatten(1, (k.shape[1], -1)).transpose(2, 3)
            for x in (apply_rotary_emb(q, segment.rotation), q)
        )
        n, G = q.shape[2:4]
        keys, values = (
            self.rotated[:, :, : self.size],
            self.values[:, :, : self.size],
        )  # (B, K, S, D)
        scores = (q.flatten(2, 3) @ keys.transpose(-2, -1)).unflatten(2, (n, G))  # (B, K, n, G, S)
        scores = scores.masked_fill(~segment.visible, -torch.inf)
        n_retrieved, n_stored = min(self.n_retrieved, segment.n_stored), segment.n_stored_by_row
        if n_retrieved > 0:
            search_q = apply_rotary_emb(plain_q, self.search_rotation)
            blocks = self.store.search(
                search_q, n_retrieved, segment.n_stored, n_stored
            )  # (B, K, n, n_retrieved)
            block_keys, block_values = self.store.read(
                blocks, q.dtype
            )  # (B, K, n, P, D), P = n_retrieved · block
            P = block_keys.shape[3]
            block_keys = apply_rotary_emb(
                block_keys, tuple(table[:P] for table in self.block_rotation)
            )
            block_scores = q @ block_keys.transpose(-2, -1)  # (B, K, n, G, P)
            if n_stored is not None:
                is_missing = (blocks >= n_stored).repeat_interleave(
                    P // n_retrieved, dim=-1
                )  # (B, K, n, P)
                block_scores = block_scores.masked_fill(is_missing[:, :, :, None], -torch.inf)
            scores = torch.cat((scores, block_scores), dim=-1)
        weights = (scores.float() * scale).softmax(dim=-1).to(v.dtype)
        y = (weights[..., : self.size].flatten(2, 3) @ values).unflatten(
            2, (n, G)
        )  # (B, K, n, G, D)
        if n_retrieved > 0:
            y = y + weights[..., self.size :] @ block_values
        return y.transpose(2, 3).flatten(1, 2)  # (B, H, n, D)

    def _evict(self, eviction: Eviction) -> None:
        rows = eviction.rows[:, None]
        keys, values = (
            x[rows, :, eviction.slots].transpose(1, 2) for x in (self.keys, self.values)
        )
        self.store.put(eviction.rows, eviction.blocks, keys, values)  # (R, K, block, D) each
        self.rotated[:, :, : self.size] = apply_rotary_emb(
            self.keys[:, :, : self.size], eviction.rotation
        )


class RetrievalCache(KVCache):
    """As SinkCache, but blocks that leave the window are stored, and each query retrieves `retrieve` of them.

    A query attends to the sinks, then the blocks that it retrieves, in their order, then the newest `window` to
    window + block − 1 positions. They are numbered without gaps, so that no distance exceeds what the model was trained
    on. Each KV head of each layer retrieves its own blocks, for each query anew (Quest, arXiv:2406.10774).
    """

    def __init__(
        self, model: Thinker, batch_size: int, window: int, sinks: int = 0, retrieve: int = 4, block: int = 32,
        store_dtype: torch.dtype = torch.int8,
    ) -> None:  # fmt: skip
        """`window`: a multiple of `block`. `store_dtype`: int8, or a float type to store without rounding."""
        assert window % block == 0
        self.window, self.sinks, self.retrieve, self.block = window, sinks, retrieve, block
        self.rope, self.store_dtype = model.rope, store_dtype
        self.n_positions = context_size(window, sinks, retrieve, block)
        super().__init__(
            model.config, batch_size, sinks + window + block, model.device, model.dtype
        )

    def _new_layer(self, pattern: Pattern, B: int, K: int) -> RetrievalLayer:
        keys, values = self._new_tensors(B, K, self.max_len + 1)
        store = BlockStore(B, K, self.block, self.head_dim, self.device, self.store_dtype)
        blocks = torch.arange(
            self.sinks, self.sinks + self.retrieve * self.block, device=self.device
        )
        farthest = min(self.window + self.retrieve * self.block, self.n_positions - 1)
        farthest = torch.tensor([farthest], device=self.device)
        rotations = (self._rotation(positions) for positions in (blocks, farthest))
        return RetrievalLayer(
            keys, values, 0, self.sinks, keys.clone(), store, self.retrieve, *rotations
        )

    def _rotation(self, positions: Tensor) -> Rotation:
        """RoPE's tables without its factor on queries and keys, which they have already."""
        return tuple(
            x / self.rope.attention_scaling
            for x in self.rope(positions, self.n_positions, self.dtype)
        )

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
        segments, begin = [], 0
        while begin < length:
            n_stored, end = self._n_stored(starts[0] + begin + 1), length
            if is_even:  # until the next eviction
                end = min(
                    length, self.sinks + self.window + (n_stored + 1) * self.block - 1 - starts[0]
                )
            segments.append(self._segment([start + begin for start in starts], slice(begin, end)))
            begin = end
        # At position 0, RoPE does not rotate: the layers do that, because positions change when blocks are evicted.
        positions = torch.zeros(length, dtype=torch.long, device=self.device)
        states = [partial(layer.attend, segments) for layer in self.layers]
        masks = [AttentionMask(kernel="retrieval", kernel_state=state) for state in states]
        return ForwardContext(positions, 1, masks, [None] * len(masks))

    def _n_stored(self, length: int) -> int:
        """Number of blocks that the last position of a row of this length can retrieve."""
        return n_stored_blocks(length, self.window, self.sinks, self.block)

    def _segment(self, starts: list[int], columns: slice) -> Segment:
        """Prepare new positions: starts[row], starts[row] + 1, ... for these columns of the pass."""
        before, after = ([self._n_stored(start + i) for start in starts] for i in (0, 1))
        is_even, ring = min(starts) == max(starts), self.layers[0]
        first, n_stored = (
            to_device(x[:1] if is_even else x, self.device)[:, None] for x in (starts, after)
        )  # (B or 1, 1)
        positions = first + torch.arange(
            columns.stop - columns.start, device=self.device
        )  # (B or 1, n)
        in_slots = ring.slot_positions(positions[:, -1] + 1, ring.size)  # (B or 1, S)
        is_sink, end_of_stored = in_slots < self.sinks, self.sinks + n_stored * self.block
        is_held = (in_slots != INVALID_POSITION) & (is_sink | (in_slots >= end_of_stored))
        visible = is_held[:, None] & (in_slots[:, None] <= positions[..., None])  # (B or 1, n, S)
        # Every stored block that is not retrieved moves what follows it closer to the sinks.
        n_closer = (n_stored - self.retrieve).clamp_min(0) * self.block  # (B or 1, 1)
        eviction, evicting = None, [row for row in range(len(starts)) if before[row] < after[row]]
        if evicting:
            rows, blocks = (
                to_device(x, self.device) for x in (evicting, [before[row] for row in evicting])
            )
            evicted = (
                self.sinks
                + blocks[:, None] * self.block
                + torch.arange(self.block, device=self.device)
            )
            new_positions = torch.where(is_sink, in_slots, in_slots - n_closer)
            rotation = self._rotation(
                new_positions.clamp(0, self.n_positions - 1)
            )  # of unread slots: any
            eviction = Eviction(rows, blocks, ring.slot_mapping(evicted), rotation)
        slots, rotation = ring.slot_mapping(positions), self._rotation(positions - n_closer)
        by_row = None if is_even else n_stored[..., None, None]
        visible = visible[:, None, :, None]
        return Segment(
            columns, slots[0] if is_even else slots, rotation, visible, max(after), by_row, eviction
        )

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
