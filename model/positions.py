"""Position encodings beside RoPE: ALiBi and sinusoidal embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(n_heads: int, device: torch.device | str = "cpu") -> Tensor:
    """What each head subtracts from scores per position of distance, (H,) (ALiBi, Press et al. 2022, arXiv:2108.12409).

    2^(−8h/H) for h = 1..H if H is a power of two; else those of the power below and every other one of the power above.
    """
    power = 1 << (n_heads.bit_length() - 1)
    exponents = [8 * h / power for h in range(1, power + 1)]
    exponents += [8 * h / (2 * power) for h in range(1, 2 * (n_heads - power) + 1, 2)]
    return torch.tensor([2.0**-e for e in exponents], device=device)


def sinusoidal_embedding(positions: Tensor, width: int) -> Tensor:
    """sin and cos of each position at width/2 wavelengths from 2π to 10,000·2π, (..., T) -> (..., T, width).

    Vaswani et al. 2017 (arXiv:1706.03762), section 3.5, where they are interleaved.
    """
    rates = torch.exp(torch.arange(0, width, 2, device=positions.device) * (-math.log(10000.0) / width))  # (width / 2,)
    angles = positions[..., None] * rates  # (..., T, width / 2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[..., :width]
