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
        tensors = query.position, query.document_id, query.token_id
        module = torch.nn.Module()  # the compiler treats numbers inside a module as constants
        module.pattern = pattern

        def token_at(b: Tensor, i: Tensor) -> TokenInfo:
            return TokenInfo(
                *[x if x is None else x[i] if x.dim() == 1 else x[b, i] for x in tensors]
            )

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return module.pattern(h, token_at(b, i), token_at(b, j))

        def distance(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (token_at(b, i).position - token_at(b, j).position).abs()

        self.alibi_slopes, self.distance = alibi_slopes, distance
        T = query.position.shape[-1]
        batch = max(x.numel() // T for x in tensors if x is not None)
        counts = count_visible(
            mask_mod, batch, n_heads if pattern.by_head else 1, T, query.position.device
        )
        is_full = counts == BLOCK * BLOCK  # the kernel does not apply the mask to these blocks
        tables = (*_block_table((counts > 0) & ~is_full), *_block_table(is_full))
        self.block_mask = BlockMask.from_kv_blocks(*tables, BLOCK, mask_mod, seq_lengths=(T, T))

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
        alibi_slopes, distance, head_dim = self.alibi_slopes, self.distance, v.shape[-1]

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if attn_logit_softcap is not None:  # the score is already scaled
                score = attn_logit_softcap * torch.tanh(score / attn_logit_softcap)
            return score if alibi_slopes is None else score - alibi_slopes[h] * distance(b, i, j)

        if head_dim < MIN_HEAD_DIM:
            q, k, v = (F.pad(x, (0, MIN_HEAD_DIM - head_dim)) for x in (q, k, v))
        modifies = attn_logit_softcap is not None or alibi_slopes is not None
        flex, is_grouped = _compiled() if q.is_cuda else flex_attention, q.shape[1] != k.shape[1]
        options = score_mod if modifies else None, self.block_mask, scale, is_grouped
        y, aux = flex(q, k, v, *options, return_aux=AuxRequest(lse=sinks is not None))
        y = y[..., :head_dim]  # without visible keys y is 0 and lse is −inf
        # The sink adds a term to the softmax sum, which scales all weights by sum / (sum + e^sink).
        return (
            y
            if sinks is None
            else y * torch.sigmoid(aux.lse - sinks[:, None])[..., None].to(y.dtype)
        )


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
    b, h, positions = (torch.arange(n, device=device) for n in (batch, heads, T))
    counts = []
    for i in positions.split(max(1, MAX_SCORES // (batch * heads * BLOCK * T)) * BLOCK):
        visible = mask_mod(b[:, None, None, None], h[:, None, None], i[:, None], positions)
        visible = F.pad(visible[(None,) * (4 - visible.dim())], (0, -T % BLOCK, 0, -len(i) % BLOCK))
        counts.append(visible.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).sum((3, 5)))
    return torch.cat(counts, dim=2)


def _block_table(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of blocks, the number of set blocks and all indices, set blocks first; (..., blocks)
    bool -> int32."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()
