"""The head and its cross-entropy together, a chunk of rows at a time.

The logits of a whole batch, (B·T, V) in fp32, would be the largest tensor of a training step, and writing and reading
it costs more than the matrix products of a small model. Here a chunk's logits turn into its loss and its gradient
while they are still in the processor's cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinker.runtime.constants import IGNORE_INDEX

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # logits held at once: what fits a core's cache, what fills a GPU
CHUNK_ROWS = 256  # at least: each chunk also reads and writes the whole gradient of the weight


class _HeadLoss(torch.autograd.Function):
    """The gradients are made in the forward pass, where the logits are; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, cast: Tensor | None) -> Tensor:
        w = weight.to(x.dtype) if cast is None else cast  # (V, C)
        x_grad = torch.empty_like(x) if ctx.needs_input_grad[0] else None  # (N, C)
        w_grad = torch.zeros_like(w, dtype=torch.float32) if ctx.needs_input_grad[1] else None  # (V, C)
        total = x.new_zeros((), dtype=torch.float32)
        rows = max(CHUNK_ROWS, CHUNK_ELEMENTS.get(x.device.type, 2**24) // w.shape[0])
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            counted = targets[part] != IGNORE_INDEX  # (n,)
            target = targets[part].clamp(min=0)[:, None]  # (n, 1)
            log_probs = F.linear(x[part], w).float().log_softmax(dim=-1)  # (n, V)
            total -= (log_probs.gather(1, target)[:, 0] * counted).sum()
            if x_grad is None and w_grad is None:
                continue
            grad = log_probs.exp_()  # (n, V): softmax − one-hot, and zero where a target is not counted
            grad.scatter_add_(1, target, grad.new_full((), -1.0).expand(target.shape))
            grad = grad.mul_(counted[:, None]).to(x.dtype)
            if x_grad is not None:
                x_grad[part] = grad @ w
            if w_grad is not None:
                if w_grad.dtype == grad.dtype:
                    torch.addmm(w_grad, grad.T, x[part], out=w_grad)
                else:
                    w_grad += grad.T @ x[part]
        ctx.save_for_backward(x_grad, w_grad)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_grad, w_grad = ctx.saved_tensors
        x_grad = None if x_grad is None else (x_grad * grad).to(x_grad.dtype)  # fp16 could not hold a loss scale
        w_grad = None if w_grad is None else (w_grad * grad).to(ctx.weight_dtype)
        return x_grad, w_grad, None, None


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, cast: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of softmax(x · weightᵀ) against `targets`.

    Args:
        x: (B, T, C), after the last norm; its dtype is that of the matrix products.
        weight: (V, C), in any precision.
        targets: (B, T) int64; IGNORE_INDEX is not counted.
        cast: the weight in x's dtype, where the caller has it already.

    Returns: the sum of the losses in nats (fp32 scalar) and the number of targets counted (int64 scalar).
    """
    return _HeadLoss.apply(x.flatten(0, 1), weight, targets.flatten(), cast), (targets != IGNORE_INDEX).sum()
