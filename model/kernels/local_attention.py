"""A sequence cut into blocks that stand below each other as rows of a batch, each beside the keys it can reach.

What lies outside is never computed: attention in a window costs T · (block + window) instead of T².
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def fold_queries(x: Tensor, block: int) -> Tensor:
    """Cut the positions into blocks, the last filled up: (B, H, T, D) -> (B·blocks, H, block, D)."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, block))  # (B, H, blocks, block, D)
    return x.transpose(1, 2).flatten(0, 1)


def fold_keys(x: Tensor, block: int, back: int, first: int = 0) -> Tensor:
    """For each block of queries the `first` keys of all, `back` ones before it, and its own.

    (B, K, T, D) -> (B·blocks, K, first + back + block, D). Before the beginning there are zeros.
    """
    near = F.pad(x, (0, 0, back, -x.shape[2] % block)).unfold(2, back + block, block)  # (B, K, blocks, D, back + block)
    near = near.permute(0, 2, 1, 4, 3)  # (B, blocks, K, back + block, D)
    if first:
        begin = x[:, None, :, :first].expand(-1, near.shape[1], -1, -1, -1)  # (B, blocks, K, first, D)
        near = torch.cat((begin, near), dim=3)
    return near.flatten(0, 1)


def unfold(y: Tensor, length: int) -> Tensor:
    """The inverse of fold_queries: (B·blocks, H, block, D) -> (B, H, T, D)."""
    blocks = -(-length // y.shape[2])
    return y.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def fold_places(positions: Tensor, block: int, back: int, first: int, nowhere: int) -> tuple[Tensor, Tensor]:
    """The same for what is known of each position, (T,) or (B, T): queries' (..., blocks, block) and keys'.

    A key that is not there gets `nowhere`; so does one that stands among the first already.
    """
    fill = -positions.shape[-1] % block
    queries = F.pad(positions, (0, fill)).unflatten(-1, (-1, block))  # (..., blocks, block)
    near = F.pad(positions, (back, fill), value=nowhere)
    near[..., back : back + first] = nowhere
    near = near.unfold(-1, back + block, block)  # (..., blocks, back + block)
    begin = positions[..., None, :first].expand(*near.shape[:-1], -1)
    return queries, torch.cat((begin, near), dim=-1)
