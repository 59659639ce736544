"""Context managers of a training step: fused kernels of native/, and weights that are cast once."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from thinker.model import Thinker
from thinker.model.attention import Attention
from thinker.model.dropout import Dropout
from thinker.model.layers import FusedKernels, Linear, RMSNorm
from thinker.model.transformer import MLP
from thinker.native import training as native
from thinker.native.compiler import load_training_library
from thinker.runtime.errors import UserError
from thinker.training.settings.settings import TrainSettings


def choose_kernels(train: TrainSettings, device: torch.device) -> tuple[FusedKernels | None, str]:
    """The fused kernels, or None and why. They are for CPUs: GPUs and compiled blocks have their own."""
    if device.type != "cpu":
        return None, f"they run only on CPUs; the device is {device.type}"
    if train.compile:
        return None, "train.compile is on"
    try:
        load_training_library()
    except UserError as error:
        return None, str(error)
    return FusedKernels(native.rms_norm, native.rotate_heads, native.swiglu, native.dropout), ""


@contextlib.contextmanager
def fused_kernels(model: nn.Module, kernels: FusedKernels | None) -> Iterator[None]:
    """Context manager: the model uses the kernels; outside a training step it always runs in plain torch."""
    kinds = RMSNorm | Attention | MLP | Dropout
    modules = [module for module in model.modules() if isinstance(module, kinds)] if kernels else []
    try:
        for module in modules:
            module.kernels = kernels
        yield
    finally:
        for module in modules:
            module.kernels = None


@contextlib.contextmanager
def cached_weight_casts(model: Thinker) -> Iterator[None]:
    """Context manager that casts each matrix to the activation dtype once; gradients accumulate in the fp32 weights."""
    weights = model.embedding.weight.dtype
    is_sharded = hasattr(
        model, "unshard"
    )  # FSDP2 gathers the weights of blocks in the activation dtype
    is_cast = model.dtype != weights and not is_sharded
    matrices = [m for m in model.modules() if isinstance(m, Linear)] if is_cast else []
    try:
        for matrix in matrices:
            matrix.cached_weight = matrix.weight.to(model.dtype)
        if (
            model.lm_head.cached_weight is not None
        ):  # the loss computes the gradient of lm_head.weight in fp32
            model.lm_head.cached_weight = model.lm_head.cached_weight.detach()
        yield
    finally:
        for matrix in matrices:
            matrix.cached_weight = None
