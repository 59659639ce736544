"""export_huggingface(): a model as a folder for transformers, verified."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from thinker.data.tokenizers import tokenizer_conversion
from thinker.interop.families import FAMILIES
from thinker.interop.find import (
    find_checkpoint,
    find_run_directory,
    is_adapter_folder,
    is_hf_folder,
)
from thinker.interop.hf_config import check_model_type, differing_fields, hf_model_type
from thinker.interop.huggingface import save_pretrained
from thinker.interop.load import load
from thinker.interop.model_card import model_card
from thinker.interop.peft_adapter import CONFIG, check_adapters, save_adapter
from thinker.interop.verify_export import verify_hf_export
from thinker.model import ThinkerConfig
from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_json
from thinker.runtime.yaml_files import read_yaml


@dataclass(frozen=True)
class HuggingFaceExport:
    """A folder that was written."""

    folder: Path
    model_type: str  # of transformers, such as qwen3
    n_parameters: int
    compared: str  # what transformers computed equally
    adapter: str  # the base of a LoRA adapter; "" for a whole model


def export_huggingface(
    path: str | Path,
    out: str | Path,
    *,
    checkpoint: str | int = "latest",
    adapter: bool = False,
    shard_gigabytes: float = 5.0,
    model_type: str | None = None,
) -> HuggingFaceExport:
    """Write a model as a Hugging Face folder, and verify that transformers computes the same.

    Args:
        path: a run directory, a checkpoint, a Hugging Face folder or a GGUF file.
        out: a new or empty folder. It appears complete and verified, or not at all.
        adapter: write only the LoRA adapter of a run that started from a Hugging Face folder.
        shard_gigabytes: maximum size of a weight file, in GiB.
        model_type: an architecture of transformers, such as "llama". None: that of the Hugging
            Face folder from which the model comes, or else the first that can express it.

    Raises UserError if `out` is not new or empty, transformers is missing, or model_type cannot
    express the model; RunError if transformers computes something else.
    """
    path = Path(path)
    folder = Path(os.path.abspath(out))
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"OUT {folder} already exists; give a new or empty folder")
    run = find_run_directory(path)
    base = None
    if adapter:
        if model_type is not None:
            raise UserError("an adapter has the model_type of its base; remove --model-type")
        base = _base_folder(run)
        check_adapters(base)
    model, tokenizer = load(path, checkpoint=checkpoint)
    model_type = _choose_model_type(model.config, path, model_type)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        written = ""
        if base is not None:
            weights = find_checkpoint(path, checkpoint)
            written = save_adapter(weights, model.config, base.resolve(), temporary)
        else:
            max_shard_bytes = int(shard_gigabytes * 2**30)
            save_pretrained(model, tokenizer, temporary, max_shard_bytes, model_type)
        if tokenizer is not None:
            config = model.config
            tokenizer_conversion.write(tokenizer, temporary, config.max_seq_len, config.vocab_size)
        compared = verify_hf_export(model, tokenizer, temporary, base=base)
        step = 0
        if run is not None:
            step = read_json(find_checkpoint(path, checkpoint) / "state.json").get("step", 0)
        card = model_card(model, tokenizer, run, step, folder.name, compared, base, written)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    return HuggingFaceExport(folder, model_type, n_parameters, compared, written)


def _choose_model_type(config: ThinkerConfig, path: Path, wanted: str | None) -> str:
    """The model_type to write. Raises UserError if none, or not the wanted one, can express the
    model."""
    if wanted is not None:
        check_model_type(config, wanted)
        return wanted
    origin = _find_origin(path)
    if origin is not None:
        model_type = read_json(origin / "config.json").get("model_type")
        # Training may have set what its family cannot express, such as model.rope_scaling.
        if model_type in list(FAMILIES) and not differing_fields(config, model_type):
            return model_type
    return hf_model_type(config)


def _find_origin(path: Path) -> Path | None:
    """The Hugging Face folder that a model comes from, through all runs in between; None if there
    is none."""
    seen = set()
    while not is_hf_folder(path) and path not in seen:
        seen.add(path)
        before = None
        run = find_run_directory(path)
        if is_adapter_folder(path):
            before = read_json(path / CONFIG).get("base_model_name_or_path")
        elif run is not None:
            before = _initial_model(run)
        if before is None:
            return None
        path = Path(str(before))
    if not is_hf_folder(path):
        return None
    return path


def _initial_model(run: Path) -> str | None:
    """run.init_from of a run."""
    settings = read_yaml(run / "config.yaml").get("run")
    if not isinstance(settings, dict):
        return None
    return settings.get("init_from")


def _base_folder(run: Path | None) -> Path:
    """The Hugging Face folder that a run started from. Raises UserError if it did not."""
    base = None
    if run is not None:
        base = _initial_model(run)
    folder = Path(str(base))
    if not is_hf_folder(folder):
        raise UserError(
            f"--adapter needs a run that starts from a Hugging Face folder, but run.init_from is "
            f"{base}; remove --adapter"
        )
    return folder
