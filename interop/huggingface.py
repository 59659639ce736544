"""Read and write Hugging Face folders: config.json, generation_config.json and safetensors."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from thinker.checkpoint import CorruptCheckpoint, model_tensors, read_json
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.interop.families import FAMILIES, Family
from thinker.interop.families.tensor_files import INDEX, SINGLE_FILE, TensorFiles, open_tensors
from thinker.interop.families.tensors import read_their_tensors, their_name, to_their_tensors
from thinker.interop.hf_config import from_hf_config, special_token_ids, to_hf_config
from thinker.model import Thinker, ThinkerConfig
from thinker.model.attention_temperature import fold_attention_temperature
from thinker.runtime.errors import RunError, UserError


def to_hf_name(name: str, model_type: str = "llama") -> str:
    """Name of one of our parameters in transformers. Raises UserError if it has none of its own."""
    return their_name(FAMILIES[model_type], name)


def load_pretrained(folder: Path) -> Thinker:
    """Load the model in a Hugging Face folder in fp32, ready to sample from.

    Raises UserError for unsupported models, CorruptCheckpoint if files are missing or inconsistent.
    """
    values = read_json(folder / "config.json")
    config = from_hf_config(values)
    with open_tensors(folder) as files:
        return load_from_files(folder, config, FAMILIES[values["model_type"]], files)


def load_from_files(
    folder: Path, config: ThinkerConfig, family: Family, files: TensorFiles
) -> Thinker:
    """A model with the tensors of files, which have the names and layout of its family.

    folder: for messages. Raises errors as load_pretrained().
    """
    n_tensors = len(files.names())
    if config.n_layers > n_tensors:  # building so many blocks could take forever
        raise CorruptCheckpoint(
            f"{folder} has fewer tensors than config.json has layers ({config.n_layers})"
        )
    with torch.device("meta"):  # no memory for weights that are replaced below
        model = Thinker(config)
    tensors = read_their_tensors(family, config, files, model_tensors(model), folder)
    head = f"{family.names['lm_head']}.weight"
    has_copy = config.tie_embeddings and head in files.names()
    # Not all versions of transformers use this copy of the embedding.
    if has_copy and not torch.equal(files.read(head), tensors["embedding.weight"]):
        raise UserError(f"{folder}: {head} differs from the embedding, but config.json ties them")
    model.load_state_dict(tensors, strict=not config.tie_embeddings, assign=True)
    # Assigning has replaced the tied parameter.
    if config.tie_embeddings:
        model.lm_head.weight = model.embedding.weight
    return model.eval()


def save_pretrained(
    model: Thinker,
    tokenizer: Tokenizer | None,
    folder: Path,
    max_shard_bytes: int = 5 << 30,
    model_type: str | None = None,
) -> None:
    """Write config.json, generation_config.json and the weights to an existing, empty folder.

    Weights keep their precision; beyond `max_shard_bytes` they are split into several files with an
    index. model_type: of transformers; None: the first that can express the model. Raises UserError
    if there is none.
    """
    config = to_hf_config(model.config, tokenizer, model_type)
    tensors = hf_tensors(model, config["model_type"])
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


def hf_tensors(model: Thinker, model_type: str) -> dict[str, Tensor]:
    """The parameters under the names and in the layout of transformers, without a tied head."""
    tensors = fold_attention_temperature(model_tensors(model), model.config)
    return to_their_tensors(FAMILIES[model_type], model.config, tensors)


def _split_tensors(tensors: dict[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """Split tensors into files of at most `max_bytes`, or of one tensor, by their names there."""
    shards: list[dict[str, Tensor]] = [{}]
    n_bytes = 0  # of the last one
    for name, tensor in tensors.items():
        if shards[-1] and n_bytes + tensor.nbytes > max_bytes:
            shards.append({})
            n_bytes = 0
        shards[-1][name] = tensor.detach().cpu().contiguous()
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
