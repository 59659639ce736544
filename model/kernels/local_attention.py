"""Attention of bounded distance, in blocks of queries with the keys near them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from thinker.model.attention_dispatch import AttentionMask, attend

MIN_BLOCK = 64  # queries per block
MAX_BLOCK = 256


class LocalAttention:
    """Queries that attend to the newest `max_distance` keys and the first `n_global`, in blocks.

    A block of queries attends to the first keys of the sequence, the keys before it, and its own:
    T · (block + max_distance) scores instead of T².
    """

    def __init__(self, max_distance: int, n_global: int) -> None:
        self.n_before = max(0, max_distance - 1)  # keys before the block
        self.n_global = n_global
        wanted = 1 << self.n_before.bit_length()
        self.size = max(MIN_BLOCK, min(MAX_BLOCK, wanted))  # queries per block
        # Of all blocks: `allowed` is (blocks or B·blocks, 1 or H, size, keys). Set by MaskBuilder.
        self.mask = AttentionMask()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        attn_logit_softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """q (B, H, T, D), k, v (B, K, T, D) -> (B, H, T, D); other arguments as in attend()."""
        length = q.shape[2]
        q = to_blocks(q, self.size)
        k = self.keys_to_blocks(k)
        v = self.keys_to_blocks(v)
        allowed = self.mask.allowed
        allowed = allowed.repeat(len(q) // len(allowed), 1, 1, 1)  # (B·blocks, 1 or H, size, keys)
        mask = AttentionMask(allowed, may_be_empty=self.mask.may_be_empty)
        y = attend(q, k, v, mask, scale, attn_logit_softcap, sinks)  # (B·blocks, H, size, D)
        return from_blocks(y, length)

    def keys_to_blocks(self, x: Tensor) -> Tensor:
        """The keys of each block: (B, K, T, D) -> (B·blocks, K, n_global + n_before + size, D)."""
        padding = -x.shape[2] % self.size
        near = F.pad(x, (0, 0, self.n_before, padding))
        near = near.unfold(2, self.n_before + self.size, self.size)
        near = near.permute(0, 2, 1, 4, 3)  # (B, blocks, K, n_before + size, D)
        if self.n_global:
            first = x[:, None, :, : self.n_global]
            first = first.expand(-1, near.shape[1], -1, -1, -1)  # (B, blocks, K, n_global, D)
            near = torch.cat((first, near), dim=3)
        return near.flatten(0, 1)

    def query_blocks(self, positions: Tensor) -> Tensor:
        """The positions of queries, (T,) or (B, T), in blocks: (blocks or B·blocks, size)."""
        padding = -positions.shape[-1] % self.size
        return F.pad(positions, (0, padding)).unflatten(-1, (-1, self.size)).flatten(0, -2)

    def key_blocks(self, positions: Tensor, invalid: int) -> Tensor:
        """The positions of the keys of each block.

        (T,) or (B, T) -> (blocks or B·blocks, n_global + n_before + size). Padding, and first keys
        that are there twice, get `invalid`.
        """
        padding = -positions.shape[-1] % self.size
        near = F.pad(positions, (self.n_before, padding), value=invalid)
        near[..., self.n_before : self.n_before + self.n_global] = invalid
        near = near.unfold(-1, self.n_before + self.size, self.size)  # (..., blocks, keys)
        first = positions[..., None, : self.n_global].expand(*near.shape[:-1], -1)
        return torch.cat((first, near), dim=-1).flatten(0, -2)


def to_blocks(x: Tensor, size: int) -> Tensor:
    """Split queries into blocks and pad the last: (B, H, T, D) -> (B·blocks, H, size, D)."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))  # (B, H, blocks, size, D)
    return x.transpose(1, 2).flatten(0, 1)


def from_blocks(y: Tensor, length: int) -> Tensor:
    """Inverse of to_blocks(): (B·blocks, H, size, D) -> (B, H, T, D)."""
    blocks = -(-length // y.shape[2])
    return y.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]
