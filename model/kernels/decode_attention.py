"""Attention for a few queries on CPUs, as in decoding."""

import torch
from torch import Tensor


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float
) -> Tensor:
    """softmax(scale · q kᵀ) v for q (B, H, T, D), k, v (B, K, S, D), no gradients. Reads keys once,
    not H/K times."""
    B, H, T, _ = q.shape
    K, S = k.shape[1:3]
    queries = (q * scale).reshape(
        B * K, H // K * T, -1
    )  # the queries of one KV head together: (B·K, H/K·T, D)
    scores = torch.bmm(queries, k.flatten(0, 1).transpose(1, 2))  # (B·K, H/K·T, S)
    if allowed is not None:
        by_head = scores.view(B, K, H // K, T, S)
        if allowed.dim() == 4:  # (B or 1, H or 1, T, S) -> (B or 1, K or 1, H/K or 1, T, S)
            allowed = (
                allowed.unsqueeze(2) if allowed.shape[1] == 1 else allowed.unflatten(1, (K, -1))
            )
        if allowed.dtype == torch.bool:
            by_head.masked_fill_(~allowed, -torch.inf)
        else:
            by_head += allowed
    return torch.bmm(scores.softmax(dim=-1), v.flatten(0, 1)).view(B, H, T, -1)  # (B, H, T, D)
