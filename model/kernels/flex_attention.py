"""Attention in sparse patterns on CUDA: only the blocks of scores that a pattern leaves are computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128  # queries and keys of a block
SCORES = 2**26  # of so many at a time it is asked whether the pattern leaves them
NARROWEST = 16  # width of a head that the GPU's matrix units take


class Flex:
    """One pattern over one pass by FlexAttention (Dong et al. 2024, arXiv:2412.05496), prepared for all its layers.

    Args:
        pattern: which keys each query sees: pattern(head, query, key) of places that broadcast.
        query: the places of queries and keys alike, each of their tensors (T,) or (B, T).
        n_heads: H, query heads.
        slopes: (H,), what a score loses with each position of distance.

    On a CPU all scores are computed, and no gradients: to compare with.
    """

    def __init__(self, pattern: Any, query: Any, n_heads: int, slopes: Tensor | None) -> None:
        kind, known = type(query), (query.position, query.document, query.token)
        fixed = torch.nn.Module()  # numbers found in one are constants to the compiler, and a pattern's shall be
        fixed.pattern = pattern

        def place(b: Tensor, i: Tensor) -> Any:
            return kind(*[x if x is None else x[i] if x.dim() == 1 else x[b, i] for x in known])

        def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return fixed.pattern(h, place(b, i), place(b, j))

        def distance(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (place(b, i).position - place(b, j).position).abs()

        self.slopes, self.distance, T = slopes, distance, query.position.shape[-1]
        batch = max(x.numel() // T for x in known if x is not None)
        left = count_left(allowed, batch, n_heads if pattern.by_head else 1, T, query.position.device)
        whole = left == BLOCK * BLOCK  # here the kernel does not ask again, pair by pair
        tables = (*_table((left > 0) & ~whole), *_table(whole))
        self.blocks = BlockMask.from_kv_blocks(*tables, BLOCK, allowed, seq_lengths=(T, T))

    @torch._disable_dynamo  # a compiled block breaks off here; this is compiled by itself, for all layers
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, attn_logit_softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """q (B, H, T, D), k, v (B, K, T, D) -> (B, H, T, D); scale, softcap, sinks as in attend()."""
        slopes, distance, width = self.slopes, self.distance, v.shape[-1]

        def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            score = (
                score if attn_logit_softcap is None else attn_logit_softcap * torch.tanh(score / attn_logit_softcap)
            )  # it is scaled already
            return score if slopes is None else score - slopes[h] * distance(b, i, j)

        if width < NARROWEST:
            q, k, v = (F.pad(x, (0, NARROWEST - width)) for x in (q, k, v))
        change = None if attn_logit_softcap is None and slopes is None else changed
        flex, grouped, want = _compiled() if q.is_cuda else flex_attention, q.shape[1] != k.shape[1], sinks is not None
        y, aux = flex(q, k, v, change, self.blocks, scale, grouped, return_aux=AuxRequest(lse=want))
        y = y[..., :width]  # where a query sees nothing 0, and its lse −inf
        # A further score in the sum makes all weights smaller, by the factor sum / (sum + e^sink).
        return y if sinks is None else y * torch.sigmoid(aux.lse - sinks[:, None])[..., None].to(y.dtype)


@cache
def _compiled() -> Callable:
    """flex_attention, for the whole process; at its first use, since the compiler alone imports for seconds.

    Each pattern is compiled by itself, and once more for all lengths as soon as a second one comes. After 8 programs
    torch would fail, or go on without its compiler: with all scores in memory.
    """
    compiled = torch.compile(flex_attention, fullgraph=True)

    def call(*args: Any, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=256, specialize_float=True):
            return compiled(*args, **options)

    return call


def count_left(allowed: Callable, batch: int, heads: int, T: int, device: torch.device) -> Tensor:
    """How many scores of each block a pattern leaves: (batch or 1, heads or 1, blocks, blocks), rows after rows.

    torch's create_block_mask holds all T · T of them; compiled it does, too, where a pattern has several parts.
    """
    b, h, at = (torch.arange(n, device=device) for n in (batch, heads, T))
    counts = []
    for i in at.split(max(1, SCORES // (batch * heads * BLOCK * T)) * BLOCK):
        seen = allowed(b[:, None, None, None], h[:, None, None], i[:, None], at)
        seen = F.pad(seen[(None,) * (4 - seen.dim())], (0, -T % BLOCK, 0, -len(i) % BLOCK))
        counts.append(seen.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).sum((3, 5)))
    return torch.cat(counts, dim=2)


def _table(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of blocks how many are set, and their indices before all others, (..., blocks) bool -> int32."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()
