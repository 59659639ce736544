"""Find the model that a path means: a run directory, a checkpoint, or a model of another format."""

import os
import re
from pathlib import Path

from thinker.checkpoint.format import is_sharded
from thinker.checkpoint.listing import CHECKPOINTS, latest_checkpoint, list_checkpoints
from thinker.checkpoint.read_files import verify
from thinker.runtime.errors import UserError


def is_hf_folder(path: Path) -> bool:
    """Whether a folder looks like a Hugging Face model."""
    # A checkpoint of ours also has a config.json.
    return os.path.isfile(path / "config.json") and not os.path.isfile(path / "state.json")


def is_adapter_folder(path: Path) -> bool:
    """Whether a folder looks like a LoRA adapter of peft."""
    return os.path.isfile(path / "adapter_config.json")


def find_gguf(path: Path) -> Path | None:
    """The GGUF file at a path, or in a folder with nothing else; None if there is none."""
    if os.path.isdir(path):
        files = list(path.iterdir())
        if len(files) == 1:
            path = files[0]
    if os.path.isfile(path) and path.suffix.lower() == ".gguf":
        return path
    return None


def find_model(path: str | Path, checkpoint: str = "latest") -> Path:
    """Return the path of a Hugging Face folder, an adapter or a GGUF file, or else call
    find_checkpoint()."""
    folder = Path(path)
    gguf = find_gguf(folder)
    if gguf is not None:
        folder = gguf
    elif not is_hf_folder(folder) and not is_adapter_folder(folder):
        return find_checkpoint(path, checkpoint)
    if checkpoint != "latest":
        raise UserError(
            f"{path} is a single model; --checkpoint {checkpoint} needs a run directory"
        )
    return folder


def find_checkpoint(path: str | Path, checkpoint: str = "latest") -> Path:
    """Find the checkpoint at `path` or in a run directory. Raises UserError if there is none."""
    path = Path(path)
    if not os.path.exists(path):
        raise UserError(
            f"{path} does not exist; use a run directory, a checkpoint in it, "
            "a Hugging Face folder, or a GGUF file"
        )
    if _is_checkpoint(path):
        if checkpoint != "latest":
            raise UserError(
                f"{path} is a checkpoint; --checkpoint {checkpoint} needs a run directory"
            )
        verify(path)
        return path
    if not (path / CHECKPOINTS).is_dir():
        wanted = "a run directory, or a Hugging Face folder"
        if path.parent / CHECKPOINTS == path:
            wanted = path.parent
        raise UserError(
            f"{path} is not a run directory (no checkpoints/ in it) or a checkpoint; use {wanted}"
        )
    return _find_in_run(path, checkpoint)


def _is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint. Raises UserError if it is an incomplete one."""
    has_weights = (path / "model.safetensors").is_file() or is_sharded(path)
    if not has_weights:
        return False
    if (path / "manifest.json").is_file():
        return True
    if (path / "config.json").is_file() and (path / "state.json").is_file():
        raise UserError(
            f"{path} has no manifest.json and may be incomplete; use a complete checkpoint"
        )
    return False


def _find_in_run(run: Path, checkpoint: str) -> Path:
    """Find a checkpoint of a run: "latest", "best", the number of a step, or a folder's name."""
    if re.fullmatch("[0-9]{1,8}", checkpoint):
        checkpoint = f"step-{int(checkpoint):08d}"
    checkpoints = run / CHECKPOINTS
    found = None
    if checkpoint == "latest":
        found = latest_checkpoint(checkpoints)
    elif checkpoint == "best":
        best = list_checkpoints(checkpoints, "best")
        if best:
            found = best[-1]
    elif (checkpoints / checkpoint).is_dir():
        found = checkpoints / checkpoint
    if found is None:
        folders = list_checkpoints(checkpoints, "step")
        folders += list_checkpoints(checkpoints, "best")
        available = ", ".join(folder.name for folder in folders) or "none yet"
        raise UserError(f"{run} has no checkpoint {checkpoint} (available: {available})")
    if checkpoint != "latest":  # latest_checkpoint() has done so
        verify(found)
    return found


def find_run_directory(path: Path) -> Path | None:
    """The run directory at a path or around a checkpoint; None if there is none."""
    for run in (path, path.resolve().parent.parent):
        if (run / "config.yaml").is_file():
            return run
    return None
