"""Causal attention on CPUs, computed in blocks of scores that stay in the CPU cache."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 128  # queries per block; keys after the last query are skipped
SCORES = 2**20  # scores per block, over all its heads


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
    # Compilation took two minutes and was no faster. Calling _uncompiled() imports the compiler,
    # for a second.
    compute = _uncompiled if torch.compiler.is_compiling() else _compute
    return compute(q, k, v, scale, bias, n_scores)


def _compute(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, n_scores: int
) -> Tensor:
    if bias is not None:
        bias = bias.to(q.dtype)
        bias = (
            bias.expand(*q.shape[:2], -1, -1) if bias.dim() == 4 else bias
        )  # (B, H, T, T), by strides
    return _BlockwiseAttention.apply(
        *(x.flatten(0, 1) for x in (q, k, v)), scale, bias, n_scores
    ).view(q.shape)


_uncompiled = torch._disable_dynamo(_compute)


def _blocks(q: Tensor, n_scores: int) -> list[tuple[slice, int, int]]:
    """Slice of heads, first query and end of queries for each block."""
    N, T, _ = q.shape
    heads = max(1, n_scores // (min(T, ROWS) * T))
    return [
        (slice(n, n + heads), t, min(t + ROWS, T))
        for n in range(0, N, heads)
        for t in range(0, T, ROWS)
    ]


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, n_scores: int
    ) -> Tensor:
        y, saved = torch.empty_like(q), []  # (N, T, D)
        future = q.new_full((ROWS, ROWS), -torch.inf).triu(1)
        for n, t, end in (blocks := _blocks(q, n_scores)):
            scores = torch.bmm(q[n, t:end], k[n, :end].transpose(1, 2)).mul_(
                scale
            )  # (heads, rows, end)
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
        ctx.scale, ctx.blocks = scale, blocks
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, *probabilities = ctx.saved_tensors
        q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (n, t, end), p in zip(ctx.blocks, probabilities):
            y_grad = grad[n, t:end]
            v_grad[n, :end] += torch.bmm(p.transpose(1, 2), y_grad)
            p_grad = torch.bmm(y_grad, v[n, :end].transpose(1, 2))  # (heads, rows, end)
            scores_grad = torch._softmax_backward_data(p_grad, p, -1, p.dtype).mul_(ctx.scale)
            torch.bmm(scores_grad, k[n, :end], out=q_grad[n, t:end])
            k_grad[n, :end] += torch.bmm(scores_grad.transpose(1, 2), q[n, t:end])
        return q_grad, k_grad, v_grad, None, None, None
