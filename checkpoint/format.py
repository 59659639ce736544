"""The files of one checkpoint, whose folder is always complete or absent.

A checkpoint is written under a temporary name, with a manifest of sizes and sha256 sums, flushed to
the disk and then renamed (write_files.py). Nothing is unpickled (read_files.py).

    step-00000500/                       best-00000400/, nonfinite-00000512/
        config.json           model config        config.json
        model.safetensors     weights             model.safetensors
        training.safetensors  optimizer state
        state.json            everything else     state.json
        manifest.json         format version,     manifest.json
                              {file: [bytes, sha256]}

If several ranks train a large model, one file per rank replaces both files of tensors (see
sharded.py).
"""

import json
from pathlib import Path
from typing import Any

import torch

from thinker.runtime.errors import UserError

FORMAT_VERSION = 2  # increased with every incompatible change
MANIFEST = "manifest.json"
CONFIG = "config.json"
STATE = "state.json"
MODEL = "model.safetensors"
TRAINING = "training.safetensors"
TENSORS = ".safetensors"  # suffix of files of tensors; other files are JSON
SHARDS = "shard-*.safetensors"  # of tensors that ranks wrote
RANK_OF = "blocks.0.attention.o_proj.lora_A"  # (r, n_in), in every model with adapters
DTYPES = {torch.float32: "F32"}  # by their names in safetensors

Files = dict[str, dict[str, Any]]  # a checkpoint's files by name: tensors, or a JSON object


class CorruptCheckpoint(UserError):
    """A checkpoint that is incomplete or damaged. The message names the file."""


class UnsupportedFormat(UserError):
    """A checkpoint of another format version. The message names both versions."""


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint's tensors are in one file per rank."""
    return any(folder.glob(SHARDS))


def to_json(value: dict[str, Any]) -> bytes:
    """A JSON object as it is written."""
    return (json.dumps(value, indent=1) + "\n").encode()
