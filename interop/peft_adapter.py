"""Read and write LoRA adapters in the format of the library peft."""

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinker.checkpoint import (
    MODEL,
    CorruptCheckpoint,
    load_tensors,
    open_safetensors,
    read_header,
    read_json,
)
from thinker.checkpoint.format import RANK_OF
from thinker.interop.families import Family
from thinker.interop.families.tensors import their_name, to_our_order, to_their_order
from thinker.interop.find import is_hf_folder
from thinker.interop.hf_config import find_family, from_hf_config
from thinker.interop.huggingface import load_pretrained, write_json, write_tensors
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.reading import checked_pattern

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
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
    "task_type",
    "auto_mapping",
    "peft_version",
    "revision",
    "inference_mode",
    "lora_dropout",
    "layers_pattern",
    "megatron_config",
    "megatron_core",
    "qalora_group_size",
}

# Values of init_lora_weights that do not change the weights of the base model.
SAFE_INITS = (True, False, None, "gaussian", "orthogonal", "eva")


def _family_of(base: Path) -> Family:
    """The family of a Hugging Face folder."""
    return find_family(read_json(base / "config.json").get("model_type"))


def check_adapters(base: Path) -> None:
    """Raise UserError if peft cannot adapt the matrices of a Hugging Face folder as Thinker does,
    because the folder stores several of ours as one, or transposed."""
    family = _family_of(base)
    for module in family.names:
        if not module.startswith(("attention.", "mlp.")) or not module.endswith("_proj"):
            continue
        try:
            their_name(family, f"blocks.0.{module}.lora_A")
        except UserError as error:
            raise UserError(
                f"{error}, so peft has no adapter like Thinker's; export without --adapter, which "
                "merges it"
            ) from error


def save_adapter(checkpoint: Path, config: ThinkerConfig, base: Path, folder: Path) -> str:
    """Write a checkpoint's LoRA adapter to an existing folder and return its rank and size as text.

    base: the folder where peft finds the base model. Raises UserError if the checkpoint has no
    adapter, or its model, `config`, differs from the base in a way that an adapter cannot express.
    """
    ours = config.to_dict()
    theirs = from_hf_config(read_json(base / "config.json")).to_dict()
    # peft loads the base model with the config of the base.
    for name in ("max_seq_len", "rope_scaling", "attention_temperature"):
        if ours[name] != theirs[name]:
            raise UserError(
                f"model.{name} is {ours[name]} but {theirs[name]} in {base}, "
                "which an adapter cannot change; export without --adapter"
            )
    family = _family_of(base)
    adapter = _read_adapter(checkpoint)
    rank = adapter[RANK_OF].shape[0]
    scale = adapter[RANK_OF.replace("lora_A", "lora_scale")].item()
    tensors = {}
    targets = []
    for name, tensor in adapter.items():
        if "lora_scale" in name:  # peft computes it from lora_alpha
            continue
        if name.endswith("lora_B"):
            tensor = to_their_order(family, config, name, tensor)
        theirs = their_name(family, name)
        tensors[f"{PREFIX}{theirs}.weight"] = tensor
        targets.append(theirs.split(".")[-2])
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "target_modules": list(dict.fromkeys(targets)),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / CONFIG, values)
    write_tensors(tensors, folder / WEIGHTS)
    n_parameters = sum(tensor.numel() for tensor in tensors.values())
    return f"rank {rank}, {n_parameters:,} parameters"


def _read_adapter(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's LoRA adapter, without those of the base model."""
    header = read_header(checkpoint)
    if RANK_OF not in header:
        raise UserError(
            f"{checkpoint} has no adapters; train with train.lora_rank or export without --adapter"
        )
    like: dict[str, Tensor | None] = {}
    for name, (_, *shape) in header.items():
        like[name] = None  # not read
        if ".lora_" in name:
            like[name] = torch.empty(shape, device="meta")
    return load_tensors(checkpoint, MODEL, like)


def load_adapter(folder: Path) -> tuple[Thinker, Path]:
    """Load a model with its adapter merged, and return the base's folder.

    Raises UserError if the adapter is not supported, CorruptCheckpoint if it contradicts itself or
    its base.
    """
    path = folder / CONFIG
    config = read_json(path)
    _check_config(config, path)
    rank = config["r"]
    # Rank-stabilized LoRA divides by the root of the rank.
    divisor = rank**0.5 if config.get("use_rslora") else rank
    scale = config["lora_alpha"] / divisor
    base = _find_base(folder, str(config.get("base_model_name_or_path")))
    model = load_pretrained(base)
    _merge(model, base, folder, rank, scale, config.get("target_modules"))
    return model, base


def _check_config(config: dict[str, Any], path: Path) -> None:
    """Raise an error for what Thinker does not support."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{path}: peft_type is {kind!r}; only LORA is supported")
    for name, value in config.items():
        is_empty = value is False or value in (None, {}, [], "none")
        if name not in KNOWN and not is_empty:
            raise UserError(f"{path}: {name} is {value!r}, which is not supported; leave it empty")
    init = config.get("init_lora_weights")
    if init not in SAFE_INITS:
        raise UserError(
            f"{path}: init_lora_weights={init!r} is not supported; it changes the base model"
        )
    # Compared by type(), because True is no number here.
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    is_rank = type(rank) is int and rank >= 1
    is_alpha = type(alpha) in (int, float) and math.isfinite(alpha)
    if not is_rank or not is_alpha:
        raise CorruptCheckpoint(
            f"{path}: r is {rank!r}, lora_alpha is {alpha!r}; use numbers, r >= 1"
        )


def _find_base(folder: Path, name: str) -> Path:
    """The folder of the base model: where the adapter says, or next to the adapter."""
    beside = folder.absolute().parent / Path(name).name
    # The path that training wrote may be of another machine.
    for base in (Path(name), folder / name, beside):
        if is_hf_folder(base):
            return base
    raise UserError(f"the base model {name} of {folder} does not exist; put it next to the adapter")


@torch.no_grad()
def _merge(model: Thinker, base: Path, folder: Path, rank: int, scale: float, targets: Any) -> None:
    """Add the products of the adapter's matrices to the weights of the model."""
    path = folder / WEIGHTS
    family = _family_of(base)
    our_names = dict(_matrices_by_their_names(family, model))
    weights = dict(model.named_parameters())
    with open_safetensors(path) as file:
        unused = set(file.keys())
        for name in sorted(unused):
            if not name.startswith(PREFIX) or not name.endswith(".lora_A.weight"):
                continue
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            our_name = our_names.get(f"{module}.weight")
            other = name.replace("lora_A", "lora_B")
            if our_name is None or other not in unused:
                raise CorruptCheckpoint(
                    f"{path}: {name} matches no matrix of the model in {base} that is stored by "
                    "itself"
                )
            weight = weights[our_name]
            A = file.get_tensor(name).float()  # (rank, inputs)
            B = file.get_tensor(other).float()  # (outputs, rank)
            is_product = A.dim() == 2 and B.dim() == 2 and A.shape[0] == B.shape[1]
            if not is_product or (B.shape[0], A.shape[1]) != tuple(weight.shape):
                raise CorruptCheckpoint(
                    f"{path}: {name} does not fit the matrix of the model in {base}"
                )
            if A.shape[0] != rank or not _is_target(module, targets):
                raise CorruptCheckpoint(
                    f"{path}: {name} contradicts r or target_modules in {CONFIG}"
                )
            # The order of the channels of queries and keys may differ.
            weight += scale * to_our_order(family, model.config, our_name, B @ A)
            unused -= {name, other}
    if unused:
        raise UserError(f"{path} has an unsupported tensor {min(unused)}")


def _matrices_by_their_names(family: Family, model: Thinker) -> Iterator[tuple[str, str]]:
    """Pairs of transformers' name and ours for each matrix that is stored by itself."""
    for name, _ in model.named_parameters():
        with contextlib.suppress(UserError):
            yield their_name(family, name), name


def _is_target(module: str, targets: Any) -> bool:
    """Whether peft adapts a matrix.

    targets: a regular expression for the whole name of a module, or ends of names.
    """
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        try:
            return re.fullmatch(checked_pattern(targets), module) is not None
        except re.error as error:
            raise UserError(
                f"{CONFIG}: target_modules is {targets!r}, an invalid regex: {error}"
            ) from error
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise UserError(
            f"{CONFIG}: target_modules is {targets!r}; use a list of names or a regular expression"
        )
    return any(module == target or module.endswith(f".{target}") for target in targets)
