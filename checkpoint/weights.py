"""Load the weights of a model from a checkpoint."""

import sys
from pathlib import Path

import torch
from torch import Tensor

from thinker.checkpoint.format import CONFIG, MODEL, RANK_OF, CorruptCheckpoint
from thinker.checkpoint.read_files import load_tensors, read_header, read_json
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError

MODEL_CLASS = "model_class"  # in config.json, of a model whose class is a user's


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
    values = read_json(folder / CONFIG)
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
        from thinker.model.lora import add_lora, merge_lora

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
    tensors = load_tensors(folder, MODEL, model_tensors(model))
    # A tied head is not in the file.
    model.load_state_dict(tensors, strict=not model.config.tie_embeddings, assign=assign)
    if model.config.tie_embeddings:
        model.lm_head.weight = model.embedding.weight
