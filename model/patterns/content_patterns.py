"""Attention patterns whose visible keys depend on the content: on the scores, or on means of blocks
of keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from thinker.model.patterns.pattern import CAUSAL, Pattern, TokenInfo


def topk(k: int) -> Pattern:
    """The k causally visible keys with the highest scores (Gupta et al. 2021, arXiv:2106.06899)."""

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        visible = CAUSAL(head, query, key)
        scores = query.scores.detach().masked_fill(~visible, -torch.inf)
        threshold = scores.topk(min(k, scores.shape[-1]), dim=-1).values[..., -1:]  # (B, H, T, 1)
        return visible & (scores >= threshold)

    return Pattern(f"topk({k})", mask_mod, includes_self=False, by_score=True, by_content=True)


def retrieve(block: int, k: int) -> Pattern:
    """The query's own block, and the k earlier blocks whose mean key has the highest inner product
    with the query.

    Blocks have `block` positions and are counted from the first position of a document. The own
    block is causal. Each query head chooses by itself; among equal products, the earlier block
    wins. Gradients flow through the chosen keys, not through the choice. MoBA (Lu et al. 2025,
    arXiv:2502.13189) trains with this pattern; Quest (Tang et al. 2024, arXiv:2406.10774) chooses
    blocks for a model trained with full attention.
    """

    def mask_mod(head: Tensor, query: TokenInfo, key: TokenInfo) -> Tensor:
        query_block = query.position // block
        key_block = key.position // block
        own = (key_block == query_block) & (key.position <= query.position)
        if key.position.shape[-1] < block:
            return own.expand(*query.vectors.shape[:3], -1)  # no block is complete
        starts, exists, number = complete_blocks(key.position, block)
        block_number = _at(key.position, starts) // block
        is_earlier = exists[:, None, None] & (block_number < query_block)  # (B or 1, 1, T, N)
        if query.document_id is not None:
            is_earlier = is_earlier & (_at(key.document_id, starts) == query.document_id)
        q = query.vectors.detach()
        scores = block_scores(q, key.vectors.detach(), starts, block)  # (B, H, T, N)
        scores = scores.masked_fill(~is_earlier, -torch.inf)
        # A stable sort breaks ties in the same way in every pass.
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        is_chosen = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., :k], True)
        number = number[:, None, None].expand(*is_chosen.shape[:-1], -1)  # (B, H, T, S)
        # Earlier blocks of the query's document are complete, so `number` is right for their keys.
        # Fewer than k blocks may be earlier; then others are chosen, too, and masked here and by
        # the document.
        return own | (is_chosen.gather(-1, number) & (key_block < query_block))

    return Pattern(f"retrieve({block}, {k})", mask_mod, by_content=True)


def complete_blocks(position: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the blocks that have all their keys: positions (..., S), consecutive in each document, S
    >= block.

    There is room for N = S // block of them, in order. Returns the index of the first key of each,
    (B or 1, N), whether it exists, (B or 1, N), and the number of the block of each key, (B or 1,
    S), without meaning for other keys.
    """
    position = position.reshape(-1, position.shape[-1])  # (B or 1, S)
    S = position.shape[1]
    first = position[:, : S - block + 1]
    last = position[:, block - 1 :]
    is_start = (first % block == 0) & (last - first == block - 1)  # (B or 1, S - block + 1)
    index = torch.arange(S - block + 1, device=position.device)
    starts = torch.where(is_start, index, S).sort(dim=-1).values[:, : S // block]
    number = F.pad(is_start, (0, block - 1)).cumsum(dim=1) - 1
    return starts.clamp(max=S - block), starts < S, number.clamp(min=0)


def block_scores(q: Tensor, k: Tensor, starts: Tensor, block: int) -> Tensor:
    """Inner products of queries with the mean key of each block, at least in fp32.

    q (B, H, T, D), k (B, K, S, D), index of the first key of each block (B or 1, N) -> (B, H, T,
    N).
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    offsets = torch.arange(block, device=k.device)
    index = (starts[..., None] + offsets).flatten(1)  # (B or 1, N · block)
    keys = torch.take_along_dim(k, index[:, None, :, None], dim=2)  # (B, K, N · block, D)
    means = keys.unflatten(2, (-1, block)).to(dtype).mean(dim=3)  # (B, K, N, D)
    means = means.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, N, D)
    with torch.autocast(q.device.type, enabled=False):
        return q.to(dtype) @ means.transpose(-2, -1)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Pick numbers of keys: x (..., S), index (B or 1, N) -> (B or 1, 1, 1, N), to compare with
    queries."""
    return x.reshape(-1, x.shape[-1]).gather(1, index)[:, None, None]
