"""Load a model and its tokenizer from any supported folder."""

import os
import re
from pathlib import Path
from typing import get_type_hints

import torch

from thinker.checkpoint import CorruptCheckpoint, list_checkpoints, load_model, read_json, verify
from thinker.checkpoint.format import STATE
from thinker.checkpoint.run_directory import RunDirectory
from thinker.checkpoint.sharded import is_sharded
from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.data.tokenizers.tokenizer_factory import has_tokenizer, load_tokenizer
from thinker.interop import huggingface, peft_adapter
from thinker.model import Thinker
from thinker.runtime.checks import check_types, check_weights
from thinker.runtime.device import choose_device
from thinker.runtime.errors import UserError
from thinker.runtime.extensions import import_extensions


def find_checkpoint(path: str | Path, checkpoint: str = "latest") -> Path:
    """Find the checkpoint at `path` or in a run directory. Raises UserError if there is none."""
    path = Path(path)
    if not os.path.exists(path):
        raise UserError(
            f"{path} does not exist; use a run directory, a checkpoint in it, or a Hugging Face folder"
        )
    has_weights = (path / "model.safetensors").is_file() or is_sharded(path)
    if has_weights and (path / "manifest.json").is_file():
        if checkpoint != "latest":
            raise UserError(
                f"{path} is a checkpoint; --checkpoint {checkpoint} needs a run directory"
            )
        verify(path)
        return path
    if has_weights and (path / "config.json").is_file() and (path / "state.json").is_file():
        raise UserError(
            f"{path} has no manifest.json and may be incomplete; use a complete checkpoint"
        )
    run = RunDirectory(path)
    if not run.checkpoints.is_dir():
        inside = RunDirectory(path.parent).checkpoints == path
        wanted = path.parent if inside else "a run directory, or a Hugging Face folder"
        raise UserError(
            f"{path} is not a run directory (no checkpoints/ in it) or a checkpoint; use {wanted}"
        )
    checkpoint = (
        f"step-{int(checkpoint):08d}" if re.fullmatch("[0-9]{1,8}", checkpoint) else checkpoint
    )
    if checkpoint == "latest":
        found = run.latest()
    elif checkpoint == "best":
        found = next(reversed(list_checkpoints(run.checkpoints, "best")), None)
    else:
        found = run.checkpoints / checkpoint if (run.checkpoints / checkpoint).is_dir() else None
    if found is None:
        names = [
            folder.name
            for kind in ("step", "best")
            for folder in list_checkpoints(run.checkpoints, kind)
        ]
        raise UserError(
            f"{path} has no checkpoint {checkpoint} (available: {', '.join(names) or 'none yet'})"
        )
    if checkpoint != "latest":
        verify(found)
    return found


def find_model(path: str | Path, checkpoint: str = "latest") -> Path:
    """Return a Hugging Face folder or adapter unchanged, or else call find_checkpoint()."""
    if not huggingface.is_hf_folder(Path(path)) and not os.path.isfile(
        Path(path) / peft_adapter.CONFIG
    ):
        return find_checkpoint(path, checkpoint)
    if checkpoint != "latest":
        raise UserError(
            f"{path} is a single model; --checkpoint {checkpoint} needs a run directory"
        )
    return Path(path)


def load(
    path: str | Path, device: torch.device | str = "cpu", checkpoint: str | int = "latest"
) -> tuple[Thinker, Tokenizer | None]:
    """Load a model in fp32, ready to sample from, and its tokenizer (None if the folder has none).

    `path`: a run directory, a checkpoint in it, a Hugging Face folder, or the folder of a LoRA adapter (peft).
    `device`: may be "auto". `checkpoint`: for a run directory, "latest", "best", a step such as 500, or a name. Raises
    UserError if `path` has no complete model, RunError if a weight is not finite.
    """
    check_types(get_type_hints(load), locals())
    device = choose_device(device)
    while True:
        folder = find_model(path, str(checkpoint))
        try:
            if (folder / peft_adapter.CONFIG).is_file():
                model, base = peft_adapter.load_adapter(folder)
                places = folder, base
            elif huggingface.is_hf_folder(folder):
                model, places = huggingface.load_pretrained(folder), (folder,)
            else:
                _import_extensions(folder)
                model, places = load_model(folder), (folder, folder.resolve().parent.parent)
            break
        except CorruptCheckpoint:
            if folder.exists():
                raise  # unless training has just replaced it by a newer one
    tokenizer = next((load_tokenizer(place) for place in places if has_tokenizer(place)), None)
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        sizes = f"{tokenizer.vocab_size} ids, but the model has {model.config.vocab_size}"
        raise UserError(f"the tokenizer of {folder} has {sizes}; use the tokenizer of this model")
    check_weights(model.named_parameters(), folder)
    return model.to(device), tokenizer


def _import_extensions(folder: Path) -> None:
    """Import the modules that registered the names in a model, as the state of its checkpoint records them."""
    state = read_json(folder / STATE)
    settings = state.get("settings")
    places = [state, settings] if isinstance(settings, dict) else [state]
    recorded = []
    for place in places:
        entries = place.get("extensions")
        if isinstance(entries, list):
            recorded += [entry for entry in entries if isinstance(entry, str)]
    folder = folder.resolve()
    is_in_run = folder.parent.name == "checkpoints"
    import_extensions(recorded, opened=folder.parent.parent if is_in_run else folder)


def find_run_directory(path: Path) -> Path | None:
    """The run directory at a path or around a checkpoint; None if there is none."""
    return next(
        (run for run in (path, path.resolve().parent.parent) if (run / "config.yaml").is_file()),
        None,
    )
