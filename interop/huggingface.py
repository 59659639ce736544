"""Import and export of Hugging Face folders: config.json, generation_config.json and safetensors."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from thinker.checkpoint import CorruptCheckpoint, model_tensors, open_safetensors, read_json
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interop.hf_config import from_hf_config, special_token_ids, to_hf_config
from thinker.model import Thinker
from thinker.model.attention_temperature import fold_attention_temperature
from thinker.runtime.errors import RunError, UserError

INDEX, SINGLE_FILE, LM_HEAD = "model.safetensors.index.json", "model.safetensors", "lm_head.weight"
HF_NAMES = {
    "embedding": "model.embed_tokens", "norm": "model.norm", "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm", "attention": "self_attn", "blocks": "model.layers",
}  # fmt: skip


def is_hf_folder(path: Path) -> bool:
    """Whether a folder looks like a Hugging Face model."""
    return os.path.isfile(path / "config.json") and not os.path.isfile(path / "state.json")


def to_hf_name(name: str) -> str:
    """Name of one of our parameters in transformers."""
    return ".".join(HF_NAMES.get(part, part) for part in name.split("."))


def load_pretrained(folder: Path) -> Thinker:
    """Load the model in a Hugging Face folder in fp32, ready to sample from.

    Raises UserError for unsupported models, CorruptCheckpoint if files are missing or inconsistent.
    """
    values = read_json(folder / "config.json")
    config, files = from_hf_config(values), _find_tensors(folder)
    if config.n_layers > len(files):  # building so many blocks could take forever
        raise CorruptCheckpoint(
            f"{folder} has fewer tensors than config.json has layers ({config.n_layers})"
        )
    with torch.device("meta"):
        model = Thinker(config)  # uses no memory for weights that are replaced below
    expected = {to_hf_name(name): name for name in model_tensors(model)}
    unused = {
        name for name in files if name.endswith("rotary_emb.inv_freq")
    }  # RoPE's frequencies in old files
    unused |= {LM_HEAD} if config.tie_embeddings else set()
    if missing := sorted(expected.keys() - files.keys()):
        raise CorruptCheckpoint(f"{folder} has no tensor {missing[0]}")
    if unknown := sorted(files.keys() - expected.keys() - unused):
        raise UserError(
            f"{folder} has an unknown tensor {unknown[0]}, which is not part of {values['model_type']}"
        )
    tensors, parameters = {}, model.state_dict()
    for path in sorted(set(files.values())):
        with open_safetensors(path) as file:
            for name in (name for name in expected if files[name] == path):
                stored, wanted = file.get_slice(name), list(parameters[expected[name]].shape)
                if stored.get_dtype() not in ("F32", "BF16", "F16") or stored.get_shape() != wanted:
                    found = f"{stored.get_dtype()} {stored.get_shape()}"
                    raise CorruptCheckpoint(
                        f"{path}: {name} is {found}; it must be F32, BF16 or F16 {wanted}"
                    )
                tensors[expected[name]] = file.get_tensor(name).to(
                    torch.float32, copy=True
                )  # no memory map
    if config.tie_embeddings and LM_HEAD in files:  # not all versions of transformers use it
        with open_safetensors(files[LM_HEAD]) as file:
            if not torch.equal(file.get_tensor(LM_HEAD).float(), tensors["embedding.weight"]):
                raise UserError(
                    f"{folder}: {LM_HEAD} differs from the embedding, but config.json ties them"
                )
    model.load_state_dict(tensors, strict=not config.tie_embeddings, assign=True)
    if config.tie_embeddings:
        model.lm_head.weight = model.embedding.weight
    return model.eval()


def _find_tensors(folder: Path) -> dict[str, Path]:
    """Map each tensor name to its file. As in transformers, a single file takes precedence over an index."""
    if (folder / SINGLE_FILE).is_file():
        with open_safetensors(folder / SINGLE_FILE) as file:
            return dict.fromkeys(file.keys(), folder / SINGLE_FILE)
    if not (folder / INDEX).is_file():
        pickled = next(
            iter([*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")]), None
        )
        hint = (
            f"; {pickled.name} is a pickle, which can run arbitrary code; convert to safetensors"
            if pickled
            else ""
        )
        raise CorruptCheckpoint(f"{folder} has neither {SINGLE_FILE} nor {INDEX}{hint}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    file_name = re.compile(r"[\w.-]+\.safetensors")
    if not isinstance(weight_map, dict) or not all(
        file_name.fullmatch(str(file)) for file in weight_map.values()
    ):
        raise CorruptCheckpoint(f"{folder / INDEX} lists no tensor files")
    return {name: folder / file for name, file in weight_map.items()}


def save_pretrained(
    model: Thinker, tokenizer: Tokenizer | None, folder: Path, max_shard_bytes: int = 5 << 30
) -> None:
    """Write config.json, generation_config.json and the weights to an existing, empty folder.

    Weights keep their precision; beyond `max_shard_bytes` they are split into several files with an index. Raises
    UserError if transformers has no equivalent model type.
    """
    config = to_hf_config(model.config, tokenizer)
    config["torch_dtype"] = str(next(iter(model.state_dict().values())).dtype).removeprefix(
        "torch."
    )
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        special_token_ids(tokenizer) | {"_from_model_config": False},
    )
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in fold_attention_temperature(model_tensors(model), model.config).items():
        if (
            shards[-1]
            and sum(stored.nbytes for stored in shards[-1].values()) + tensor.nbytes
            > max_shard_bytes
        ):
            shards.append({})
        shards[-1][to_hf_name(name)] = tensor.detach().cpu().contiguous()
    files = [SINGLE_FILE]
    if len(shards) > 1:
        files = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
        total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
        weight_map = {name: file for file, tensors in zip(files, shards) for name in tensors}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for file, tensors in zip(files, shards):
        write_tensors(tensors, folder / file)
        shutil.copymode(
            folder / "config.json", folder / file
        )  # safetensors makes it readable only by the owner


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises RunError on failure, such as a full disk."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise RunError(f"{path} cannot be written: {error}") from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
