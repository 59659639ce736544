"""Linear layers for inference with weights in 8 or 4 bits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.native.operations import Packed, linear
from thinker.native.quantization import pack, quantize, unpack


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
        self.bits = bits
        self.native = native
        self.out_features, self.in_features = weight.shape
        quantized = quantize(weight, bits)
        if native:
            codes, scale = pack(quantized, bits)[:2]
        else:
            codes, scale = quantized[:2]
            if bits == 4:  # two codes per byte: inputs 0 to 15 of a group, and 16 to 31
                nibbles = (codes + 8).to(torch.uint8)
                codes = nibbles[..., :16] | (nibbles[..., 16:] << 4)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        if bias is not None:
            bias = bias.detach()
        self.register_buffer("bias", bias)

    @property
    def kernel_weight(self) -> Packed:
        """The matrix for the kernels; for `native` only."""
        return Packed(self.codes, self.scale, self.bits, self.in_features, self.out_features)

    def dequantize(self) -> Tensor:
        """The weights, (n_out, n_in) fp32."""
        if self.native:
            return unpack(self.kernel_weight).dequantize()
        codes = self.codes
        if self.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), dim=-1).to(torch.int8) - 8
        return (codes.float() * self.scale.float()[..., None]).flatten(1)[:, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out), in x's dtype."""
        bias = self.bias
        if self.native:
            if bias is not None:
                bias = bias.float()
            rows = x.reshape(-1, x.shape[-1]).float()
            y = linear(rows, self.kernel_weight, bias)
            return y.to(x.dtype).view(*x.shape[:-1], -1)
        if torch.compiler.is_compiling() and x.numel() == x.shape[-1]:
            # One position: the compiler fuses this into one kernel that reads the quantized
            # weights.
            products = self.dequantize() * x.flatten().float()
            y = products.sum(dim=1).to(x.dtype).view(*x.shape[:-1], -1)
            return y if bias is None else y + bias
        return F.linear(x, self.dequantize().to(x.dtype), bias)
