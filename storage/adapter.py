"""LoRA adapters in the format of the library peft, both ways: a small folder beside the model that it was made for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from errors import UserError
from model import Thinker
from model.lora import RANK_OF
from storage.checkpoint import Damaged, opened, read_json
from storage.huggingface import dump, load_folder, their_name

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
# What would change the result, at the values that we compute with.
PLAIN = {"bias": "none", "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None, "rank_pattern": {}}
PLAIN |= {"alpha_pattern": {}, "layers_to_transform": None, "layer_replication": None, "lora_bias": False}


def write_adapter(checkpoint: Path, base: str, folder: Path) -> None:
    """Write the adapters of a checkpoint into an existing folder. `base`: where peft finds the model they belong to.

    Raises UserError where the checkpoint has none.
    """
    tensors: dict[str, Tensor] = {}
    with opened(checkpoint / "model.safetensors") as file:
        names = list(file.keys())
        if RANK_OF not in names:
            raise UserError(f"{checkpoint} has no adapters: it was not trained with train.lora_rank")
        rank = file.get_slice(RANK_OF).get_shape()[0]
        scale = file.get_tensor(RANK_OF.replace("lora_A", "lora_scale")).item()
        for name in (name for name in names if name.endswith(("lora_A", "lora_B"))):
            tensors[f"{PREFIX}{their_name(name)}.weight"] = file.get_tensor(name)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank}
    config |= {"lora_alpha": scale * rank, "lora_dropout": 0.0, "target_modules": list(MATRICES)}
    dump(folder / CONFIG, config | {"bias": "none", "fan_in_fan_out": False, "inference_mode": True})
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load_adapter(folder: Path) -> tuple[Thinker, Path]:
    """The model that an adapter was made for, with the adapter merged, and the base's folder.

    Raises UserError where the adapter is of a kind that is not known, or its base is not a folder on this disk.
    """
    config = read_json(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{folder / CONFIG}: peft_type is {config.get('peft_type')!r}; LORA is known")
    for name, plain in PLAIN.items():
        if config.get(name, plain) not in (plain, None, {}, False):
            raise UserError(f"{folder / CONFIG}: {name} is {config[name]!r}, which is not known here")
    base = _base(folder, str(config.get("base_model_name_or_path")))
    thinker, scale = load_folder(base), _scale(config, folder)
    weights = dict(thinker.named_parameters())
    ours = {their_name(name): name for name in weights}
    with opened(folder / WEIGHTS) as file, torch.no_grad():
        names = set(file.keys())
        for name in sorted(name for name in names if name.endswith("lora_A.weight")):
            matrix = re.sub(r"\.lora_A\.weight$", ".weight", name.removeprefix(PREFIX))
            other = name.replace("lora_A", "lora_B")
            if matrix not in ours or other not in names:
                raise Damaged(f"{folder / WEIGHTS}: {name} belongs to no matrix of the model in {base}")
            A, B, weight = file.get_tensor(name).float(), file.get_tensor(other).float(), weights[ours[matrix]]
            if (B.shape[0], A.shape[1]) != tuple(weight.shape) or A.shape[0] != B.shape[1]:
                raise Damaged(f"{folder / WEIGHTS}: {name} does not fit the matrix of the model in {base}")
            weight += scale * (B @ A)
            names -= {name, other}
    if names:
        raise UserError(f"{folder / WEIGHTS} has a tensor {min(names)}, which is not known here")
    return thinker, base


def _scale(config: dict[str, Any], folder: Path) -> float:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise Damaged(f"{folder / CONFIG}: r and lora_alpha are {rank!r} and {alpha!r}")
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _base(folder: Path, name: str) -> Path:
    """Where the base lies: a path as it is, or beside the adapter."""
    for place in (Path(name), folder / name):
        if (place / "config.json").is_file():
            return place
    raise UserError(f"the adapter in {folder} was made for {name}, which is no folder here; put it there")
