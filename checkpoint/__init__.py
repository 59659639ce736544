"""Run directories and their checkpoints."""

# ruff: noqa: F401 - public names of the package
from thinker.checkpoint.format import (
    MODEL,
    TRAINING,
    CorruptCheckpoint,
    Files,
    UnsupportedFormat,
    load_tensors,
    open_safetensors,
    read_header,
    read_json,
    verify,
    write_checkpoint,
)
from thinker.checkpoint.manager import CheckpointManager, list_checkpoints, quarantine, recover
from thinker.checkpoint.weights import (
    checkpoint_files,
    load_model,
    load_weights,
    model_class,
    model_tensors,
    read_lora_rank,
    save,
)
