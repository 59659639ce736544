"""load(path) -> (model, tokenizer), whatever kind of folder path is."""

import os
import re
from pathlib import Path
from typing import get_type_hints

import torch

from thinker.checkpoint import CorruptCheckpoint, list_checkpoints, load_model, verify
from thinker.checkpoint.run_directory import RunDirectory
from thinker.checkpoint.sharded import is_sharded
from thinker.data.tokenizer import Tokenizer
from thinker.data.tokenizer_factory import has_tokenizer, load_tokenizer
from thinker.interop import huggingface, peft_adapter
from thinker.model import Thinker
from thinker.runtime.device import choose_device
from thinker.runtime.errors import UserError
from thinker.runtime.finite import check_weights
from thinker.runtime.type_checks import check_types


def find_checkpoint(path: str | Path, checkpoint: str = "latest") -> Path:
    """The checkpoint folder that `path` means, or one in a run directory. Raises UserError where there is none."""
    path = Path(path)
    if not os.path.exists(path):
        raise UserError(f"{path} does not exist; give a run directory, a checkpoint in it, or a Hugging Face folder")
    has_weights = (path / "model.safetensors").is_file() or is_sharded(path)
    if has_weights and (path / "manifest.json").is_file():
        if checkpoint != "latest":
            raise UserError(f"{path} is one checkpoint; --checkpoint {checkpoint} needs a run directory")
        verify(path)
        return path
    if has_weights and (path / "config.json").is_file() and (path / "state.json").is_file():
        raise UserError(f"{path} is a checkpoint without its manifest.json, so nothing shows whether it is complete")
    run = RunDirectory(path)
    if not run.checkpoints.is_dir():
        inside = RunDirectory(path.parent).checkpoints == path
        wanted = path.parent if inside else "a run directory, or a Hugging Face folder"
        raise UserError(f"{path} is no run directory (it has no checkpoints/) and no checkpoint; give {wanted}")
    checkpoint = f"step-{int(checkpoint):08d}" if re.fullmatch("[0-9]{1,8}", checkpoint) else checkpoint
    if checkpoint == "latest":
        found = run.latest()
    elif checkpoint == "best":
        found = next(reversed(list_checkpoints(run.checkpoints, "best")), None)
    else:
        found = run.checkpoints / checkpoint if (run.checkpoints / checkpoint).is_dir() else None
    if found is None:
        names = [folder.name for kind in ("step", "best") for folder in list_checkpoints(run.checkpoints, kind)]
        raise UserError(f"{path} has no checkpoint {checkpoint}; there are: {', '.join(names) or 'none yet'}")
    if checkpoint != "latest":
        verify(found)
    return found


def find_model(path: str | Path, checkpoint: str = "latest") -> Path:
    """find_checkpoint(), or a Hugging Face folder (or adapter) as it is."""
    if not huggingface.is_hf_folder(Path(path)) and not os.path.isfile(Path(path) / peft_adapter.CONFIG):
        return find_checkpoint(path, checkpoint)
    if checkpoint != "latest":
        raise UserError(f"{path} is one model; --checkpoint {checkpoint} chooses among those of a run directory")
    return Path(path)


def load(
    path: str | Path, device: torch.device | str = "cpu", checkpoint: str | int = "latest"
) -> tuple[Thinker, Tokenizer | None]:
    """A model and its tokenizer (None where the folder has none), ready to sample from, in fp32.

    `path`: a run directory, a checkpoint in it, a Hugging Face folder, or one of a LoRA adapter (peft). `device`: also
    "auto". `checkpoint`: of a run directory, "latest", "best", a step such as 500, or a name. Raises UserError where
    `path` is neither, or nothing in it is whole, RunError where a weight is not finite.
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
                model, places = load_model(folder), (folder, folder.resolve().parent.parent)
            break
        except CorruptCheckpoint:
            if folder.exists():
                raise  # or a training at work has removed it meanwhile, and made a newer one
    tokenizer = next((load_tokenizer(place) for place in places if has_tokenizer(place)), None)
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        sizes = f"{tokenizer.vocab_size} ids, the model {model.config.vocab_size}"
        raise UserError(f"the tokenizer of {folder} has {sizes}: they do not belong together")
    check_weights(model.named_parameters(), folder)
    return model.to(device), tokenizer


def find_run_directory(path: Path) -> Path | None:
    """The run directory that a path is, or that a checkpoint lies in; None where there is none."""
    return next((run for run in (path, path.resolve().parent.parent) if (run / "config.yaml").is_file()), None)
