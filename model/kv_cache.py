"""What is remembered of the positions already seen, so that each new token costs one position's work."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinker.model.attend import AttentionMask
from thinker.model.config import ThinkerConfig
from thinker.model.kernels.linear_attention import LinearState
from thinker.model.masks import ForwardContext, MaskBuilder
from thinker.model.patterns import CAUSAL, INVALID_POSITION, Linear, Pattern, TokenInfo
from thinker.runtime.errors import UserError


def looking(config: ThinkerConfig, dtype: torch.dtype, device: torch.device, kernel: str = "auto") -> MaskBuilder:
    """How this model's layers look."""
    plain_scores = config.attn_logit_softcap is None and not config.attention_sinks
    alibi = config.positions == "alibi"
    return MaskBuilder(config.patterns, config.n_heads, dtype, device, kernel, alibi=alibi, plain_scores=plain_scores)


@dataclass
class LayerCache:
    """One layer's keys and values, (B, K, max_len, D) each."""

    keys: Tensor
    values: Tensor
    tensors = ("keys", "values")  # what has a row for each of the batch
    endless = False  # whether it has room for any number of positions
    lost = ""  # why it cannot go back

    def can_truncate(self, written: int, back: int, slack: int) -> bool:
        """Whether a row that was written so far can go `back` so many positions."""
        return True

    def look(self, cache: KVCache, pattern: Pattern, starts: list[int], positions: Tensor) -> AttentionMask:
        """What new positions, (T,) or (B, T), see, where the rows held `starts` before them."""
        held = cache.max_len if cache.fixed else max(cache.lengths)
        if max(starts) == 0 and not cache.fixed:
            sight = cache.see(pattern, positions, positions, aligned=True)
        elif positions.shape == (1,) and pattern == CAUSAL and cache.looking.slopes is None and not cache.fixed:
            sight = AttentionMask(held=held)  # the last position sees every key
        else:
            sight = cache.see(pattern, positions, torch.arange(held, device=positions.device))
            sight.held = held
        sight.slots = positions
        return sight

    def store(self, q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask) -> tuple[Tensor, Tensor, Tensor]:
        """Write the new keys and values (B, K, T, D); returns the queries, and all to be seen, (B, K, S, D) each."""
        self.write(k, v, sight.slots)
        if sight.held is None:
            return q, k, v
        return q, self.keys[:, :, : sight.held], self.values[:, :, : sight.held]

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Put keys and values (B, K, T, D) into these slots, (T,) or (B, T)."""
        if slots.dim() == 2:
            rows = torch.arange(len(slots), device=slots.device)[:, None]  # (B, 1)
            self.keys[rows, :, slots] = k.transpose(1, 2)  # (B, T, K, D)
            self.values[rows, :, slots] = v.transpose(1, 2)
        elif torch.compiler.is_compiling():  # Inductor writes this in place, and index_copy_ by copying the cache
            self.keys[:, :, slots] = k
            self.values[:, :, slots] = v
        else:
            self.keys.index_copy_(2, slots, k)
            self.values.index_copy_(2, slots, v)


@dataclass
class RingLayer(LayerCache):
    """For a pattern of bounded reach: its first positions, then a ring of the newest, and a slot that nobody reads.

    Keys are stored rotated by their absolute positions, and seen by these: the very numbers of the full pass.
    """

    first: int = 0
    endless = True
    lost = "its window has been overwritten; new_cache(slack=...) keeps more"

    def can_truncate(self, written: int, back: int, slack: int) -> bool:
        """As LayerCache.can_truncate."""
        return back <= slack or written <= self.size

    @property
    def size(self) -> int:
        """Slots that are read."""
        return self.keys.shape[2] - 1

    def look(self, cache: KVCache, pattern: Pattern, starts: list[int], positions: Tensor) -> AttentionMask:
        """As LayerCache.look; what the ring holds follows from how far each row was ever written."""
        ring, device = self.size - self.first, positions.device
        slots = torch.where(positions < self.first, positions, self.first + (positions - self.first) % ring)
        length = positions.shape[-1]
        overwritten = (positions >= self.first) & (positions < positions[..., -1:] + 1 - ring)
        slots = torch.where(overwritten, self.size, slots)
        if max(starts) == 0:
            sight = cache.see(pattern, positions, positions, aligned=True)
        else:
            written = cache.written if length == 1 else cache.written_before
            sight = AttentionMask(held=min(max(written), self.size))
            ends = torch.tensor(written if positions.dim() == 2 else written[:1], device=device)
            newest = ends[:, None] - 1  # (B or 1, 1)
            at = torch.arange(sight.held, device=device)
            in_ring = newest - (newest - at) % ring
            keys = torch.where(at < self.first, at, torch.where(in_ring < self.first, INVALID_POSITION, in_ring))
            keys = torch.where(keys > newest, INVALID_POSITION, keys)  # (B or 1, held)
            if length > 1:  # beside the new ones stand the old: of those, none that is being replaced
                keys = torch.where(keys < positions[..., :1], keys, INVALID_POSITION)
                keys = torch.cat((keys, positions.expand(len(keys), -1)), dim=1)
            sight = replace(cache.see(pattern, positions, keys if positions.dim() == 2 else keys[0]), held=sight.held)
        sight.slots = slots
        return sight

    def store(self, q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask) -> tuple[Tensor, Tensor, Tensor]:
        """As LayerCache.store; several new positions see the old ring and each other."""
        if sight.held is None or k.shape[2] == 1:
            return super().store(q, k, v, sight)
        keys = torch.cat((self.keys[:, :, : sight.held], k), dim=2)  # (B, K, held + T, D)
        values = torch.cat((self.values[:, :, : sight.held], v), dim=2)
        self.write(k, v, sight.slots)
        return q, keys, values


@dataclass
class LinearLayer:
    """What a linear layer keeps: sums over all keys, whose size does not depend on how many there were."""

    sums: Tensor  # (B, K, m, D + 1)
    shift: Tensor  # (B, K, 1, 1)
    tensors = ("sums", "shift")
    endless = True
    lost = "the sums of a linear layer forget nothing"

    def look(self, cache: KVCache, pattern: Linear, starts: list[int], positions: Tensor) -> AttentionMask:
        """Everything, by the sums."""
        return AttentionMask()

    def can_truncate(self, written: int, back: int, slack: int) -> bool:
        """As LayerCache.can_truncate."""
        return False


class KVCache:
    """What each layer keeps of the positions so far, with a length for each row.

    A layer that sees everything keeps `max_len` keys and values, preallocated; one of bounded reach a ring of them; a
    linear one its state. Where none of the first kind is there, the cache has no end and its memory does not grow.

    The lengths live on the host as plain integers, so that no position has to be asked from the device. Rows of
    equal length (the usual case) need no mask to decode; rows of unequal length use one. What lies in slots that no
    row has reached is never looked at.

    `fixed` reads every slot under a mask, whatever the lengths, so that shapes never change (for CUDA graphs).
    """

    n_evicted = 0  # positions out of sight: none, unless it rolls

    def __init__(
        self,
        config: ThinkerConfig,
        batch_size: int,
        max_len: int,
        device: torch.device | str,
        dtype: torch.dtype,
        slack: int = 0,
    ) -> None:
        """`slack`: how many positions truncate() may always take back, where keys have been overwritten."""
        if batch_size < 1 or max_len < 1:
            raise UserError(f"a cache of {batch_size} rows by {max_len} positions: both must be at least 1")
        self.max_len, self.device, self.fixed, self.slack = max_len, torch.device(device), False, slack
        self.looking, self.prefix = looking(config, dtype, self.device), config.prefix
        self.width, self.dtype = config.head_dim, dtype
        heads = [config.head_counts(layer)[1] for layer in range(config.n_layers)]
        self.layers = [self._new_layer(pattern, batch_size, K) for pattern, K in zip(self.looking.patterns, heads)]
        self.lengths = [0] * batch_size
        self.written = self.written_before = self.lengths  # how far each row was ever, in spite of truncate()
        self.tokens = torch.zeros(batch_size, max_len, dtype=int, device=device) if self.looking.by_token else None

    def _new_layer(self, pattern: Pattern | Linear, B: int, K: int) -> LayerCache | LinearLayer:
        if isinstance(pattern, Linear):
            state = LinearState.empty(B, K, pattern.features, self.width, self.device)
            return LinearLayer(state.sums, state.shift)
        size = max(1, (pattern.reach or 0) + self.slack) + pattern.first
        if size >= self.max_len or not pattern.fits_ring_buffer:
            return self._tensors(B, K, self.max_len)
        both = self._tensors(B, K, size + 1)
        return RingLayer(both.keys, both.values, pattern.first)

    def _tensors(self, B: int, K: int, size: int) -> LayerCache:
        D = self.width
        keys, values = (torch.zeros(B, K, size, D, device=self.device, dtype=self.dtype) for _ in range(2))
        if self.device.type == "cpu" and self.dtype == torch.float32:
            # The same shape in another order: q·kᵀ over columns runs at the memory's speed, over rows at 3/4 of it;
            # where columns begin as cache lines do, a little faster still.
            keys = torch.zeros(B, K, D, -(-size // 16) * 16).transpose(2, 3)[:, :, :size]
        return LayerCache(keys, values)

    @property
    def endless(self) -> bool:
        """Whether any number of positions fits."""
        return all(layer.endless for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Memory of all that is kept."""
        return sum(getattr(layer, name).nbytes for layer in self.layers for name in layer.tensors)

    def append(self, batch_size: int, length: int, tokens: Tensor | None = None) -> ForwardContext:
        """Make room for `length` new positions in every row, and say where they stand.

        Raises UserError, with nothing changed, where they do not fit.
        """
        if batch_size != len(self.lengths):
            raise UserError(f"the cache has {len(self.lengths)} rows and was given a batch of {batch_size}")
        starts = self.lengths
        if max(starts) + length > self.max_len and not self.endless:
            raise UserError(
                f"the cache holds {self.max_len} positions, {max(starts)} are taken: {length} more do not fit; "
                "make it longer with new_cache(max_len=...)"
            )
        if min(starts) < self.prefix and (max(starts) > 0 or length < self.prefix):
            raise UserError(
                f"the model sees the first {self.prefix} positions from before them: they must come together, as the "
                f"cache's first chunk, not {length} positions after {min(starts)}"
            )
        self.lengths = [start + length for start in starts]
        self.written_before, self.written = self.written, [max(both) for both in zip(self.written, self.lengths)]
        positions = torch.arange(length, device=self.device) + starts[0]  # (T,)
        if min(starts) < max(starts) or min(self.written) < max(self.written):
            positions = positions + (torch.tensor(starts, device=self.device) - starts[0])[:, None]  # (B, T)
        if self.tokens is not None:
            self.tokens.scatter_(1, positions.expand(batch_size, -1), tokens)
        sights: dict[tuple[type, Pattern | Linear], AttentionMask] = {}
        for layer, pattern in zip(self.layers, self.looking.patterns):
            if (type(layer), pattern) not in sights:
                sights[type(layer), pattern] = layer.look(self, pattern, starts, positions)
        every = [sights[type(layer), pattern] for layer, pattern in zip(self.layers, self.looking.patterns)]
        return ForwardContext(positions, max(self.lengths), every)

    def see(self, pattern: Pattern, queries: Tensor, keys: Tensor, aligned: bool = False) -> AttentionMask:
        """What queries at some positions, (T,) or (B, T), see of keys at others."""
        if self.tokens is None:
            return self.looking(pattern, TokenInfo(queries), TokenInfo(keys), aligned)
        rows = torch.arange(len(self.lengths), device=self.device)[:, None]
        query, key = (
            TokenInfo(queries, token=self.tokens[rows, queries]),
            TokenInfo(keys, token=self.tokens[rows, keys]),
        )
        return self.looking(pattern, query, key, aligned)

    def truncate(self, lengths: list[int]) -> None:
        """Forget, in each row, every position from its new length on: drafts that were refused, a turn undone.

        Raises UserError where what was there has been overwritten.
        """
        for row, (new, old) in enumerate(zip(lengths, self.lengths, strict=True)):
            if not 0 <= new <= old:
                raise UserError(f"cannot truncate a row of {old} positions to {new}")
            lost = next((layer.lost for layer in self.layers if not self._keeps(layer, row, new)), None)
            if lost is not None:
                raise UserError(f"cannot truncate from {old} to {new}: {lost}")
        self.lengths = list(lengths)

    def can_truncate(self, lengths: list[int]) -> bool:
        """Whether nothing of what truncate() would need has been overwritten."""
        return all(self._keeps(layer, row, new) for layer in self.layers for row, new in enumerate(lengths))

    def _keeps(self, layer: LayerCache | LinearLayer, row: int, length: int) -> bool:
        written = self.written[row]
        return length == self.lengths[row] or layer.can_truncate(written, written - length, self.slack)

    def select(self, rows: list[int]) -> None:
        """Keep these rows only, in this order; a finished row leaves its batch so, and a prompt is shared by many."""
        index = torch.tensor(rows, device=self.device)
        for layer in self.layers:
            for name in layer.tensors:
                old = getattr(layer, name)
                setattr(layer, name, _like(old, len(rows)).copy_(old.index_select(0, index)))
        if self.tokens is not None:
            self.tokens = self.tokens[index]
        self.lengths, self.written = ([held[row] for row in rows] for held in (self.lengths, self.written))

    def concat_rows(self, other: KVCache) -> None:
        """Add another cache's rows below these; both hold as many positions."""
        for mine, its in zip(self.layers, other.layers):
            for name in mine.tensors:
                both = getattr(mine, name), getattr(its, name)
                setattr(mine, name, torch.cat(both, out=_like(both[0], len(both[0]) + len(both[1]))))
        if self.tokens is not None:
            self.tokens = torch.cat((self.tokens, other.tokens))
        self.lengths, self.written = self.lengths + other.lengths, self.written + other.written


def _like(tensor: Tensor, rows: int) -> Tensor:
    """An empty tensor of so many rows that lies in memory as `tensor` does."""
    return torch.empty_strided((rows, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
