"""Whether a run uses the fused kernels of native/, and the context in which its model does."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from thinker.model.attention import Attention
from thinker.model.layers import FusedKernels, RMSNorm
from thinker.model.transformer import MLP
from thinker.native import training as native
from thinker.native.compiler import load_training_library
from thinker.runtime.errors import UserError
from thinker.training.config import TrainSettings


def choose_kernels(train: TrainSettings, device: torch.device) -> tuple[FusedKernels | None, str]:
    """The fused kernels, or None and why. They are for CPUs: GPUs and compiled blocks have their own."""
    if device.type != "cpu":
        return None, f"they are for CPUs, not for {device.type}"
    if train.compile:
        return None, "torch compiles the blocks"
    try:
        load_training_library()
    except UserError as error:
        return None, str(error)
    return FusedKernels(native.rms_norm, native.rotate_heads, native.swiglu), ""


@contextlib.contextmanager
def fused_kernels(model: nn.Module, kernels: FusedKernels | None) -> Iterator[None]:
    """Context in which the model uses the kernels; outside a training step it always runs in plain torch."""
    modules = [module for module in model.modules() if isinstance(module, RMSNorm | Attention | MLP)] if kernels else []
    try:
        for module in modules:
            module.kernels = kernels
        yield
    finally:
        for module in modules:
            module.kernels = None
