"""The state of optimizers in a checkpoint: what to expect there, and taking it from there."""

from collections.abc import Mapping

import torch
from torch import Tensor

from thinker.checkpoint.format import DTYPES
from thinker.training.optim.muon import Muon
from thinker.training.optim.optimizers import Optimizers

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def expected_state(optimizers: Optimizers, saved: Mapping[str, tuple]) -> dict[str, Tensor]:
    """Tensors with the shapes of Optimizers.tensors() after the first step: on the meta device, or
    sharded zeros.

    saved: name -> (dtype, *shape) of the tensors in a checkpoint, which say what other optimizers
    than ours keep.
    """
    expected = {}
    for optimizer, name, parameter in optimizers.named_parameters():
        prefix = f"optimizer.{name}."
        like = parameter.detach()
        like = torch.zeros_like(like) if hasattr(like, "to_local") else like.to("meta")
        if isinstance(optimizer, Muon):
            state = {"momentum_buffer": like, "row_second_moment": torch.zeros_like(like[:, :1])}
        elif type(optimizer) is torch.optim.AdamW:
            step = torch.empty((), device="meta")
            state = {"step": step, "exp_avg": like, "exp_avg_sq": torch.zeros_like(like)}
        else:
            state = _saved_state(prefix, like, saved)
        for key, value in state.items():
            expected[prefix + key] = value
    return expected


def _saved_state(prefix: str, like: Tensor, saved: Mapping[str, tuple]) -> dict[str, Tensor]:
    """What a checkpoint has for a parameter. Tensors of its shape are sharded as it is."""
    state = {}
    for name, (dtype, *shape) in saved.items():
        if not name.startswith(prefix):
            continue
        if tuple(shape) == tuple(like.shape) and TORCH_DTYPES[dtype] == like.dtype:
            tensor = torch.zeros_like(like)
        else:
            tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta")
        state[name.removeprefix(prefix)] = tensor
    return state


def load_state(optimizers: Optimizers, tensors: dict[str, Tensor]) -> None:
    """Load the result of Optimizers.tensors() from any device."""
    for optimizer in optimizers.optimizers:
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            for name, index in zip(group["param_names"], group["params"]):
                state["state"][index] = _state_of_parameter(name, tensors)
        optimizer.load_state_dict(state)


def _state_of_parameter(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"optimizer.{name}."
    state = {}
    for key, value in tensors.items():
        if key.startswith(prefix):
            state[key.removeprefix(prefix)] = value
    return state
