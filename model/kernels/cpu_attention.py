"""Attention on CPUs: causal by blocks of scores that stay in the cache, of few queries, and of bounded distance."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 128  # queries per block; keys after its last query are skipped
SCORES = 2**20  # scores per block, over its heads
MIN_BLOCK, MAX_BLOCK = 64, 256  # queries per block of local attention


# Not compiled: that took two minutes and was no faster. torch.compiler.disable would import the compiler at once.
@torch._disable_dynamo
def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """softmax(scale · q kᵀ + bias) v under the causal mask: q, k, v (B, H, T, D) -> (B, H, T, D).

    `bias`, (T, T) or broadcastable to (B, H, T, T), is −inf for hidden keys; every query attends at least to itself.
    SDPA multiplies head by head; batched products are large enough for the processor's bf16 units. In exchange, half
    of the (B, H, T, T) probabilities are saved for the backward pass.
    """
    if bias is not None:
        bias = bias.to(q.dtype)
        bias = bias.expand(*q.shape[:2], -1, -1) if bias.dim() == 4 else bias  # (B, H, T, T), by strides
    return _BlockwiseAttention.apply(*(x.flatten(0, 1) for x in (q, k, v)), scale, bias).view(q.shape)


def _blocks(q: Tensor) -> list[tuple[slice, int, int]]:
    """Slice of heads, first query and end of the queries of each block."""
    N, T, _ = q.shape
    heads = max(1, SCORES // (min(T, ROWS) * T))
    return [(slice(n, n + heads), t, min(t + ROWS, T)) for n in range(0, N, heads) for t in range(0, T, ROWS)]


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        y, saved = torch.empty_like(q), []  # (N, T, D)
        future = q.new_full((ROWS, ROWS), -torch.inf).triu(1)
        for n, t, end in _blocks(q):
            scores = torch.bmm(q[n, t:end], k[n, :end].transpose(1, 2)).mul_(scale)  # (heads, rows, end)
            if bias is None:
                scores[:, :, t:] += future[: end - t, : end - t]
            elif bias.dim() == 2:
                scores += bias[t:end, :end]
            else:
                row = torch.arange(len(q))[n]
                scores += bias[row // bias.shape[1], row % bias.shape[1], t:end, :end]
            saved.append(scores.softmax(dim=-1))
            torch.bmm(saved[-1], v[n, :end], out=y[n, t:end])
        ctx.save_for_backward(q, k, v, *saved)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, *probabilities = ctx.saved_tensors
        q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (n, t, end), p in zip(_blocks(q), probabilities):
            y_grad = grad[n, t:end]
            v_grad[n, :end] += torch.bmm(p.transpose(1, 2), y_grad)
            p_grad = torch.bmm(y_grad, v[n, :end].transpose(1, 2))  # (heads, rows, end)
            scores_grad = torch._softmax_backward_data(p_grad, p, -1, p.dtype).mul_(ctx.scale)
            torch.bmm(scores_grad, k[n, :end], out=q_grad[n, t:end])
            k_grad[n, :end] += torch.bmm(scores_grad.transpose(1, 2), q[n, t:end])
        return q_grad, k_grad, v_grad, None, None


def decode_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v for q (B, H, T, D), k, v (B, K, S, D), no gradients; reads keys once, SDPA H/K times."""
    B, H, T, _ = q.shape
    K, S = k.shape[1:3]
    queries = (q * scale).reshape(B * K, H // K * T, -1)  # the queries of one KV head together: (B·K, H/K·T, D)
    scores = torch.bmm(queries, k.flatten(0, 1).transpose(1, 2))  # (B·K, H/K·T, S)
    if allowed is not None:
        by_head = scores.view(B, K, H // K, T, S)
        if allowed.dim() == 4:  # (B or 1, H or 1, T, S) -> (B or 1, K or 1, H/K or 1, T, S)
            allowed = allowed.unsqueeze(2) if allowed.shape[1] == 1 else allowed.unflatten(1, (K, -1))
        if allowed.dtype == torch.bool:
            by_head.masked_fill_(~allowed, -torch.inf)
        else:
            by_head += allowed
    return torch.bmm(scores.softmax(dim=-1), v.flatten(0, 1)).view(B, H, T, -1)  # (B, H, T, D)


class LocalBlocks(NamedTuple):
    """Blocks of queries with the keys that each attends to: T · (block + window) scores instead of T²."""

    size: int  # queries per block
    before: int  # keys before the block
    n_global: int  # first keys of the sequence

    @classmethod
    def for_distance(cls, max_distance: int, n_global: int) -> LocalBlocks:
        """Blocks for a pattern whose queries attend to the newest `max_distance` keys and the first `n_global`."""
        before = max(0, max_distance - 1)
        return cls(max(MIN_BLOCK, min(MAX_BLOCK, 1 << before.bit_length())), before, n_global)


def to_blocks(x: Tensor, size: int) -> Tensor:
    """Cut the queries into blocks, the last one padded: (B, H, T, D) -> (B·blocks, H, size, D)."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))  # (B, H, blocks, size, D)
    return x.transpose(1, 2).flatten(0, 1)


def from_blocks(y: Tensor, length: int) -> Tensor:
    """The inverse of to_blocks: (B·blocks, H, size, D) -> (B, H, T, D)."""
    blocks = -(-length // y.shape[2])
    return y.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def keys_to_blocks(x: Tensor, blocks: LocalBlocks) -> Tensor:
    """(B, K, T, D) -> (B·blocks, K, n_global + before + size, D): first keys, those before each block, and its own."""
    size, before, n_global = blocks
    near = F.pad(x, (0, 0, before, -x.shape[2] % size)).unfold(2, before + size, size)
    near = near.permute(0, 2, 1, 4, 3)  # (B, blocks, K, before + size, D)
    if n_global:
        first = x[:, None, :, :n_global].expand(-1, near.shape[1], -1, -1, -1)  # (B, blocks, K, n_global, D)
        near = torch.cat((first, near), dim=3)
    return near.flatten(0, 1)


def positions_to_blocks(positions: Tensor, blocks: LocalBlocks, invalid: int) -> tuple[Tensor, Tensor]:
    """The same for one number per position, (T,) or (B, T); padded keys and repeated first ones are `invalid`."""
    size, before, n_global = blocks
    padding = -positions.shape[-1] % size
    queries = F.pad(positions, (0, padding)).unflatten(-1, (-1, size))  # (..., blocks, size)
    near = F.pad(positions, (before, padding), value=invalid)
    near[..., before : before + n_global] = invalid
    near = near.unfold(-1, before + size, size)  # (..., blocks, before + size)
    first = positions[..., None, :n_global].expand(*near.shape[:-1], -1)
    return queries, torch.cat((first, near), dim=-1)
