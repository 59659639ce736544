"""Attention in sparse patterns on CUDA: only the blocks of scores that a pattern leaves are computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

NARROWEST = 16  # width of a head that the GPU's matrix units take
LIMIT = 256  # programs compiled of one function; after torch's own limit of 8 it would hold all scores, or fail


@cache
def _compiled(function: Callable) -> Callable:
    """For the whole process, as torch's own caches; at first use, since the compiler alone imports for seconds.

    Each pattern is compiled by itself, and once more for all lengths when a second one comes. `specialise`: its numbers
    become constants of the program.
    """
    settings = {"recompile_limit": LIMIT, "specialize_float": True}
    return torch._dynamo.config.patch(settings)(torch.compile(function, fullgraph=True))


class Flex:
    """One pattern over one pass by FlexAttention (Dong et al. 2024, arXiv:2412.05496), prepared for all its layers.

    Args:
        pattern: which keys each query sees; pattern(head, query, key) takes places that broadcast.
        query: the places of queries and keys alike, each of their tensors (T,) or (B, T).
        n_heads: H, query heads.
        slopes: (H,), what a score loses with each position of distance.

    On a CPU the same scores are computed one and all, without gradients: to compare with.
    """

    def __init__(self, pattern: Any, query: Any, n_heads: int, slopes: Tensor | None) -> None:
        fixed = torch.nn.Module()
        fixed.pattern = pattern
        position, document, token, kind = query.position, query.document, query.token, type(query)
        rows = [len(x) for x in (position, document, token) if x is not None and x.dim() == 2]

        def place(b: Tensor, i: Tensor) -> Any:
            known = (x if x is None else x[i] if x.dim() == 1 else x[b, i] for x in (position, document, token))
            return kind(*known)

        def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return fixed.pattern(h.long(), place(b, q), place(b, k))  # the kernel counts heads in 32 bits; hashes need 64

        def distance(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (place(b, q).position - place(b, k).position).abs()

        self.slopes, self.distance = slopes, distance
        T, heads, on_gpu = position.shape[-1], n_heads if pattern.by_head else None, position.is_cuda
        create = (
            _compiled(create_block_mask) if on_gpu else create_block_mask
        )  # compiled: without a T · T matrix
        self.blocks = create(allowed, rows[0] if rows else None, heads, T, T, position.device)

    @torch.compiler.disable  # a compiled block stops here: this has settings of its own, and is compiled once for all blocks
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """q (B, H, T, D), k, v (B, K, T, D) -> (B, H, T, D); scale, softcap and sinks as in attention.attend."""
        slopes, distance, width = self.slopes, self.distance, v.shape[-1]

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            s = s if softcap is None else softcap * torch.tanh(s / softcap)  # s is scaled already
            return s if slopes is None else s - slopes[h] * distance(b, i, j)

        if width < NARROWEST:
            q, k, v = (F.pad(x, (0, NARROWEST - width)) for x in (q, k, v))
        attend = _compiled(flex_attention) if q.is_cuda else flex_attention
        score_mod = None if slopes is None and softcap is None else score
        grouped, aux = q.shape[1] != k.shape[1], AuxRequest(lse=sinks is not None)
        y, aux = attend(q, k, v, score_mod, self.blocks, scale, enable_gqa=grouped, return_aux=aux)
        y = y[..., :width]  # a query that sees nothing gives 0, and its lse is −inf
        # With a further score in its sum a softmax is smaller by the factor sum / (sum + e^sink), natural logarithms.
        return y if sinks is None else y * torch.sigmoid(aux.lse - sinks[:, None])[..., None].to(y.dtype)
