"""Who may look at whom, and the kernel that computes it; the readable reference stands beside the fast one."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.blockwise import attend_blockwise


def causal(query: Tensor, key: Tensor) -> Tensor:
    """The predicate of full attention on absolute positions: a query sees itself and every earlier key."""
    return key <= query


def windowed(query: Tensor, key: Tensor, window: int, sinks: int = 0) -> Tensor:
    """The predicate of a sliding window (Beltagy et al. 2020, arXiv:2004.05150) of `window` keys, itself included.

    The first `sinks` positions stay in sight of all (Xiao et al. 2023, arXiv:2309.17453).
    """
    return causal(query, key) & ((query - key < window) | (key < sinks))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v, by the kernel that is fastest for the shape.

    Many queries go through SDPA, without a (T, S) matrix of scores in memory; few on a CPU, as in decoding, through
    two batched products that read keys and values at the memory's speed. Training in bf16 on a CPU has its own way,
    kernels/blockwise.py.

    Args:
        q: (B, H, T, D).
        k, v: (B, K, S, D), where K divides H; each key head serves H/K query heads.
        allowed: boolean, broadcastable to (B, 1, T, S); True where the query may look.
        is_causal: instead of `allowed`, for T == S at the same positions.
        scale: 1/√D unless given.

    Returns: (B, H, T, D).
    """
    grouped = q.shape[1] != k.shape[1]
    if q.device.type == "cpu":
        if q.shape[2] <= 16 and not is_causal and q.dtype == torch.float32 and not torch.is_grad_enabled():
            return _attend_few(q, k, v, allowed, q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal and q.dtype == torch.bfloat16 and q.shape[2] <= 1024:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))  # (B, H, T, D)
            return attend_blockwise(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)
        k = k.contiguous()  # SDPA's flash kernel takes rows only
    elif grouped and q.is_cuda and q.shape[2] == 1:
        # One query: those of a key head stand where queries do, and no key is read twice.
        B, H, _, D = q.shape
        q = q.reshape(B, k.shape[1], -1, D)  # (B, K, H/K, D)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale).reshape(B, H, 1, -1)
    elif grouped and q.is_cuda and allowed is not None:
        # CUDA's kernels that take a mask do not take grouped keys: SDPA would fall to the slow math path.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))  # (B, H, S, D)
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def _attend_few(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    B, H, T, _ = q.shape
    K, S = k.shape[1:3]
    queries = (q * scale).reshape(B * K, H // K * T, -1)  # the queries of one key head together: (B·K, H/K·T, D)
    scores = torch.bmm(queries, k.flatten(0, 1).transpose(1, 2))  # (B·K, H/K·T, S)
    if allowed is not None:
        if allowed.dim() == 4:
            allowed = allowed.unsqueeze(2)  # (B, 1, 1, T, S)
        scores.view(B, K, H // K, T, S).masked_fill_(~allowed, -torch.inf)
    return torch.bmm(scores.softmax(dim=-1), v.flatten(0, 1)).view(B, H, T, -1)  # (B, H, T, D)


def attention_weights(q: Tensor, k: Tensor, allowed: Tensor | None = None, scale: float | None = None) -> Tensor:
    """The reference: the row-stochastic matrix softmax(scale · q kᵀ) in fp32, with the shapes of attend().

    Vaswani et al. 2017 (arXiv:1706.03762), equation 1; `scale` is 1/√D unless given. Returns (B, H, T, S).
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, D)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q.float() @ k.float().transpose(-2, -1) * scale  # (B, H, T, S)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=-1)
