"""Training runs for benchmarks: train.py in subprocesses, and the metrics of the runs."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from thinker.benchmarks.processes import ChildProcess, train_side_by_side
from thinker.checkpoint.run_directory import RunDirectory
from thinker.runtime.errors import UserError
from thinker.training.config.load import load_config

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class TrainingRun:
    """A config with overrides and the directory of its run; once it is trained, also its
    results."""

    name: str
    config: Path
    overrides: list[str]
    folder: Path
    resolved: dict[str, Any] = field(default_factory=dict)  # the run's config.yaml
    curve: list[dict[str, Any]] = field(
        default_factory=list
    )  # the lines of metrics.jsonl with a validation loss
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
        """Run train.py to its end; a finished run is only read. Raises UserError with the last line
        of its stderr."""
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
            raise UserError(f"{self.name}: {lines[-1].removeprefix('error: ')}")
        run = RunDirectory(self.folder)
        self.resolved = yaml.safe_load(run.config.read_text(encoding="utf-8"))
        metrics = list(run.read_metrics())
        self.curve = [line for line in metrics if "val_loss" in line]
        self.peak_memory = max(line.get("peak_memory_bytes", 0) for line in metrics)


def train_all(runs: list[TrainingRun], jobs: int = 1) -> None:
    """Train one run after the other, or `jobs` at a time that share the cores; then only losses can
    be compared.

    When a run fails, those that have not started yet never start, and its error is raised.
    """
    threads = None if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)
    with tqdm(total=len(runs), desc="training runs") as bar:

        def show(run: TrainingRun) -> None:
            bar.set_postfix_str(f"{run.name}: {run.loss:.4f}")
            bar.update()

        train_side_by_side(runs, jobs, threads, show)


def parse_assignments(flag: str, text: str, example: str) -> list[tuple[str, str]]:
    """Split "key=v1,v2" into ("key", "v1") and ("key", "v2"). Raises UserError without a value."""
    key, _, values = text.partition("=")
    if not values:
        raise UserError(f"{flag} {text} has no values; write it as optimizer.lr={example}")
    return [(key, value) for value in values.split(",")]


def parse_shapes(text: str) -> dict[str, list[str]]:
    """The overrides of each shape in "64x4x2,192x5x6": width, layers and heads."""
    shapes = {}
    for shape in text.split(","):
        sizes = shape.split("x")
        if len(sizes) != 3 or not all(size.isdigit() for size in sizes):
            raise UserError(f"{shape!r} is not a shape; write WIDTHxLAYERSxHEADS, such as 192x5x6")
        shapes[shape] = [
            f"model.{key}={size}" for key, size in zip(("d_model", "n_layers", "n_heads"), sizes)
        ]
    return shapes
