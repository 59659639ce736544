"""What a run directory says of its run: keys, losses, size, and the text that was evaluated."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from thinker.checkpoint.listing import list_checkpoints
from thinker.checkpoint.run_directory import RunDirectory
from thinker.runtime.errors import UserError
from thinker.runtime.reading import read_json, read_text

# Keys that do not affect the result of a run, apart from rounding.
WITHOUT_EFFECT = {
    "run.dir",
    "data.cache_dir",
    "data.num_workers",
    "train.async_save",
    "train.keep_every",
    "train.keep_last",
    "train.log_every",
    "train.micro_batch_size",
    "train.sample_every",
    "train.save_every",
    "train.save_sharded",
}
# Keys of data that change tokens or batches, not the text.
NOT_OF_TEXT = {
    "data.document_masking",
    "data.packing",
    "data.seq_len",
    "data.shift_windows",
    "data.tokenizer",
}


@dataclass
class RunResult:
    """A run, as far as it has come. `status`: finished, unfinished, not finite (of its loss), or
    failed."""

    folder: Path
    status: str
    keys: dict[str, Any]  # of its config, such as "optimizer.lr"
    curve: list[dict[str, Any]]  # the lines of metrics.jsonl with a validation loss
    corpus: str | None = None  # sha256 of its tokens; None without a checkpoint
    tokenizer: str | None = None  # content hash
    parameters: int | None = None
    error: str | None = None  # of a failed run

    @property
    def seed(self) -> int:
        """The random seed."""
        return self.keys["run.seed"]

    def final(self, key: str) -> float | None:
        """A value of the last evaluation, such as "val_loss": infinite if the run diverged, None if
        there is none."""
        if self.status == "not finite" and key.startswith("val_"):
            return math.inf
        if self.status == "failed" or not self.curve:
            return None
        return self.curve[-1].get(key)

    @property
    def best_val_loss(self) -> float | None:
        """The lowest validation loss of all evaluations, in nats per token."""
        return min((line["val_loss"] for line in self.curve), default=None)

    def effective_keys(self) -> dict[str, Any]:
        """The keys that affect the result, except the seed."""
        kept = {}
        for key, value in self.keys.items():
            is_tracking = key.startswith("tracking.")
            if key != "run.seed" and key not in WITHOUT_EFFECT and not is_tracking:
                kept[key] = value
        return kept

    def text_keys(self) -> dict[str, Any]:
        """The keys that name the text."""
        keys = self.effective_keys()
        return {
            key: value
            for key, value in keys.items()
            if key.startswith("data.") and key not in NOT_OF_TEXT
        }

    def as_row(self) -> dict[str, Any]:
        """The documented values of a run, for CSV and JSON. What is missing or not finite is
        None."""
        row: dict[str, Any] = {
            "folder": str(self.folder),
            "status": self.status,
            "seed": self.seed,
            "val_loss": finite(self.final("val_loss")),
            "best_val_loss": self.best_val_loss,
            "val_bits_per_byte": finite(self.final("val_bits_per_byte")),
            "step": self.final("step"),
            "tokens": self.final("tokens"),
            "seconds": self.final("elapsed_s"),
            "parameters": self.parameters,
        }
        if self.error is not None:
            row["error"] = self.error
        return row


def finite(value: float | None) -> float | None:
    """The value, or None if it is missing or not finite: JSON has no infinity."""
    if value is None or not math.isfinite(value):
        return None
    return value


def read_run(folder: Path) -> RunResult:
    """Read a run directory. Raises UserError if it is none."""
    run = RunDirectory(folder)
    if not run.config.is_file():
        raise UserError(f"{folder} is not a run directory; it has no config.yaml")
    try:
        keys = flatten(yaml.safe_load(read_text(run.config)))
    except (yaml.YAMLError, AttributeError) as error:
        raise UserError(f"{run.config} is damaged") from error
    if "run.seed" not in keys:
        raise UserError(f"{run.config} is not the config of a run; it has no run.seed")
    curve = [line for line in run.read_metrics() if "val_loss" in line]
    state = _last_state(run)
    status = "unfinished"
    if curve and _is_finished(curve[-1], state, keys):
        status = "finished"
    return RunResult(
        folder,
        status,
        keys,
        curve,
        state.get("corpus"),
        state.get("tokenizer"),
        _count_parameters(run),
    )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one: {"train": {"a": 1}} becomes {"train.a": 1}."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _last_state(run: RunDirectory) -> dict[str, Any]:
    """state.json of the last checkpoint; empty without one."""
    for folder in reversed(list_checkpoints(run.checkpoints)):
        return read_json(folder / "state.json")
    return {}


def _is_finished(last: dict[str, Any], state: dict[str, Any], keys: dict[str, Any]) -> bool:
    """Whether a run, evaluated a last time, has come to its end."""
    max_steps = keys.get("train.max_steps")
    max_minutes = keys.get("train.max_minutes")
    patience = keys.get("train.patience")
    if max_steps and last["step"] >= max_steps:
        return True
    if max_minutes and last.get("elapsed_s", 0) >= 60 * max_minutes:
        return True
    return bool(patience) and state.get("evaluations_since_lowest", 0) >= patience


def _count_parameters(run: RunDirectory) -> int | None:
    """Number of parameters in the last checkpoint, from the header of its file."""
    for folder in reversed(list_checkpoints(run.checkpoints)):
        path = folder / "model.safetensors"
        if not path.is_file():
            continue
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        shapes = [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
        return sum(math.prod(shape) for shape in shapes)
    return None
