"""A cache of bounded memory: the newest keys and the first ones, however long the text grows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinker.model import Thinker
from thinker.model.attend import AttentionMask
from thinker.model.kv_cache import KVCache, LayerCache
from thinker.model.masks import ForwardContext
from thinker.model.patterns import Pattern, TokenInfo, first, window
from thinker.model.rope import rotate
from thinker.runtime.errors import UserError


@dataclass
class SinkSight(AttentionMask):
    """Adds what is written where, and from where the sinks are seen."""

    kept: Tensor | None = None  # which of the new positions are written; None: all
    is_sink: Tensor | None = None  # (S,) of the keys of a pass over several positions
    turn: tuple[Tensor, Tensor] | None = None  # of each query towards the sinks, or of these towards the one query
    early: Tensor | None = None  # (B, 1, 1, 1), the rows that still see their sinks where they stand; None: no matter


@dataclass
class SinkLayer(LayerCache):
    """One layer's sinks, then a ring of the newest: (B, K, sinks + window, D)."""

    sinks: Tensor  # (B, K, sinks, D), the keys of the first positions, rotated by these
    tensors = ("keys", "values", "sinks")

    def store(self, q: Tensor, k: Tensor, v: Tensor, sight: SinkSight) -> tuple[Tensor, Tensor, Tensor]:
        """As LayerCache.store; the queries may come back doubled in width, to see the sinks from nearer."""
        n = self.sinks.shape[2]
        keys, values = k, v
        if k.shape[2] > 1 and not sight.is_causal:
            old = self.sinks[:, :, : sight.held], self.keys[:, :, n : sight.held]  # what the slots held before
            keys = torch.cat((*old, k), dim=2)  # (B, K, held + T, D)
            values = torch.cat((self.values[:, :, : sight.held], v), dim=2)
        if sight.kept is not None:
            k, v = k[:, :, sight.kept], v[:, :, sight.kept]
        self.write(k, v, sight.slots)
        if sight.early is not None:
            self.sinks.copy_(torch.where(sight.early, self.keys[:, :, :n], self.sinks))
        if q.shape[2] == 1 and not sight.is_causal:
            if sight.turn is not None:
                self.keys[:, :, :n] = rotate(self.sinks, sight.turn)
            return q, self.keys[:, :, : sight.held], self.values[:, :, : sight.held]
        if sight.turn is None:
            return q, keys, values
        # A score is the product of q turned by its position and k turned by its own: to see the sinks from another
        # position, the query is turned once more. Beside it in the same row, each half meets its own kind of keys.
        is_sink = sight.is_sink[:, None]  # (S, 1)
        return torch.cat((q, rotate(q, sight.turn)), -1), torch.cat((keys * ~is_sink, keys * is_sink), -1), values


class SinkCache(KVCache):
    """Remembers the first `sinks` positions and the newest `window`, and forgets what lies between.

    Without sinks this is exactly attention in a sliding window. With sinks (Xiao et al. 2023, arXiv:2309.17453), a
    query sees them as if nothing lay between: from position sinks + window − 1 at most, so that no distance grows
    beyond what the cache holds. Keys are stored rotated by their absolute positions.
    """

    def __init__(self, model: Thinker, batch_size: int, window: int, sinks: int = 0) -> None:
        if window < 1 or sinks < 0:
            raise UserError(f"a window of {window} positions and {sinks} sinks: at least 1 and 0")
        if not model.config.is_plain:
            raise UserError("a rolling cache goes with full attention and RoPE; other forms have caches of their own")
        self.window, self.sinks, self.rope = window, sinks, model.rope
        super().__init__(model.config, batch_size, sinks + window, model.device, model.dtype)

    def _new_layer(self, pattern: Pattern, B: int, K: int) -> SinkLayer:
        layer = super()._new_layer(pattern, B, K)
        return SinkLayer(layer.keys, layer.values, layer.keys[:, :, : self.sinks].clone())

    @property
    def n_evicted(self) -> int:
        """How many positions of the longest row are out of sight."""
        return max(0, max(self.lengths) - self.max_len)

    def append(self, batch_size: int, length: int, tokens: Tensor | None = None) -> ForwardContext:
        """Say where `length` new positions stand; they always fit. Rows of unequal length take one at a time."""
        if batch_size != len(self.lengths):
            raise UserError(f"the cache has {len(self.lengths)} rows and was given a batch of {batch_size}")
        starts = self.lengths
        even = min(starts) == max(starts)
        if length > 1 and not even:
            raise UserError("rows of unequal length take one position at a time in a rolling cache")
        self.lengths = [start + length for start in starts]
        end = max(self.lengths)
        steps = torch.arange(length, device=self.device)
        begins = torch.tensor(starts, device=self.device)  # (B,)
        positions = steps + starts[0] if even else begins[:, None] + steps  # (T,) or (B, T)
        sight = SinkSight(held=min(end, self.max_len), slots=self._slot(positions))
        done = ForwardContext(positions, end, [sight] * len(self.layers))
        if min(starts) < self.sinks:
            sight.early = (begins < self.sinks)[:, None, None, None]
        # A query beyond position sinks + window − 1 sees the sinks from there: so many positions nearer.
        nearer = (positions - self.max_len + 1).clamp_min(0)  # (T,) or (B, T)
        has_rolled = self.sinks > 0 and end > self.max_len
        if length == 1:
            if not even:
                sight.allowed = (self._held_positions(begins + 1, sight.held) >= 0)[:, None, None]  # (B, 1, 1, S)
            if has_rolled:
                cos, sin = self.rope(nearer, end, self.layers[0].keys.dtype)
                sight.turn = cos / self.rope.magnitude, sin / self.rope.magnitude  # what is turned was scaled before
            return done
        # Of the new ones, those that later ones will not overwrite.
        sight.kept = torch.nonzero((positions < self.sinks) | (positions >= end - self.window))[:, 0]
        sight.slots = sight.slots[sight.kept]
        sight.is_causal = starts[0] == 0 and end <= self.max_len
        if not sight.is_causal:
            sight.held = min(starts[0], self.max_len)
            key_positions = torch.cat((self._held_positions(begins[:1], sight.held)[0], positions))  # (S,)
            pattern = window(self.window) | first(self.sinks)
            sight.allowed = pattern(None, TokenInfo(positions[:, None]), TokenInfo(key_positions))  # (T, S)
            sight.is_sink = key_positions < self.sinks
            if has_rolled:
                cos, sin = self.rope(nearer, end, self.layers[0].keys.dtype)
                sight.turn = cos / self.rope.magnitude, -sin / self.rope.magnitude  # the queries, the other way
        return done

    def _slot(self, positions: Tensor) -> Tensor:
        ring = self.sinks + (positions - self.sinks) % self.window
        return torch.where(positions < self.sinks, positions, ring)

    def _held_positions(self, lengths: Tensor, held: int) -> Tensor:
        """Which position lies in each of the first `held` slots, (B, held), by the rows' lengths; −1: none yet."""
        slots = torch.arange(held, device=self.device)
        newest = lengths[:, None] - 1  # (B, 1)
        in_ring = newest - (newest - slots) % self.window
        in_ring = torch.where(in_ring >= self.sinks, in_ring, -1)
        return torch.where(slots < self.sinks, torch.where(slots <= newest, slots, -1), in_ring)

    def can_truncate(self, lengths: list[int]) -> bool:
        """Only while nothing was n_evicted: what was there is overwritten."""
        return not self.n_evicted or list(lengths) == self.lengths

    def truncate(self, lengths: list[int]) -> None:
        """As KVCache.truncate. Raises UserError where it cannot."""
        if not self.can_truncate(lengths):
            raise UserError("a rolling cache that has n_evicted positions cannot go back")
        super().truncate(lengths)
