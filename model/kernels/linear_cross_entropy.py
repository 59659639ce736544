"""lm_head and cross-entropy fused: the logits, the largest tensor of a training step, never leave the cache."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinker.runtime.constants import IGNORE_INDEX

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # logits per chunk: they fit a core's cache or fill a GPU
MIN_CHUNK_ROWS = 256  # each chunk also reads and writes the whole gradient of the weight


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, where the logits are; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, cached_weight: Tensor | None) -> Tensor:
        w = weight.to(x.dtype) if cached_weight is None else cached_weight  # (V, C)
        x_grad = torch.empty_like(x) if ctx.needs_input_grad[0] else None  # (N, C)
        w_grad = torch.zeros_like(w, dtype=torch.float32) if ctx.needs_input_grad[1] else None  # (V, C)
        total = x.new_zeros((), dtype=torch.float32)
        rows = max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS.get(x.device.type, 2**24) // w.shape[0])
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            is_counted = targets[part] != IGNORE_INDEX  # (n,)
            target = targets[part].clamp(min=0)[:, None]  # (n, 1)
            log_probs = F.linear(x[part], w).float().log_softmax(dim=-1)  # (n, V)
            total -= (log_probs.gather(1, target)[:, 0] * is_counted).sum()
            if x_grad is None and w_grad is None:
                continue
            grad = log_probs.exp_()  # (n, V): softmax − one-hot, and 0 at ignored targets
            grad.scatter_add_(1, target, grad.new_full((), -1.0).expand(target.shape))
            grad = grad.mul_(is_counted[:, None]).to(x.dtype)
            if x_grad is not None:
                x_grad[part] = grad @ w
            if w_grad is not None and w_grad.dtype == grad.dtype:
                torch.addmm(w_grad, grad.T, x[part], out=w_grad)
            elif w_grad is not None:
                w_grad += grad.T @ x[part]
        ctx.save_for_backward(x_grad, w_grad)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_grad, w_grad = ctx.saved_tensors
        x_grad = None if x_grad is None else (x_grad * grad).to(x_grad.dtype)  # a loss scale overflows fp16
        w_grad = None if w_grad is None else (w_grad * grad).to(ctx.weight_dtype)
        return x_grad, w_grad, None, None


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, cached_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of softmax(x · weightᵀ) against `targets`, (B, T) int64: (sum in nats, fp32; number of targets).

    x (B, T, C), whose dtype the products have; weight (V, C); cached_weight: in x's dtype. IGNORE_INDEX is not counted.
    """
    total = _LinearCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), cached_weight)
    return total, (targets != IGNORE_INDEX).sum()
