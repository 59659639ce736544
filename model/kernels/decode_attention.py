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
    G = H // K  # query heads per KV head
    queries = (q * scale).reshape(B * K, G * T, -1)  # those of one KV head together
    scores = torch.bmm(queries, k.flatten(0, 1).transpose(1, 2))  # (B·K, G·T, S)
    if allowed is not None:
        by_head = scores.view(B, K, G, T, S)
        if allowed.dim() == 4 and allowed.shape[1] == 1:
            allowed = allowed.unsqueeze(2)  # (B or 1, 1, 1, T, S)
        elif allowed.dim() == 4:
            allowed = allowed.unflatten(1, (K, -1))  # (B or 1, K, G, T, S)
        if allowed.dtype == torch.bool:
            by_head.masked_fill_(~allowed, -torch.inf)
        else:
            by_head += allowed
    return torch.bmm(scores.softmax(dim=-1), v.flatten(0, 1)).view(B, H, T, -1)  # (B, H, T, D)
