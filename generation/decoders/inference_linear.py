"""Linear layers for inference: the kernels of `native` on a CPU, and weights in 8 or 4 bits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.model.layers import Linear
from thinker.native.operations import linear, max_rows
from thinker.native.quantization import Packed, pack, quantize, unpack

MAX_NATIVE_ROWS = 128


def has_known_weight(module: nn.Module) -> bool:
    """Whether a module multiplies by its effective_weight(): a Linear, or a subclass that says
    so."""
    kind = type(module)
    if not isinstance(module, Linear) or "forward" in vars(module):
        return False
    return kind.forward is Linear.forward or "effective_weight" in vars(kind)


class FewRowsLinear(Linear):
    """A Linear that is faster for a few rows in fp32 on a CPU, without gradients and without a
    bias."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        rows = x.numel() // x.shape[-1]
        is_plain = self.bias is None and x.dtype == self.weight.dtype == torch.float32
        if not (is_plain and 4 <= rows <= 16) or torch.is_grad_enabled():
            return super().forward(x)
        # In this order MKL reads the matrix once for all rows: 8 rows take 1.4 times as long as 1,
        # not 2.4.
        columns = self.weight @ x.reshape(rows, -1).t().contiguous()  # (n_out, rows)
        return columns.t().reshape(*x.shape[:-1], -1)


class NativeLinear(FewRowsLinear):
    """A Linear that reads its matrix at the speed of memory for few rows on a CPU, without
    gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        if (
            x.numel() > max_rows() * x.shape[-1]
            or torch.is_grad_enabled()
            or x.dtype != self.weight.dtype
        ):
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        y = linear(x.reshape(-1, x.shape[-1]).float(), self.weight, bias)
        return y.to(x.dtype).view(*x.shape[:-1], -1)


class QuantizedLinear(nn.Module):
    """A linear layer with weights in 8 or 4 bits and a scale per 32 inputs (native.quantization).

    With `native`, activations are rounded to int8, with a scale per 32 values. Sums within such a
    group are exact integers, and a row does not depend on other rows. Otherwise the weights are
    cast to the dtype of the activations first. This costs an extra pass, except for a single row in
    a compiled model.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int, native: bool) -> None:
        """weight: (n_out, n_in), floating point; bias: (n_out,), in the dtype of the
        activations."""
        super().__init__()
        self.bits, self.native = bits, native
        self.out_features, self.in_features = weight.shape
        quantized = quantize(weight, bits)
        codes, scale = pack(quantized, bits)[:2] if native else quantized[:2]
        if bits == 4 and not native:  # two codes per byte: inputs 0 to 15 of a group, and 16 to 31
            codes = (codes[..., :16] + 8).to(torch.uint8) | (
                (codes[..., 16:] + 8).to(torch.uint8) << 4
            )
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def packed(self) -> Packed:
        """The matrix for the kernels; for `native` only."""
        return Packed(self.codes, self.scale, self.bits, self.in_features, self.out_features)

    def dequantize(self) -> Tensor:
        """The weights, (n_out, n_in) fp32."""
        if self.native:
            return unpack(self.packed).dequantize()
        codes = self.codes
        if self.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), dim=-1).to(torch.int8) - 8
        return (codes.float() * self.scale.float()[..., None]).flatten(1)[:, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        bias = self.bias
        if self.native:
            bias = None if bias is None else bias.float()
            return (
                linear(x.reshape(-1, x.shape[-1]).float(), self.packed, bias)
                .to(x.dtype)
                .view(*x.shape[:-1], -1)
            )
        if torch.compiler.is_compiling() and x.numel() == x.shape[-1]:
            # One position: the compiler fuses this into one kernel that reads the quantized
            # weights.
            y = (
                (self.dequantize() * x.flatten().float())
                .sum(dim=1)
                .to(x.dtype)
                .view(*x.shape[:-1], -1)
            )
            return y if bias is None else y + bias
        return F.linear(x, self.dequantize().to(x.dtype), bias)
