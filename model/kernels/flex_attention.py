"""FlexAttention on CUDA, which skips blocks of a sparse pattern without visible keys."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from thinker.model.patterns.pattern import Pattern, TokenInfo

BLOCK = 128  # queries and keys per block
MAX_SCORES = 2**26  # query-key pairs tested against the pattern at once
MIN_HEAD_DIM = 16  # required by the kernel


class FlexAttention:
    """FlexAttention (Dong et al. 2024, arXiv:2412.05496) for one pattern, prepared once per pass
    for all layers.

    `query`: positions and ids of queries and keys, (T,) or (B, T) each. On CPUs: all scores, no
    gradients.
    """

    def __init__(
        self, pattern: Pattern, query: TokenInfo, n_heads: int, alibi_slopes: Tensor | None
    ) -> None:
        position, document_id, token_id = query.position, query.document_id, query.token_id
        module = torch.nn.Module()  # the compiler treats numbers inside a module as constants
        module.pattern = pattern

        def token_at(b: Tensor, i: Tensor) -> TokenInfo:
            return TokenInfo(_at(position, b, i), _at(document_id, b, i), _at(token_id, b, i))

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return module.pattern(h, token_at(b, i), token_at(b, j))

        def distance(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (token_at(b, i).position - token_at(b, j).position).abs()

        self.alibi_slopes = alibi_slopes
        self.distance = distance
        T = position.shape[-1]
        batch = 1
        for tensor in (position, document_id, token_id):
            if tensor is not None:
                batch = max(batch, tensor.numel() // T)
        heads = n_heads if pattern.by_head else 1
        counts = count_visible(mask_mod, batch, heads, T, position.device)
        is_full = counts == BLOCK * BLOCK  # the kernel does not apply the mask to these blocks
        n_partial, partial_blocks = _block_table((counts > 0) & ~is_full)
        n_full, full_blocks = _block_table(is_full)
        self.block_mask = BlockMask.from_kv_blocks(
            n_partial, partial_blocks, n_full, full_blocks, BLOCK, mask_mod, seq_lengths=(T, T)
        )

    @torch._disable_dynamo  # graph break: compiled separately, once for all layers
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
        alibi_slopes = self.alibi_slopes
        distance = self.distance

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if attn_logit_softcap is not None:  # the score is already scaled
                score = attn_logit_softcap * torch.tanh(score / attn_logit_softcap)
            if alibi_slopes is None:
                return score
            return score - alibi_slopes[h] * distance(b, i, j)

        head_dim = v.shape[-1]
        is_grouped = q.shape[1] != k.shape[1]
        if head_dim < MIN_HEAD_DIM:
            padding = (0, MIN_HEAD_DIM - head_dim)
            q, k, v = F.pad(q, padding), F.pad(k, padding), F.pad(v, padding)
        changes_scores = attn_logit_softcap is not None or alibi_slopes is not None
        modify = score_mod if changes_scores else None
        flex = _compiled() if q.is_cuda else flex_attention
        y, aux = flex(
            q,
            k,
            v,
            modify,
            self.block_mask,
            scale,
            is_grouped,
            return_aux=AuxRequest(lse=sinks is not None),
        )
        y = y[..., :head_dim]  # without visible keys y is 0 and lse is −inf
        if sinks is None:
            return y
        # The sink adds a term to the softmax sum, which scales all weights by sum / (sum + e^sink).
        kept = torch.sigmoid(aux.lse - sinks[:, None])  # (B, H, T)
        return y * kept[..., None].to(y.dtype)


def _at(x: Tensor | None, b: Tensor, i: Tensor) -> Tensor | None:
    """The number of token i in row b: x (T,) or (B, T)."""
    if x is None:
        return None
    if x.dim() == 1:
        return x[i]
    return x[b, i]


@cache
def _compiled() -> Callable:
    """Compile flex_attention once per process, at first use, because importing the compiler takes
    seconds."""
    compiled = torch.compile(flex_attention, fullgraph=True)

    def call(*args: Any, **options: Any) -> Any:
        # Each pattern compiles to one program, and another for dynamic lengths. Beyond torch's
        # default limit of 8 programs it would fail, or fall back to eager mode with all scores in
        # memory.
        with torch._dynamo.config.patch(recompile_limit=256, specialize_float=True):
            return compiled(*args, **options)

    return call


def count_visible(
    mask_mod: Callable, batch: int, heads: int, T: int, device: torch.device
) -> Tensor:
    """Count visible pairs per block, (batch or 1, heads or 1, blocks, blocks). create_block_mask
    needs more memory."""
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    keys = torch.arange(T, device=device)
    n_blocks = max(1, MAX_SCORES // (batch * heads * BLOCK * T))
    counts = []
    for queries in keys.split(n_blocks * BLOCK):
        visible = mask_mod(b, h, queries[:, None], keys)
        while visible.dim() < 4:
            visible = visible[None]  # to (batch or 1, heads or 1, queries, T)
        visible = F.pad(visible, (0, -T % BLOCK, 0, -len(queries) % BLOCK))
        blocks = visible.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        counts.append(blocks.sum((3, 5)))
    return torch.cat(counts, dim=2)


def _block_table(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of blocks, the number of set blocks and all indices, set blocks first; (..., blocks)
    bool -> int32."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()
