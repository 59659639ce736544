"""RMSNorm, with a faster kernel on CPUs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.model.kernels.rms_norm import rms_norm


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
