"""Import and export of LoRA adapters in the format of the library peft."""

import math
import re
from pathlib import Path
from typing import Any

import torch

from thinker.checkpoint import (
    MODEL,
    CorruptCheckpoint,
    load_tensors,
    open_safetensors,
    read_header,
    read_json,
)
from thinker.interop.hf_config import from_hf_config
from thinker.interop.huggingface import (
    is_hf_folder,
    load_pretrained,
    to_hf_name,
    write_json,
    write_tensors,
)
from thinker.model import Thinker, ThinkerConfig
from thinker.model.lora import RANK_OF
from thinker.runtime.errors import UserError
from thinker.runtime.reading import checked_pattern

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
# Keys that are read or do not change the result; all other keys must be empty.
KNOWN = {
    "peft_type",
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "init_lora_weights",
}
KNOWN |= {
    "task_type",
    "auto_mapping",
    "peft_version",
    "revision",
    "inference_mode",
    "lora_dropout",
    "layers_pattern",
}
KNOWN |= {"megatron_config", "megatron_core", "qalora_group_size"}
SAFE_INITS = (
    True,
    False,
    None,
    "gaussian",
    "orthogonal",
    "eva",
)  # inits that do not change the base weights


def save_adapter(checkpoint: Path, config: ThinkerConfig, base: Path, folder: Path) -> str:
    """Write a checkpoint's LoRA adapter to an existing folder and return its rank and size as text.

    base: the folder where peft finds the base model. Raises UserError if the checkpoint has no adapter, or its model,
    `config`, differs from the base in a way that an adapter cannot express.
    """
    ours, theirs = config.to_dict(), from_hf_config(read_json(base / "config.json")).to_dict()
    for name in ("max_seq_len", "rope_scaling", "attention_temperature"):
        if ours[name] != theirs[name]:
            difference = f"model.{name} is {ours[name]} but {theirs[name]} in {base}"
            raise UserError(
                f"{difference}, which an adapter cannot change; export without --adapter"
            )
    shapes = {name: shape for name, (_, *shape) in read_header(checkpoint).items()}
    if RANK_OF not in shapes:
        raise UserError(
            f"{checkpoint} has no adapters; train with train.lora_rank or export without --adapter"
        )
    like = {
        name: torch.empty(shape, device="meta") if ".lora_" in name else None
        for name, shape in shapes.items()
    }
    adapters = load_tensors(checkpoint, MODEL, like)
    rank, scale = shapes[RANK_OF][0], adapters[RANK_OF.replace("lora_A", "lora_scale")].item()
    tensors = {
        f"{PREFIX}{to_hf_name(name)}.weight": x
        for name, x in adapters.items()
        if "lora_scale" not in name
    }
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
    }
    values |= {"lora_alpha": scale * rank, "lora_dropout": 0.0, "target_modules": list(MATRICES)}
    write_json(
        folder / CONFIG, values | {"bias": "none", "fan_in_fan_out": False, "inference_mode": True}
    )
    write_tensors(tensors, folder / WEIGHTS)
    return f"rank {rank}, {sum(tensor.numel() for tensor in tensors.values()):,} parameters"


def load_adapter(folder: Path) -> tuple[Thinker, Path]:
    """Load a model with its adapter merged, and return the base's folder. Raises UserError if unsupported."""
    config = read_json(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{folder / CONFIG}: peft_type is {config.get('peft_type')!r}; only LORA is supported"
        )
    for name, value in config.items():
        if name not in KNOWN and not (value is False or value in (None, {}, [], "none")):
            raise UserError(
                f"{folder / CONFIG}: {name} is {value!r}, which is not supported; leave it empty"
            )
    if (init := config.get("init_lora_weights")) not in SAFE_INITS:
        raise UserError(
            f"{folder / CONFIG}: init_lora_weights={init!r} is not supported; it changes the base model"
        )
    rank, alpha, name = (
        config.get("r"),
        config.get("lora_alpha"),
        str(config.get("base_model_name_or_path")),
    )
    if (
        type(rank) is not int
        or rank < 1
        or type(alpha) not in (int, float)
        or not math.isfinite(alpha)
    ):
        raise CorruptCheckpoint(
            f"{folder / CONFIG}: r is {rank!r}, lora_alpha is {alpha!r}; use numbers, r >= 1"
        )
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    base = next(
        filter(
            is_hf_folder, (Path(name), folder / name, folder.absolute().parent / Path(name).name)
        ),
        None,
    )
    if base is None:
        raise UserError(
            f"the base model {name} of {folder} does not exist; put it next to the adapter"
        )
    model = load_pretrained(base)
    weights = {to_hf_name(name): weight for name, weight in model.named_parameters()}
    with open_safetensors(folder / WEIGHTS) as file, torch.no_grad():
        names = set(file.keys())
        for name in sorted(
            name for name in names if name.startswith(PREFIX) and name.endswith("lora_A.weight")
        ):
            matrix = re.sub(r"\.lora_A\.weight$", ".weight", name.removeprefix(PREFIX))
            other = name.replace("lora_A", "lora_B")
            if matrix not in weights or other not in names:
                raise CorruptCheckpoint(
                    f"{folder / WEIGHTS}: {name} matches no matrix of the model in {base}"
                )
            A, B, weight = (
                file.get_tensor(name).float(),
                file.get_tensor(other).float(),
                weights[matrix],
            )
            if (
                A.dim() != 2
                or (*B.shape[:1], *A.shape[1:]) != (*weight.shape,)
                or B.shape[1:] != A.shape[:1]
            ):
                raise CorruptCheckpoint(
                    f"{folder / WEIGHTS}: {name} does not fit the matrix of the model in {base}"
                )
            if A.shape[0] != rank or not _is_target(
                matrix.removesuffix(".weight"), config.get("target_modules")
            ):
                raise CorruptCheckpoint(
                    f"{folder / WEIGHTS}: {name} contradicts r or target_modules in {CONFIG}"
                )
            weight += scale * (B @ A)
            names -= {name, other}
    if names:
        raise UserError(f"{folder / WEIGHTS} has an unsupported tensor {min(names)}")
    return model, base


def _is_target(module: str, targets: Any) -> bool:
    """Whether peft adapts a matrix, by the end of its name or a regular expression for the whole name."""
    if isinstance(targets, str):
        try:
            return targets == "all-linear" or bool(re.fullmatch(checked_pattern(targets), module))
        except re.error as error:
            raise UserError(
                f"{CONFIG}: target_modules is {targets!r}, an invalid regex: {error}"
            ) from error
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise UserError(
            f"{CONFIG}: target_modules is {targets!r}; use a list of names or a regular expression"
        )
    return any(module == target or module.endswith(f".{target}") for target in targets)
