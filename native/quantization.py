"""Weights in 8 or 4 bits, with a scale per group of 32 inputs, in plain PyTorch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from thinker.native.operations import GROUP, Packed

BLOCK = 16  # outputs that the kernels compute together
OFFSETS = {8: 128, 4: 8}  # that make codes positive, by bits
SCALE_FACTORS = (1.0, 0.92, 0.85)  # of the scale without clipping, tried for 4 bits


class Quantized(NamedTuple):
    """codes (n_out, groups, 32) int8 and scale (n_out, groups) bf16: weight ≈ codes · scale, padded
    with zeros."""

    codes: Tensor
    scale: Tensor
    n_in: int

    def dequantize(self) -> Tensor:
        """The weights, (n_out, n_in) fp32."""
        return (self.codes.float() * self.scale.float()[..., None]).flatten(1)[:, : self.n_in]


def quantize(weight: Tensor, bits: int) -> Quantized:
    """Round a matrix (n_out, n_in) to `bits` bits.

    With 8 bits, the largest weight of a group determines its scale. With 4 bits, the scale with the
    smallest squared error among a few is used (docs/development/experiments.md compares the forms).
    """
    n_in = weight.shape[1]
    padded = F.pad(weight.detach().float(), (0, -n_in % GROUP))
    groups = padded.unflatten(1, (-1, GROUP))  # (n_out, groups, 32)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))  # with its sign
    if bits == 8:
        scale = _to_bf16(largest.abs() / 127)
        return Quantized(_round(groups, scale, bits).to(torch.int8), scale.squeeze(-1), n_in)
    best_codes = best_scale = least = None
    for factor in SCALE_FACTORS:
        # The largest weight becomes -8, or is clipped.
        codes = _round(groups, _to_bf16(largest / -8 * factor), bits)
        # The scale with the least squared error for these codes.
        squares = codes.square().sum(-1, keepdim=True)
        fitted = (groups * codes).sum(-1, keepdim=True) / squares.clamp_min(1)
        scale = _to_bf16(fitted)
        codes = _round(groups, scale, bits)
        error = (codes * scale.float() - groups).square().sum(-1, keepdim=True)
        if least is None:
            best_codes = codes
            best_scale = scale
            least = error
        is_better = error < least
        best_codes = torch.where(is_better, codes, best_codes)
        best_scale = torch.where(is_better, scale, best_scale)
        least = torch.minimum(error, least)
    return Quantized(best_codes.to(torch.int8), best_scale.squeeze(-1), n_in)


def _to_bf16(scale: Tensor) -> Tensor:
    """The scale in bf16, never 0."""
    return torch.where(scale.abs() < 1e-30, 1e-30, scale).to(torch.bfloat16)


def _round(groups: Tensor, scale: Tensor, bits: int) -> Tensor:
    lowest = -(1 << bits - 1)
    return (groups / scale.float()).round_().clamp_(lowest, -1 - lowest)


def pack(quantized: Quantized, bits: int) -> Packed:
    """Reorder codes and scales for the kernels; `n_out` is padded to a multiple of 16."""
    codes, scale, n_in = quantized
    n_out, n_groups = scale.shape
    padding = -n_out % BLOCK
    codes = F.pad(codes, (0, 0, 0, 0, 0, padding)).view(-1, BLOCK, n_groups, GROUP // 4, 4)
    codes = codes.permute(0, 2, 3, 1, 4).to(torch.int16) + OFFSETS[bits]
    codes = codes.to(torch.uint8)
    if bits == 4:  # (blocks, groups, 8, 16, 4): the first 4 quads of inputs are the low nibbles
        codes = codes[:, :, :4] | (codes[:, :, 4:] << 4)
    scale = F.pad(scale, (0, 0, 0, padding)).view(-1, BLOCK, n_groups).transpose(1, 2)
    return Packed(codes.flatten(2).contiguous(), scale.contiguous(), bits, n_in, n_out)


def unpack(packed: Packed) -> Quantized:
    """The inverse of pack()."""
    blocks, n_groups, _ = packed.codes.shape
    codes = packed.codes.view(blocks, n_groups, -1, BLOCK, 4)
    if packed.bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=2)
    codes = (codes.to(torch.int16) - OFFSETS[packed.bits]).to(torch.int8)
    codes = codes.permute(0, 3, 1, 2, 4).reshape(blocks * BLOCK, n_groups, GROUP)[: packed.n_out]
    scale = packed.scale.transpose(1, 2).reshape(blocks * BLOCK, n_groups)[: packed.n_out]
    return Quantized(codes, scale, packed.n_in)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (N, n_in) fp32 -> codes (N, groups, 32) in fp32 and scale (N, groups), as the kernels round
    them."""
    groups = F.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    scale = (groups.abs().amax(dim=-1) / 127).clamp_min(1e-30)
    return (groups / scale[..., None]).round(), scale


def quantized_linear(x: Tensor, quantized: Quantized) -> Tensor:
    """What the kernels compute: x (N, n_in) -> (N, n_out), from quantized activations, in
    float64."""
    codes, scale = quantize_activations(x)
    sums = torch.einsum("ngi,ogi->nog", codes.double(), quantized.codes.double())  # exact integers
    return torch.einsum("nog,ng,og->no", sums, scale.double(), quantized.scale.double())
