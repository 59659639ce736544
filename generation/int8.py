"""Linear layers with int8 weights: decoding reads a quarter of the bytes of fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """A linear layer with int8 weights: symmetric, one scale per output channel, weight ≈ quantized · scale.

    On a CPU, activations are quantized too, with one scale per position. The int8 product is exact, so a row does not
    depend on other rows (LLM.int8(), Dettmers et al. 2022, arXiv:2208.07339, equation 4). On other devices, and on
    CPUs whose int8 product overflows, the weights are first cast to the dtype of the activations. This costs an extra
    pass, except for a single row in a compiled model.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: (n_out, n_in), floating point; bias: (n_out,), in the dtype of the activations."""
        super().__init__()
        scale = weight.detach().float().abs().amax(dim=1).clamp_min(1e-30) / 127  # (n_out,)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("quantized", (weight.detach().float() / scale[:, None]).round().to(torch.int8))
        self.use_int8_matmul = weight.device.type == "cpu" and weight.shape[1] >= 8 and int8_matmul_is_exact()

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        if self.use_int8_matmul:
            rows = x.reshape(-1, x.shape[-1])  # (N, n_in)
            x_scale = rows.abs().amax(dim=1, keepdim=True).float().clamp_min(1e-30) / 127  # (N, 1)
            x_int8 = (rows / x_scale).round().to(torch.int8)
            product = torch._int_mm(x_int8, self.quantized.t())  # (N, n_out) int32
            y = (product * (x_scale * self.scale)).to(x.dtype).view(*x.shape[:-1], -1)
        elif torch.compiler.is_compiling() and x.numel() == x.shape[-1]:
            # One position: the compiler fuses this into one kernel that reads int8 weights.
            y = ((self.quantized * x.flatten().float()).sum(dim=1) * self.scale).to(x.dtype).view(*x.shape[:-1], -1)
        else:
            y = F.linear(x, self.quantized.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


def int8_matmul_is_exact() -> bool:
    """Whether this CPU multiplies int8 without overflow. Without VNNI, sums of pairs may saturate at 16 bits."""
    largest = torch.full((2, 64), 127, dtype=torch.int8, device="cpu")
    return bool((torch._int_mm(largest, -largest.t()) == -64 * 127 * 127).all())
