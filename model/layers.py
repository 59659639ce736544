"""Linear layers, norms and activations."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.model.registries import ACTIVATIONS, NORMS


class Linear(nn.Linear):
    """nn.Linear that casts its weight to the dtype of the activations."""

    def __init__(self, n_in: int, n_out: int, bias: bool = False) -> None:
        super().__init__(n_in, n_out, bias=bias)

    def effective_weight(self) -> Tensor:
        """The matrix that forward() multiplies by, (n_out, n_in).

        A subclass that overrides forward() overrides this, too, if such a matrix exists. Inference
        then uses it.
        """
        return self.weight

    def cast_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight in the dtype of the activations."""
        return self.weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        bias = self.bias
        if bias is not None:
            bias = bias.to(x.dtype)
        return F.linear(x, self.cast_weight(x.dtype), bias)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019, arXiv:1910.07467), computed in fp32
    before the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width), in x's dtype."""
        at_least_fp32 = torch.promote_types(x.dtype, torch.float32)
        # Unlike x.square().mean(), this reads x in its dtype and adds in fp32, without a copy of x
        # in fp32.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=at_least_fp32)  # (..., 1)
        scale = torch.rsqrt(norm * norm / x.shape[-1] + self.eps)  # (..., 1)
        return (x * scale).to(x.dtype) * self.weight.to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """(x − mean(x)) / √(var(x) + eps) · weight + bias (Ba et al. 2016, arXiv:1607.06450), computed
    in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width), in x's dtype."""
        at_least_fp32 = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(at_least_fp32)
        bias = self.bias.to(at_least_fp32)
        y = F.layer_norm(x.to(at_least_fp32), self.normalized_shape, weight, bias, self.eps)
        return y.to(x.dtype)


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


NORMS.register("rmsnorm", RMSNorm)
NORMS.register("layernorm", LayerNorm)

ACTIVATIONS.register("silu", F.silu)
ACTIVATIONS.register("gelu", F.gelu)
ACTIVATIONS.register("relu", F.relu)
ACTIVATIONS.register("relu2", relu_squared)
