"""Attention of bounded distance, in blocks of queries with the keys near them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_BLOCK, MAX_BLOCK = 64, 256  # queries per block


class LocalBlocks(NamedTuple):
    """Blocks of queries with the keys they attend to: T · (block + window) scores instead of T²."""

    size: int  # queries per block
    before: int  # keys before the block
    n_global: int  # number of first keys of the sequence

    @classmethod
    def for_distance(cls, max_distance: int, n_global: int) -> LocalBlocks:
        """Create blocks for queries that attend to the newest `max_distance` keys and the first
        `n_global`."""
        before = max(0, max_distance - 1)
        return cls(max(MIN_BLOCK, min(MAX_BLOCK, 1 << before.bit_length())), before, n_global)


def to_blocks(x: Tensor, size: int) -> Tensor:
    """Split queries into blocks and pad the last: (B, H, T, D) -> (B·blocks, H, size, D)."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))  # (B, H, blocks, size, D)
    return x.transpose(1, 2).flatten(0, 1)


def from_blocks(y: Tensor, length: int) -> Tensor:
    """Inverse of to_blocks(): (B·blocks, H, size, D) -> (B, H, T, D)."""
    blocks = -(-length // y.shape[2])
    return y.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def keys_to_blocks(x: Tensor, blocks: LocalBlocks) -> Tensor:
    """(B, K, T, D) -> (B·blocks, K, n_global + before + size, D): first keys, keys before each
    block, its own keys."""
    size, before, n_global = blocks
    near = F.pad(x, (0, 0, before, -x.shape[2] % size)).unfold(2, before + size, size)
    near = near.permute(0, 2, 1, 4, 3)  # (B, blocks, K, before + size, D)
    if n_global:
        first = x[:, None, :, :n_global].expand(
            -1, near.shape[1], -1, -1, -1
        )  # (B, blocks, K, n_global, D)
        near = torch.cat((first, near), dim=3)
    return near.flatten(0, 1)


def positions_to_blocks(
    positions: Tensor, blocks: LocalBlocks, invalid: int
) -> tuple[Tensor, Tensor]:
    """Split positions, (T,) or (B, T), for queries and keys; padded keys and repeated first keys
    get `invalid`."""
    size, before, n_global = blocks
    padding = -positions.shape[-1] % size
    queries = F.pad(positions, (0, padding)).unflatten(-1, (-1, size))  # (..., blocks, size)
    near = F.pad(positions, (before, padding), value=invalid)
    near[..., before : before + n_global] = invalid
    near = near.unfold(-1, before + size, size)  # (..., blocks, before + size)
    first = positions[..., None, :n_global].expand(*near.shape[:-1], -1)
    return queries, torch.cat((first, near), dim=-1)
