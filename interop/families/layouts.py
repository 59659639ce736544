"""How files of other libraries store our tensors: fused, transposed, or in another order.

Each layout is reversible, so that an export of what was imported has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from thinker.model import ThinkerConfig


class Layout(Protocol):
    """Some of our tensors as some of theirs, both of one kind: weights, or biases."""

    def split(
        self, theirs: list[Tensor], sizes: Sequence[torch.Size], config: ThinkerConfig
    ) -> list[Tensor]:
        """Their tensors as ours, which have these sizes."""

    def join(self, ours: list[Tensor], config: ThinkerConfig) -> list[Tensor]:
        """Our tensors as theirs."""


class Rows:
    """The rows of our matrices, one after the other. A single tensor is stored as it is."""

    def split(
        self, theirs: list[Tensor], sizes: Sequence[torch.Size], config: ThinkerConfig
    ) -> list[Tensor]:
        """As Layout.split()."""
        return list(theirs[0].split([size[0] for size in sizes]))

    def join(self, ours: list[Tensor], config: ThinkerConfig) -> list[Tensor]:
        """As Layout.join()."""
        if len(ours) == 1:
            return ours
        return [torch.cat(ours)]


class Transposed(Rows):
    """Matrices as (n_in, n_out), as in GPT-2."""

    def split(
        self, theirs: list[Tensor], sizes: Sequence[torch.Size], config: ThinkerConfig
    ) -> list[Tensor]:
        """As Layout.split()."""
        return super().split([theirs[0].t()], sizes, config)

    def join(self, ours: list[Tensor], config: ThinkerConfig) -> list[Tensor]:
        """As Layout.join()."""
        return [super().join(ours, config)[0].t()]


class RowsByHead:
    """The rows of q, k and v of the first head, then of the second, and so on, as in GPT-NeoX."""

    def split(
        self, theirs: list[Tensor], sizes: Sequence[torch.Size], config: ThinkerConfig
    ) -> list[Tensor]:
        """As Layout.split()."""
        by_head = theirs[0].unflatten(0, (-1, len(sizes), config.head_dim))  # (H, 3, D, ...)
        return [part.flatten(0, 1) for part in by_head.unbind(1)]

    def join(self, ours: list[Tensor], config: ThinkerConfig) -> list[Tensor]:
        """As Layout.join()."""
        by_head = [tensor.unflatten(0, (-1, config.head_dim)) for tensor in ours]  # (H, D, ...)
        return [torch.stack(by_head, dim=1).flatten(0, 2)]


class VectorPerHead:
    """Our vector (H·D,) as one tensor (D,) per head, as in StableLM 2."""

    def split(
        self, theirs: list[Tensor], sizes: Sequence[torch.Size], config: ThinkerConfig
    ) -> list[Tensor]:
        """As Layout.split()."""
        return [torch.cat(theirs)]

    def join(self, ours: list[Tensor], config: ThinkerConfig) -> list[Tensor]:
        """As Layout.join()."""
        return list(ours[0].split(config.head_dim))


class RowPerHead:
    """Our vector (H·D,) as a matrix (H, D), as in Cohere's models."""

    def split(
        self, theirs: list[Tensor], sizes: Sequence[torch.Size], config: ThinkerConfig
    ) -> list[Tensor]:
        """As Layout.split()."""
        return [theirs[0].flatten()]

    def join(self, ours: list[Tensor], config: ThinkerConfig) -> list[Tensor]:
        """As Layout.join()."""
        return [ours[0].unflatten(0, (-1, config.head_dim))]


def channel_order(config: ThinkerConfig, rotates_neighbors: bool) -> Tensor | None:
    """Which of their channels of a head is each of ours, (D,); None if the order is the same.

    Ours rotates the pairs (i, i + D/2) with i < rope_dim/2. Theirs are (i, i + rope_dim/2), or
    neighbors.
    """
    D = config.head_dim
    n_rotated = D if config.rope_dim is None else config.rope_dim
    if config.positions != "rope" or (n_rotated == D and not rotates_neighbors):
        return None
    rotated = torch.arange(n_rotated)
    if rotates_neighbors:
        first, second = rotated[0::2], rotated[1::2]
    else:
        first, second = rotated.chunk(2)
    still = torch.arange(n_rotated, D)
    n_first = (D - n_rotated) // 2
    return torch.cat((first, still[:n_first], second, still[n_first:]))


def reorder_channels(tensor: Tensor, order: Tensor, head_dim: int) -> Tensor:
    """Reorder the channels of each head: the rows of a matrix (H·D, C), or a vector (D,) or
    (H·D,)."""
    by_head = tensor.unflatten(0, (-1, head_dim))  # (H, D, ...)
    return by_head[:, order].flatten(0, 1)
