"""Whole trainings as a benchmark needs them: train.py in processes of its own, and what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from thinker.checkpoint.run_directory import RunDirectory
from thinker.runtime.errors import UserError

TRAIN = Path(__file__).resolve().parents[1] / "train.py"


@dataclass
class Training:
    """A config with overrides, where its run lies, and, once it is trained, what came out."""

    name: str
    config: Path
    overrides: list[str]
    folder: Path
    resolved: dict[str, Any] = field(default_factory=dict)  # the resolved config
    curve: list[dict[str, Any]] = field(default_factory=list)  # the lines of metrics.jsonl with a validation loss
    peak_memory: int = 0  # bytes

    @property
    def final(self) -> dict[str, Any]:
        """The last validation: its `val_loss`, `step`, `tokens` and `elapsed_s`."""
        return self.curve[-1]

    @property
    def loss(self) -> float:
        """Nats a token on the validation set at the end."""
        return self.final["val_loss"]

    def train(self, threads: int | None = None) -> None:
        """Run train.py to its end; a run that is finished already is only read. Raises UserError with its last line."""
        environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        command = [sys.executable, str(TRAIN), str(self.config), *self.overrides, f"run.dir={self.folder}"]
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise UserError(f"{self.name}: {said[-1].removeprefix('error: ')}")
        run = RunDirectory(self.folder)
        self.resolved = yaml.safe_load(run.config.read_text(encoding="utf-8"))
        lines = list(run.read_metrics())
        self.curve = [line for line in lines if "val_loss" in line]
        self.peak_memory = max(line.get("peak_memory_bytes", 0) for line in lines)


def train_all(trainings: list[Training], jobs: int = 1) -> None:
    """Train one after the other, or `jobs` at a time with the cores shared out: then seconds say nothing, losses do.

    Where one fails, those that have not begun do not begin, and its error is raised.
    """
    threads = None if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)
    stopped = threading.Event()

    def train(training: Training) -> None:
        if stopped.is_set():
            return
        try:
            training.train(threads)
        except BaseException:
            stopped.set()  # here, not where the result is read: by then this thread would be in the next training
            raise

    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(trainings), desc="trainings") as bar:
        try:
            for training, done in [(training, pool.submit(train, training)) for training in trainings]:
                done.result()
                bar.set_postfix_str(f"{training.name}: {training.loss:.4f}")
                bar.update()
        finally:
            stopped.set()  # an interrupt reaches this thread alone; after the last training it stops nothing


def read_shapes(text: str) -> dict[str, list[str]]:
    """The overrides for each of "64x4x2,192x5x6": width, layers and heads."""
    shapes = {}
    for shape in text.split(","):
        sizes = shape.split("x")
        if len(sizes) != 3 or not all(size.isdigit() for size in sizes):
            raise UserError(f"{shape!r} is no shape; write WIDTHxLAYERSxHEADS, such as 192x5x6")
        shapes[shape] = [f"model.{key}={size}" for key, size in zip(("d_model", "n_layers", "n_heads"), sizes)]
    return shapes
