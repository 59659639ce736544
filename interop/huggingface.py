"""Read and write Hugging Face folders: config.json, generation_config.json and safetensors."""

import json
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

INDEX = "model.safetensors.index.json"  # of several files
SINGLE_FILE = "model.safetensors"
LM_HEAD = "lm_head.weight"
HF_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
}


def to_hf_name(name: str) -> str:
    """Name of one of our parameters in transformers."""
    return ".".join(HF_NAMES.get(part, part) for part in name.split("."))


def load_pretrained(folder: Path) -> Thinker:
    """Load the model in a Hugging Face folder in fp32, ready to sample from.

    Raises UserError for unsupported models, CorruptCheckpoint if files are missing or inconsistent.
    """
    values = read_json(folder / "config.json")
    config = from_hf_config(values)
    files = _find_tensors(folder)
    if config.n_layers > len(files):  # building so many blocks could take forever
        raise CorruptCheckpoint(
            f"{folder} has fewer tensors than config.json has layers ({config.n_layers})"
        )
    with torch.device("meta"):  # no memory for weights that are replaced below
        model = Thinker(config)

    our_names = {to_hf_name(name): name for name in model_tensors(model)}
    for name in sorted(our_names):
        if name not in files:
            raise CorruptCheckpoint(f"{folder} has no tensor {name}")
    for name in sorted(files):
        may_be_unused = config.tie_embeddings and name == LM_HEAD
        if name.endswith("rotary_emb.inv_freq"):  # RoPE's frequencies in old files
            may_be_unused = True
        if name not in our_names and not may_be_unused:
            raise UserError(
                f"{folder} has an unknown tensor {name}, "
                f"which is not part of {values['model_type']}"
            )

    tensors = _read_tensors(model, files, our_names)
    if config.tie_embeddings and LM_HEAD in files:
        # Not all versions of transformers use this copy of the embedding.
        with open_safetensors(files[LM_HEAD]) as file:
            lm_head = file.get_tensor(LM_HEAD).float()
        if not torch.equal(lm_head, tensors["embedding.weight"]):
            raise UserError(
                f"{folder}: {LM_HEAD} differs from the embedding, but config.json ties them"
            )
    model.load_state_dict(tensors, strict=not config.tie_embeddings, assign=True)
    # Assigning has replaced the tied parameter.
    if config.tie_embeddings:
        model.lm_head.weight = model.embedding.weight
    return model.eval()


def _read_tensors(
    model: Thinker, files: dict[str, Path], our_names: dict[str, str]
) -> dict[str, Tensor]:
    """Read tensors in fp32, by our names. Raises CorruptCheckpoint if one does not fit the model.

    files: by the name of a tensor in transformers; our_names: the names to read, in the same way.
    """
    parameters = model.state_dict()
    tensors = {}
    for path in sorted(set(files.values())):
        with open_safetensors(path) as file:
            for name, our_name in our_names.items():
                if files[name] != path:
                    continue
                stored = file.get_slice(name)
                dtype = stored.get_dtype()
                shape = stored.get_shape()
                wanted = list(parameters[our_name].shape)
                if dtype not in ("F32", "BF16", "F16") or shape != wanted:
                    raise CorruptCheckpoint(
                        f"{path}: {name} is {dtype} {shape}; it must be F32, BF16 or F16 {wanted}"
                    )
                # A copy, as a memory map would depend on the file.
                tensors[our_name] = file.get_tensor(name).to(torch.float32, copy=True)
    return tensors


def _find_tensors(folder: Path) -> dict[str, Path]:
    """Map each tensor name to its file.

    As in transformers, a single file takes precedence over an index.
    """
    single = folder / SINGLE_FILE
    if single.is_file():
        with open_safetensors(single) as file:
            return dict.fromkeys(file.keys(), single)
    index = folder / INDEX
    if not index.is_file():
        raise CorruptCheckpoint(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX}{_hint_about_pickles(folder)}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptCheckpoint(f"{index} lists no tensor files")
    files = {}
    for name, file in weight_map.items():
        # A plain name: no path leads out of the folder.
        if not re.fullmatch(r"[\w.-]+\.safetensors", str(file)):
            raise CorruptCheckpoint(f"{index} lists no tensor files")
        files[name] = folder / file
    return files


def _hint_about_pickles(folder: Path) -> str:
    for pattern in ("*.bin", "*.pth", "*.pt"):
        for file in folder.glob(pattern):
            return (
                f"; {file.name} is a pickle, which can run arbitrary code; convert to safetensors"
            )
    return ""


def save_pretrained(
    model: Thinker, tokenizer: Tokenizer | None, folder: Path, max_shard_bytes: int = 5 << 30
) -> None:
    """Write config.json, generation_config.json and the weights to an existing, empty folder.

    Weights keep their precision; beyond `max_shard_bytes` they are split into several files with an
    index. Raises UserError if transformers has no equivalent model type.
    """
    config = to_hf_config(model.config, tokenizer)
    tensors = fold_attention_temperature(model_tensors(model), model.config)
    dtype = next(iter(model.state_dict().values())).dtype
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", config)
    special = special_token_ids(tokenizer, model.config.vocab_size)
    generation_config = special | {"_from_model_config": False}
    write_json(folder / "generation_config.json", generation_config)

    shards = _split_tensors(tensors, max_shard_bytes)
    n_shards = len(shards)
    files = [f"model-{n:05d}-of-{n_shards:05d}.safetensors" for n in range(1, n_shards + 1)]
    if n_shards == 1:
        files = [SINGLE_FILE]
    else:
        write_json(folder / INDEX, _index(files, shards))
    for file, shard in zip(files, shards):
        write_tensors(shard, folder / file)
        # safetensors makes the file readable only by the owner.
        shutil.copymode(folder / "config.json", folder / file)


def _split_tensors(tensors: dict[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """Split tensors into files of at most `max_bytes`, or of one tensor, by their names there."""
    shards: list[dict[str, Tensor]] = [{}]
    n_bytes = 0  # of the last one
    for name, tensor in tensors.items():
        if shards[-1] and n_bytes + tensor.nbytes > max_bytes:
            shards.append({})
            n_bytes = 0
        shards[-1][to_hf_name(name)] = tensor.detach().cpu().contiguous()
        n_bytes += tensor.nbytes
    return shards


def _index(files: list[str], shards: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The index of several files: which tensor is where."""
    total = 0
    weight_map = {}
    for file, shard in zip(files, shards):
        for name, tensor in shard.items():
            total += tensor.nbytes
            weight_map[name] = file
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises RunError on failure, such as a full disk."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise RunError(f"{path} cannot be written: {error}") from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
