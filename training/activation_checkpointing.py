"""Activation checkpointing: less memory, one more forward pass."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from thinker.model import Thinker


def apply_activation_checkpointing(model: Thinker, every_n_blocks: int) -> None:
    """Let every n-th block keep only its input and recompute the rest in the backward pass.

    Chen et al. 2016 (arXiv:1604.06174). The numbers stay the same; it costs one more forward pass of these blocks.
    """
    for block in model.blocks[::every_n_blocks]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
