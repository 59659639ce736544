"""Train the runs of a benchmark, and read its flags."""

import os
from pathlib import Path

from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress
from thinker.training.processes.child_process import train_side_by_side
from thinker.training.processes.training_process import TrainingProcess

ROOT = Path(__file__).resolve().parents[1]


def train_all(runs: list[TrainingProcess], jobs: int = 1) -> None:
    """Train one run after the other, or `jobs` at a time that share the cores; then only losses can
    be compared.

    When a run fails, those that have not started yet never start, and its error is raised.
    """
    threads = None if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)
    with Progress(total=len(runs), desc="training runs") as bar:

        def show(run: TrainingProcess) -> None:
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
