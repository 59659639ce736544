"""Isolated documents on CUDA: flash attention over sequences of unequal length, one after the other."""

from __future__ import annotations

from torch import Tensor


class Varlen:
    """Attention within each document, causal, by torch's variable-length flash kernel. Not written yet."""

    def __init__(self, document: Tensor, reach: int | None) -> None:
        raise NotImplementedError

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q (B, H, T, D) -> (B, H, T, D)."""
        raise NotImplementedError
