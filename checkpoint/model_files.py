"""Collect the files of a checkpoint from a model, and write them."""

from pathlib import Path
from typing import Any

from torch import Tensor

from thinker.checkpoint import write_files
from thinker.checkpoint.format import CONFIG, MODEL, STATE, TENSORS, TRAINING, Files
from thinker.checkpoint.weights import MODEL_CLASS, model_tensors
from thinker.model import Thinker
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext, full_tensor


def save(
    folder: Path, model: Thinker, state: dict[str, Any], training: dict[str, Tensor] | None = None
) -> None:
    """Write a checkpoint; see checkpoint_files() and write_checkpoint()."""
    write_files.write_checkpoint(folder, checkpoint_files(model, state, training))


def checkpoint_files(
    model: Thinker, state: dict[str, Any], training: dict[str, Tensor] | None = None
) -> Files:
    """Collect the files of a checkpoint, with the live tensors. Only resuming needs `training`."""
    config = model.config.to_dict()
    kind = model_class(model)
    if kind is not Thinker:
        config[MODEL_CLASS] = f"{kind.__module__}:{kind.__qualname__}"
    files = {CONFIG: config, MODEL: model_tensors(model), STATE: state}
    if training is not None:
        files[TRAINING] = training
    return files


def model_class(model: Thinker) -> type[Thinker]:
    """The class of a model, without the one that FSDP2 puts before it."""
    kind = type(model)
    return kind.__mro__[2] if hasattr(model, "unshard") else kind


def to_cpu(files: Files, dist: DistContext = SINGLE_PROCESS, always: bool = True) -> Files:
    """Copy all tensors, unsharded, to host memory, so that training can go on during the write.

    dist: the ranks, which all call this; only rank 0 gets tensors. always: also copy tensors in
    host memory.
    """
    result: Files = {}
    for name, file in files.items():
        if not name.endswith(TENSORS):
            result[name] = file
            continue
        result[name] = {}
        for key, tensor in file.items():
            full = full_tensor(tensor.detach())  # one at a time, to save memory
            is_new = hasattr(tensor, "to_local")  # already a copy
            if dist.is_main:
                result[name][key] = full.to("cpu", copy=always and not is_new)
    return result
