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
    allowed: Tensor | None = None  # (T, S) or (B, 1, T, S); None: see is_causal, or everything
    is_causal: bool = False

    @classmethod
    def from_zero(cls, length: int, device: torch.device) -> Placement:
        """A whole sequence at once, without a cache."""
        return cls(torch.arange(length, device=device), length, is_causal=True)


class KVCache:
    """Preallocated keys and values: (layers, B, K, max_len, D) each, with a length for each row.

    The lengths live on the host as plain integers, so that no position has to be asked from the device. Rows of
    equal length (the usual case) use slices and need no mask to decode; rows of unequal length use a mask.
    """

    def __init__(
        self, config: ThinkerConfig, batch_size: int, max_len: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        if batch_size < 1 or max_len < 1:
            raise UserError(f"a cache of {batch_size} rows by {max_len} positions: both must be at least 1")
        shape = (config.n_layers, batch_size, config.n_kv_heads, max_len, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.max_len = max_len
        self.lengths = [0] * batch_size

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
        end, device = max(self.lengths), self.keys.device
        steps = torch.arange(length, device=device)
        if min(starts) == max(starts):
            positions = steps + starts[0]  # (T,)
            if length == 1:
                return Placement(positions, end)  # the one query is the last position: it sees every key
            if starts[0] == 0:
                return Placement(positions, end, is_causal=True)
            allowed = causal(positions[:, None], torch.arange(end, device=device))  # (T, S)
            return Placement(positions, end, allowed)
        positions = torch.tensor(starts, device=device)[:, None] + steps  # (B, T)
        allowed = causal(positions[:, None, :, None], torch.arange(end, device=device))  # (B, 1, T, S)
        return Placement(positions, end, allowed)

    def store(self, layer: int, k: Tensor, v: Tensor, place: Placement) -> tuple[Tensor, Tensor]:
        """Write the new keys and values (B, K, T, D) of one layer; returns all up to now, (B, K, S, D) each."""
        keys, values = self.keys[layer], self.values[layer]  # (B, K, max_len, D)
        if place.positions.dim() == 1:
            start = place.end - k.shape[2]
            keys[:, :, start : place.end] = k
            values[:, :, start : place.end] = v
        else:
            where = place.positions[:, None, :, None].expand_as(k)  # (B, K, T, D)
            keys.scatter_(2, where, k)
            values.scatter_(2, where, v)
        return keys[:, :, : place.end], values[:, :, : place.end]

    def rewind(self, lengths: list[int]) -> None:
        """Forget, in each row, every position from its new length on.

        So rows of unequal prompts share one prefill: pad them at the end, then rewind each to its own length.
        """
        for new, old in zip(lengths, self.lengths, strict=True):
            if not 0 <= new <= old:
                raise UserError(f"cannot rewind a row of {old} positions to {new}")
        self.lengths = list(lengths)

    def select(self, rows: list[int]) -> None:
        """Keep these rows only, in this order; a finished row leaves its batch so, and a prompt is shared by many."""
        index = torch.tensor(rows, device=self.keys.device)
        self.keys, self.values = self.keys.index_select(1, index), self.values.index_select(1, index)
        self.lengths = [self.lengths[row] for row in rows]
