"""Training what does not fit: activations computed again, or kept in the host's memory. Time for space."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from thinker.model import Thinker


def recompute(model: Thinker, every: int) -> None:
    """Let every `every`-th block keep its input alone, and compute the rest again in the backward pass.

    Chen et al. 2016 (arXiv:1604.06174). The same numbers; one more forward pass of these blocks.
    """
    for block in model.blocks[::every]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def offload() -> AbstractContextManager:
    """Within it, what the backward pass needs is moved from the GPU to page-locked host memory until then."""
    return torch.autograd.graph.save_on_cpu(pin_memory=True)
