"""Causal attention on CPUs, computed in blocks of scores that stay in the CPU cache."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 128  # queries per block; keys after the last query are skipped
SCORES = 2**20  # scores per block, over all its heads


class BlockwiseAttention:
    """blockwise_attention() with the bias of one mask."""

    def __init__(self, bias: Tensor | None) -> None:
        self.bias = bias

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, *unused: None) -> Tensor:
        """q (B, H, T, D), k, v (B, K, T, D) -> (B, H, T, D)."""
        n_shared = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(n_shared, dim=1)  # (B, H, T, D)
        v = v.repeat_interleave(n_shared, dim=1)
        return blockwise_attention(q, k, v, scale, self.bias)


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    n_scores: int = SCORES,
) -> Tensor:
    """Causal softmax(scale · q kᵀ + bias) v: q, k, v (B, H, T, D) -> (B, H, T, D).

    `bias`, (T, T) or broadcastable to (B, H, T, T), is −inf for hidden keys; every query attends at
    least to itself. SDPA multiplies one head at a time; these batched products are large enough for
    bf16 matrix units. The cost: half of the (B, H, T, T) probabilities are saved for the backward
    pass.
    """
    if torch.compiler.is_compiling():
        # Compilation took two minutes and was no faster.
        return _uncompiled(q, k, v, scale, bias, n_scores)
    # Not _uncompiled() here, too: calling it imports the compiler, for a second.
    return _compute(q, k, v, scale, bias, n_scores)


def _compute(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, n_scores: int
) -> Tensor:
    if bias is not None:
        bias = bias.to(q.dtype)
        if bias.dim() == 4:
            bias = bias.expand(*q.shape[:2], -1, -1)  # (B, H, T, T), by strides
    # Heads of all rows together: (B·H, T, D).
    flat_q = q.flatten(0, 1)
    flat_k = k.flatten(0, 1)
    flat_v = v.flatten(0, 1)
    y = _BlockwiseAttention.apply(flat_q, flat_k, flat_v, scale, bias, n_scores)
    return y.view(q.shape)


_uncompiled = torch._disable_dynamo(_compute)


def _blocks(q: Tensor, n_scores: int) -> list[tuple[slice, int, int]]:
    """Slice of heads, first query and end of queries for each block."""
    N, T, _ = q.shape
    n_heads = max(1, n_scores // (min(T, ROWS) * T))
    blocks = []
    for n in range(0, N, n_heads):
        for t in range(0, T, ROWS):
            blocks.append((slice(n, n + n_heads), t, min(t + ROWS, T)))
    return blocks


class _BlockwiseAttention(torch.autograd.Function):
    """Softmax attention over blocks: q, k, v (N, T, D) -> (N, T, D), N heads of all rows."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, n_scores: int
    ) -> Tensor:
        """Saves the probabilities of each block."""
        blocks = _blocks(q, n_scores)
        y = torch.empty_like(q)
        future = q.new_full((ROWS, ROWS), -torch.inf).triu(1)
        saved = []
        for n, t, end in blocks:
            scores = torch.bmm(q[n, t:end], k[n, :end].transpose(1, 2))  # (heads, rows, end)
            scores = scores.mul_(scale)
            if bias is None:
                scores[:, :, t:] += future[: end - t, : end - t]
            elif bias.dim() == 2:
                scores += bias[t:end, :end]
            else:
                index = torch.arange(len(q))[n]
                row = index // bias.shape[1]
                head = index % bias.shape[1]
                scores += bias[row, head, t:end, :end]
            probabilities = scores.softmax(dim=-1)
            saved.append(probabilities)
            torch.bmm(probabilities, v[n, :end], out=y[n, t:end])
        ctx.save_for_backward(q, k, v, *saved)
        ctx.scale = scale
        ctx.blocks = blocks
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Gradients of q, k and v."""
        q, k, v, *saved = ctx.saved_tensors
        q_grad = torch.empty_like(q)
        k_grad = torch.zeros_like(k)
        v_grad = torch.zeros_like(v)
        for (n, t, end), p in zip(ctx.blocks, saved):
            y_grad = grad[n, t:end]
            v_grad[n, :end] += torch.bmm(p.transpose(1, 2), y_grad)
            p_grad = torch.bmm(y_grad, v[n, :end].transpose(1, 2))  # (heads, rows, end)
            scores_grad = torch._softmax_backward_data(p_grad, p, -1, p.dtype).mul_(ctx.scale)
            torch.bmm(scores_grad, k[n, :end], out=q_grad[n, t:end])
            k_grad[n, :end] += torch.bmm(scores_grad.transpose(1, 2), q[n, t:end])
        return q_grad, k_grad, v_grad, None, None, None
