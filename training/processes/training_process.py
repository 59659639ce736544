"""A training run in a process of its own, and its metrics."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from thinker.checkpoint.run_directory import RunDirectory
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config
from thinker.training.processes.child_process import ChildProcess

ROOT = Path(__file__).resolve().parents[2]


class Diverged(UserError):
    """The loss of a run is not finite."""


@dataclass
class TrainingProcess:
    """A config with overrides and the directory of its run; once it is trained, also its
    results."""

    name: str
    config: Path
    overrides: list[str]
    folder: Path
    resolved: dict[str, Any] = field(default_factory=dict)  # the run's config.yaml
    # The lines of metrics.jsonl with a validation loss.
    curve: list[dict[str, Any]] = field(default_factory=list)
    peak_memory: int = 0  # bytes
    process: ChildProcess = field(default_factory=ChildProcess, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Find mistakes in the config before the first hour of training. Raises UserError."""
        load_config(self.config, self.overrides)

    @property
    def final(self) -> dict[str, Any]:
        """The last evaluation: its `val_loss`, `step`, `tokens` and `elapsed_s`."""
        return self.curve[-1]

    @property
    def loss(self) -> float:
        """Validation loss at the end, in nats per token."""
        return self.final["val_loss"]

    def train(self, threads: int | None = None) -> None:
        """Run train.py to its end; a finished run is only read.

        Raises Diverged if its loss is not finite, and UserError with the last line of its stderr
        after any other failure.
        """
        environment = dict(os.environ)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        command = [
            sys.executable,
            ROOT / "train.py",
            self.config,
            *self.overrides,
            f"run.dir={self.folder}",
        ]
        status, stderr = self.process.run(command, environment)
        if status:
            lines = stderr.strip().splitlines() or [f"exit status {status}"]
            message = f"{self.name}: {lines[-1].removeprefix('error: ')}"
            # What train.py advises if a loss is not finite.
            if "lower optimizer.lr" in message.lower():
                raise Diverged(message)
            raise UserError(message)
        run = RunDirectory(self.folder)
        self.resolved = yaml.safe_load(run.config.read_text(encoding="utf-8"))
        metrics = list(run.read_metrics())
        self.curve = [line for line in metrics if "val_loss" in line]
        self.peak_memory = max(line.get("peak_memory_bytes", 0) for line in metrics)
