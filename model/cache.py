"""The keys and values of the positions already seen, so that each new token costs one position's work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from errors import UserError
from model.attend import causal
from model.config import ThinkerConfig


@dataclass
class Placement:
    """Where one forward pass stands: its positions, and what each of them may look at. The host knows all of it."""

    positions: Tensor  # (T,), or (B, T) where the rows of a cache have unequal lengths
    end: int  # one past the last position
    held: int = 0  # slots of the cache that attention reads
    allowed: Tensor | None = None  # (T, S) or (B, 1, T, S); None: see is_causal, or everything
    is_causal: bool = False
    slots: Tensor | None = None  # where in the cache the new ones go, like positions

    @classmethod
    def from_zero(cls, length: int, device: torch.device) -> Placement:
        """A whole sequence at once, without a cache."""
        return cls(torch.arange(length, device=device), length, is_causal=True)


@dataclass
class LayerCache:
    """One layer's keys and values, (B, K, max_len, D) each."""

    keys: Tensor
    values: Tensor
    tensors = ("keys", "values")  # what has a row for each of the batch

    def store(self, q: Tensor, k: Tensor, v: Tensor, place: Placement) -> tuple[Tensor, Tensor, Tensor]:
        """Write the new keys and values (B, K, T, D); returns the queries, and all up to now, (B, K, S, D) each."""
        self.write(k, v, place.slots)
        if place.is_causal:  # they are all there is
            return q, k, v
        return q, self.keys[:, :, : place.held], self.values[:, :, : place.held]

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


class KVCache:
    """Preallocated keys and values of every layer, with a length for each row.

    The lengths live on the host as plain integers, so that no position has to be asked from the device. Rows of
    equal length (the usual case) need no mask to decode; rows of unequal length use one. What lies in slots that no
    row has reached is never looked at.

    `fixed` reads every slot under a mask, whatever the lengths, so that shapes never change (for CUDA graphs).
    """

    forgotten = 0  # positions out of sight: none, unless it rolls

    def __init__(
        self, config: ThinkerConfig, batch_size: int, max_len: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        if batch_size < 1 or max_len < 1:
            raise UserError(f"a cache of {batch_size} rows by {max_len} positions: both must be at least 1")
        shape = (batch_size, config.n_kv_heads, max_len, config.head_dim)
        self.layers = [self._new_layer(shape, torch.device(device), dtype) for _ in range(config.n_layers)]
        self.max_len, self.device, self.fixed = max_len, torch.device(device), False
        self.lengths = [0] * batch_size

    def _new_layer(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> LayerCache:
        B, K, max_len, D = shape
        keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        if device.type == "cpu" and dtype == torch.float32:
            # The same shape in another order: q·kᵀ over columns runs at the memory's speed, over rows at 3/4 of it;
            # where columns begin as cache lines do, a little faster still.
            keys = torch.zeros(B, K, D, -(-max_len // 16) * 16).transpose(2, 3)[:, :, :max_len]
        return LayerCache(keys, values)

    @property
    def nbytes(self) -> int:
        """Memory of all keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def append(self, batch_size: int, length: int) -> Placement:
        """Make room for `length` new positions in every row, and say where they stand.

        Raises UserError, with nothing changed, where they do not fit.
        """
        if batch_size != len(self.lengths):
            raise UserError(f"the cache has {len(self.lengths)} rows and was given a batch of {batch_size}")
        if max(self.lengths) + length > self.max_len:
            raise UserError(
                f"the cache holds {self.max_len} positions, {max(self.lengths)} are taken: {length} more do not fit; "
                "make it longer with new_cache(max_len=...)"
            )
        starts = self.lengths
        self.lengths = [start + length for start in starts]
        end = max(self.lengths)
        held = self.max_len if self.fixed else end
        steps = torch.arange(length, device=self.device)
        if min(starts) == max(starts):
            positions = steps + starts[0]  # (T,)
            if starts[0] == 0 and not self.fixed:
                return Placement(positions, end, end, is_causal=True, slots=positions)
            if length == 1 and not self.fixed:
                return Placement(positions, end, end, slots=positions)  # the last position sees every key
            allowed = causal(positions[:, None], torch.arange(held, device=self.device))  # (T, S)
            return Placement(positions, end, held, allowed, slots=positions)
        positions = torch.tensor(starts, device=self.device)[:, None] + steps  # (B, T)
        allowed = causal(positions[:, None, :, None], torch.arange(held, device=self.device))  # (B, 1, T, S)
        return Placement(positions, end, held, allowed, slots=positions)

    def rewind(self, lengths: list[int]) -> None:
        """Forget, in each row, every position from its new length on: drafts that were refused, a turn undone."""
        for new, old in zip(lengths, self.lengths, strict=True):
            if not 0 <= new <= old:
                raise UserError(f"cannot rewind a row of {old} positions to {new}")
        self.lengths = list(lengths)

    def select(self, rows: list[int]) -> None:
        """Keep these rows only, in this order; a finished row leaves its batch so, and a prompt is shared by many."""
        index = torch.tensor(rows, device=self.device)
        for layer in self.layers:
            for name in layer.tensors:
                old = getattr(layer, name)
                setattr(layer, name, _like(old, len(rows)).copy_(old.index_select(0, index)))
        self.lengths = [self.lengths[row] for row in rows]

    def extend(self, other: KVCache) -> None:
        """Add another cache's rows below these; both hold as many positions."""
        for mine, its in zip(self.layers, other.layers):
            for name in mine.tensors:
                both = getattr(mine, name), getattr(its, name)
                setattr(mine, name, torch.cat(both, out=_like(both[0], len(both[0]) + len(both[1]))))
        self.lengths = self.lengths + other.lengths


def _like(tensor: Tensor, rows: int) -> Tensor:
    """An empty tensor of so many rows that lies in memory as `tensor` does."""
    return torch.empty_strided((rows, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
