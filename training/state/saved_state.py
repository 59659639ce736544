"""What a checkpoint keeps besides the model: the state of callbacks, tensors, and the machine."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinker.runtime.backend import device_name
from thinker.runtime.ranks import DistContext
from thinker.training.callback import Callback
from thinker.training.state.run_state import RunState
from thinker.training.step import TrainingStep

PLAIN = "plain PyTorch"


def describe_machine(step: TrainingStep, dist: DistContext, parallel: str) -> dict[str, str]:
    """Properties that must stay the same for bitwise equal results."""
    machine = {
        "device": device_name(step.device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "kernels": "fused" if step.kernels.is_native else PLAIN,
    }
    if dist.world_size > 1:
        machine["ranks"] = f"{dist.world_size} ({parallel})"
    return machine


def training_tensors(step: TrainingStep) -> dict[str, Tensor]:
    """What a checkpoint has besides the model: the tensors of optimizers and callbacks."""
    tensors = step.optimizers.tensors()
    for callback in step.callbacks:
        tensors |= callback.tensors()
    return tensors


def collect_state(state: RunState, callbacks: Sequence[Callback]) -> None:
    """Put what callbacks save into the state of the run."""
    for callback in callbacks:
        for key, value in callback.state_dict().items():
            assert key not in RunState.model_fields, f"{key} is a key of the run's own state"
            setattr(state, key, value)
