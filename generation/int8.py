"""Matrices in int8: a quarter of the bytes that decoding reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """A matrix in int8, symmetric, with one scale an output channel: weight ≈ quantized · scale.

    On a CPU the activations of each position are rounded to int8 by a scale of their own, so that the product is one
    of integers, exact, and does not depend on which rows stand beside it (LLM.int8(), Dettmers et al. 2022,
    arXiv:2208.07339, equation 4). Elsewhere, or where the CPU's integer product overflows, the weights are cast.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: (n_out, n_in), floating; bias: (n_out,), in the precision of the activations."""
        super().__init__()
        scale = weight.detach().float().abs().amax(dim=1).clamp_min(1e-30) / 127  # (n_out,)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("quantized", (weight.detach().float() / scale[:, None]).round().to(torch.int8))
        self.by_integers = weight.device.type == "cpu" and weight.shape[1] >= 8 and integer_products_are_exact()

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        y = self.multiply(x)
        return y if self.bias is None else y + self.bias

    def multiply(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), without the bias."""
        if not self.by_integers:
            return F.linear(x, self.quantized.to(x.dtype)) * self.scale.to(x.dtype)
        flat = x.reshape(-1, x.shape[-1])  # (rows, n_in)
        step = flat.abs().amax(dim=1, keepdim=True).float().clamp_min(1e-30) / 127  # (rows, 1)
        digits = (flat / step).round().to(torch.int8)
        product = torch._int_mm(digits, self.quantized.t())  # (rows, n_out) int32
        return (product * (step * self.scale)).to(x.dtype).view(*x.shape[:-1], -1)


def integer_products_are_exact() -> bool:
    """Whether this CPU multiplies int8 without overflow: those before VNNI may add pairs in 16 bits that saturate."""
    largest = torch.full((2, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, -largest.t()) == -64 * 127 * 127).all())
