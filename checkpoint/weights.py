"""Save the weights of a model in a checkpoint, and load them from one."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinker.checkpoint import format as checkpoint_format
from thinker.checkpoint.format import (
    CONFIG,
    MODEL,
    STATE,
    TRAINING,
    CorruptCheckpoint,
    Files,
    read_header,
)
from thinker.model import Thinker, ThinkerConfig
from thinker.model.lora import RANK_OF, add_lora, merge_lora
from thinker.runtime.errors import UserError
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext, full_tensor

MODEL_CLASS = "model_class"  # in config.json, of a model whose class is a user's


def save(
    folder: Path, model: Thinker, state: dict[str, Any], training: dict[str, Tensor] | None = None
) -> None:
    """Write a checkpoint; see checkpoint_files() and write_checkpoint()."""
    checkpoint_format.write_checkpoint(folder, checkpoint_files(model, state, training))


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


def _find_class(name: str | None, folder: Path) -> type[Thinker]:
    """A subclass of Thinker in a module that is imported already. None: Thinker itself.

    Raises UserError if it is not there: a checkpoint must not choose what is imported.
    """
    if name is None:
        return Thinker
    module, _, qualname = str(name).partition(":")
    found = getattr(sys.modules.get(module), qualname, None)
    if not (isinstance(found, type) and issubclass(found, Thinker)):
        raise UserError(
            f"the model in {folder} has the class {qualname} of {module}; import that module "
            f"before, or list it in "
            "the extensions of its config"
        )
    return found


def to_cpu(files: Files, dist: DistContext = SINGLE_PROCESS, always: bool = True) -> Files:
    """Copy all tensors, unsharded, to host memory, so that training can go on during the write.

    dist: the ranks, which all call this; only rank 0 gets tensors. always: also copy tensors in
    host memory.
    """
    result: Files = {}
    for name, file in files.items():
        if not name.endswith(checkpoint_format.TENSORS):
            result[name] = file
            continue
        result[name] = {}
        for key, tensor in file.items():
            full = full_tensor(tensor.detach())  # one at a time, to save memory
            is_new = hasattr(tensor, "to_local")  # already a copy
            if dist.is_main:
                result[name][key] = full.to("cpu", copy=always and not is_new)
    return result


def model_tensors(model: Thinker) -> dict[str, Tensor]:
    """The parameters by name, without a tied head."""
    # safetensors stores neither views nor two names of one tensor.
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def read_lora_rank(folder: Path) -> int | None:
    """The rank of a checkpoint's LoRA adapters, or None without adapters.

    Raises CorruptCheckpoint.
    """
    header = read_header(folder).get(RANK_OF)
    if header is None:
        return None
    _, *shape = header
    rank = shape[0] if shape else 0
    return max(1, rank)  # load_weights() refuses a tensor of another shape


def load_model(folder: Path, device: torch.device | str = "cpu") -> Thinker:
    """Load the model of a checkpoint in eval mode, with merged adapters.

    Raises CorruptCheckpoint or UserError.
    """
    values = checkpoint_format.read_json(folder / CONFIG)
    kind = _find_class(values.pop(MODEL_CLASS, None), folder)
    config = ThinkerConfig.from_dict(values)
    if config.n_layers > len(read_header(folder)):  # a wrong number could take forever to build
        raise CorruptCheckpoint(
            f"{folder / MODEL} has fewer tensors than {folder / CONFIG} has layers"
        )
    with torch.device("meta"):
        model = kind(config)  # the weights are about to be replaced
    lora_rank = read_lora_rank(folder)
    if lora_rank is not None:
        add_lora(model, lora_rank)
    model = model.float()  # independent of torch.set_default_dtype()
    load_weights(model, folder, assign=True)
    if lora_rank is not None:
        merge_lora(model)
    return model.to(device).eval()


def load_weights(model: Thinker, folder: Path, assign: bool = False) -> None:
    """Copy a checkpoint's weights into the parameters, or with `assign` replace them.

    Raises CorruptCheckpoint.
    """
    tensors = checkpoint_format.load_tensors(folder, MODEL, model_tensors(model))
    # A tied head is not in the file.
    model.load_state_dict(tensors, strict=not model.config.tie_embeddings, assign=assign)
    if model.config.tie_embeddings:
        model.lm_head.weight = model.embedding.weight
