"""Who may look at whom, and the kernel that computes it; the readable reference stands beside the fast one."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def causal(query: Tensor, key: Tensor) -> Tensor:
    """The predicate of full attention on absolute positions: a query sees itself and every earlier key."""
    return key <= query


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """softmax(q kᵀ / √D) v through SDPA, without a (T, S) matrix of scores in memory.

    Args:
        q: (B, H, T, D).
        k, v: (B, K, S, D), where K divides H; each key head serves H/K query heads.
        allowed: boolean, broadcastable to (B, H, T, S); True where the query may look.
        is_causal: instead of `allowed`, for T == S at the same positions.

    Returns: (B, H, T, D).
    """
    grouped = q.shape[1] != k.shape[1]
    if grouped and allowed is not None and q.is_cuda:
        # CUDA's kernels that take a mask do not take grouped keys: SDPA would fall to the slow math path.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))  # (B, H, S, D)
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=is_causal, enable_gqa=grouped)


def attention_weights(q: Tensor, k: Tensor, allowed: Tensor | None = None, scale: float | None = None) -> Tensor:
    """The reference: the row-stochastic matrix softmax(scale · q kᵀ) in fp32, with the shapes of attend().

    Vaswani et al. 2017 (arXiv:1706.03762), equation 1; `scale` is 1/√D unless given. Returns (B, H, T, S).
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, D)
    scores = q.float() @ k.float().transpose(-2, -1) * (scale or 1 / math.sqrt(q.shape[-1]))  # (B, H, T, S)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=-1)
