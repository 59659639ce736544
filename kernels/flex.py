"""Attention in long sparse patterns on CUDA by FlexAttention."""

from __future__ import annotations

from torch import Tensor


class Flex:
    """Not written yet."""

    def __init__(self, pattern: object, query: object, n_heads: int, slopes: Tensor | None) -> None:
        raise NotImplementedError
