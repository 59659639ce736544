"""Matrices and norms, faster on CPUs than torch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.model.kernels.rms_norm import rms_norm


class Linear(nn.Linear):
    """nn.Linear that casts its weight to the dtype of the activations where it is used."""

    def __init__(self, n_in: int, n_out: int, bias: bool = False) -> None:
        super().__init__(n_in, n_out, bias=bias)
        self.cached_weight: Tensor | None = None  # in the activations' precision, during a training step

    def effective_weight(self) -> Tensor:
        """The matrix that forward() multiplies by, (n_out, n_in)."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        weight = self.weight if self.cached_weight is None else self.cached_weight
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if bias is None and x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_grad_enabled():
            rows = x.numel() // x.shape[-1]
            if 4 <= rows <= 16:
                # MKL reads the matrix once for all rows only in this order: 8 rows cost 1.4 times one, not 2.4.
                return (weight @ x.reshape(rows, -1).t().contiguous()).t().reshape(*x.shape[:-1], -1)
        return F.linear(x, weight, bias)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019, arXiv:1910.07467).

    Computed in fp32 and cast back before the weight, as LLaMA does.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight.to(x.dtype)
