"""Run directories and their checkpoints."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # ruff: noqa: F401 - public names of the package
    from thinker.checkpoint.format import (
        MODEL,
        TRAINING,
        CorruptCheckpoint,
        Files,
        UnsupportedFormat,
    )
    from thinker.checkpoint.listing import list_checkpoints
    from thinker.checkpoint.manager import CheckpointManager, quarantine, recover
    from thinker.checkpoint.model_files import checkpoint_files, model_class, save
    from thinker.checkpoint.read_files import (
        load_tensors,
        open_safetensors,
        read_header,
        read_json,
        verify,
    )
    from thinker.checkpoint.weights import load_model, load_weights, model_tensors, read_lora_rank
    from thinker.checkpoint.write_files import write_checkpoint

# By module, the public names that it defines. Each module is imported when one of them is used:
# reading a checkpoint needs nothing of what writes one.
_NAMES = {
    "format": ("MODEL", "TRAINING", "CorruptCheckpoint", "Files", "UnsupportedFormat"),
    "listing": ("list_checkpoints",),
    "manager": ("CheckpointManager", "quarantine", "recover"),
    "model_files": ("checkpoint_files", "model_class", "save"),
    "read_files": ("load_tensors", "open_safetensors", "read_header", "read_json", "verify"),
    "weights": ("load_model", "load_weights", "model_tensors", "read_lora_rank"),
    "write_files": ("write_checkpoint",),
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
