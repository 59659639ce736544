"""A cache of bounded memory: the newest keys and the first ones, however long the text grows."""

from __future__ import annotations

import torch
from torch import Tensor

from errors import UserError
from model.attend import windowed
from model.cache import KVCache, LayerCache, Placement
from model.config import ThinkerConfig
from model.rope import Rope, rotate


class RollingLayer(LayerCache):
    """One layer's sinks, then a ring of the newest: (B, K, sinks + window, D)."""

    def store(self, q: Tensor, k: Tensor, v: Tensor, place: RollingPlacement) -> tuple[Tensor, Tensor, Tensor]:
        """As LayerCache.store; the queries may come back doubled in width, to see the sinks from nearer."""
        if place.is_causal:
            keys, values = k, v
        elif k.shape[2] == 1:
            self.write(k, v, place.slots)
            keys, values = self.keys[:, :, : place.held], self.values[:, :, : place.held]
        else:
            keys = torch.cat((self.keys[:, :, : place.held], k), dim=2)  # (B, K, held + T, D)
            values = torch.cat((self.values[:, :, : place.held], v), dim=2)
        if k.shape[2] > 1:
            self.write(k[:, :, place.kept], v[:, :, place.kept], place.slots)
        if place.nearer is None:
            return q, keys, values
        # A score is the product of q turned by its position and k turned by its own: to see the sinks from another
        # position, the query is turned once more. Beside it in the same row, each half meets its own kind of keys.
        is_sink = place.is_sink[:, None]  # (S, 1)
        near = rotate(q, place.nearer)
        return torch.cat((q, near), -1), torch.cat((keys * ~is_sink, keys * is_sink), -1), values


class RollingPlacement(Placement):
    """Adds what is written where, and from where the sinks are seen."""

    kept: slice | Tensor = slice(None)  # which of the new positions are written, for T > 1
    nearer: tuple[Tensor, Tensor] | None = None  # the turn of each query towards the sinks; None: none
    is_sink: Tensor | None = None  # (S,)


class RollingKVCache(KVCache):
    """Remembers the first `sinks` positions and the newest `window`, and forgets what lies between.

    Without sinks this is exactly attention in a sliding window. With sinks (Xiao et al. 2023, arXiv:2309.17453), a
    query sees them as if nothing lay between: from position sinks + window − 1 at most, so that no distance grows
    beyond what the cache holds. Keys are stored rotated by their absolute positions.
    """

    layer_class = RollingLayer

    def __init__(
        self,
        config: ThinkerConfig,
        batch_size: int,
        window: int,
        sinks: int,
        device: torch.device | str,
        dtype: torch.dtype,
        rope: Rope,
    ) -> None:
        if window < 1 or sinks < 0:
            raise UserError(f"a window of {window} positions and {sinks} sinks: at least 1 and 0")
        super().__init__(config, batch_size, sinks + window, device, dtype)
        self.window, self.sinks, self.rope = window, sinks, rope

    @property
    def forgotten(self) -> int:
        """How many positions of the longest row are out of sight."""
        return max(0, max(self.lengths) - self.max_len)

    def append(self, batch_size: int, length: int) -> RollingPlacement:
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
        first = torch.tensor(starts, device=self.device)  # (B,)
        positions = steps + starts[0] if even else first[:, None] + steps  # (T,) or (B, T)
        place = RollingPlacement(positions, end, held=min(end, self.max_len), slots=self._slot(positions))
        key_positions = self._held_positions(first + 1, place.held)  # (B, held), for one new position
        if length > 1:
            place.is_causal = end <= self.max_len and starts[0] == 0
            # Of the new ones, those that later ones will not overwrite.
            place.kept = torch.nonzero((positions < self.sinks) | (positions >= end - self.window))[:, 0]
            place.slots = place.slots[place.kept]
            if not place.is_causal:
                place.held = min(starts[0], self.max_len)
                old = self._held_positions(first[:1], place.held)[0]  # (held,)
                key_positions = torch.cat((old, positions))  # (S,)
                place.allowed = windowed(positions[:, None], key_positions, self.window, self.sinks)  # (T, S)
        elif not even:
            place.allowed = (key_positions >= 0)[:, None, None]  # (B, 1, 1, S)
        if self.sinks and end > self.max_len:
            back = (self.max_len - 1 - positions).clamp_max(0)  # (T,) or (B, T): 0 or less
            cos, sin = self.rope(-back, end, self.layers[0].keys.dtype)
            place.nearer = cos, -sin  # turned the other way
            place.is_sink = (key_positions if key_positions.dim() == 1 else key_positions[0]) < self.sinks
            if length == 1:
                place.is_sink = torch.arange(place.held, device=self.device) < self.sinks
        return place

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

    def rewind(self, lengths: list[int]) -> None:
        """Possible while nothing was forgotten. Raises UserError afterwards: what was there is overwritten."""
        if self.forgotten and list(lengths) != self.lengths:
            raise UserError("a rolling cache that has forgotten positions cannot go back")
        super().rewind(lengths)
