"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) in the rotate-half convention of LLaMA and Qwen."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rope(nn.Module):
    """Tables of cos and sin by absolute position, made on demand; they are neither parameters nor saved."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.table: tuple[Tensor, Tensor] | None = None

    def forward(self, positions: Tensor, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin at `positions` ((T,) or (B, T)), all below `end`, which the host knows without asking the device.

        Returns two tensors (T, D) or (B, 1, T, D), to be broadcast over (B, H, T, D): cos twice; −sin, sin.
        """
        if self.table is None or len(self.table[0]) < end or self.table[0].device != positions.device:
            self.table = self._tables(max(end, 2 * len(self.table[0]) if self.table else 0), positions.device)
        cos, sin = (table[positions].to(dtype) for table in self.table)
        if positions.dim() == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, T, D)
        return cos, sin

    def _tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        # On the host and in float64: the angle of a far position would lose its fraction in fp32.
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        angles = torch.outer(torch.arange(length, dtype=torch.float64), self.theta**-exponents)  # (length, D/2)
        cos, sin = angles.cos().float(), angles.sin().float()
        return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)  # (length, D)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its position's angle. x: (B, H, T, D)."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
