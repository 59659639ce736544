"""Less memory for activations: recompute them in the backward pass, or keep them in host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from thinker.model import Thinker


def apply_activation_checkpointing(model: Thinker, every_n_blocks: int) -> None:
    """Let every n-th block keep only its input and recompute the rest in the backward pass.

    Chen et al. 2016 (arXiv:1604.06174). The numbers stay the same; it costs one more forward pass of these blocks.
    """
    for block in model.blocks[::every_n_blocks]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def offload_activations() -> AbstractContextManager:
    """Within it, what the backward pass needs is moved from the GPU to pinned host memory until then."""
    return torch.autograd.graph.save_on_cpu(pin_memory=True)
