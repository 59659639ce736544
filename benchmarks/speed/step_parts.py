"""Microseconds of each part of a training step."""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinker.benchmarks.environment import synchronize
from thinker.data.batches.prefetch import Batch
from thinker.training.config.load import load_config
from thinker.training.kernels import fused_kernels
from thinker.training.optim import muon
from thinker.training.run import build_trainer
from thinker.training.step import TrainingStep, cached_weight_casts, clip_gradients

PARTS = (
    "forward",
    "backward",
    "clipping",
    "Muon: orthogonalization",
    "Muon: other",
    "AdamW",
    "other",
)
WARM_UP = 3


class Timer:
    """Adds up the seconds of the parts of a step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, defaultdict(float)

    def __call__(
        self, part: str, function: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Call a function and add its time to a part. Returns its result."""
        synchronize(self.device)
        start = time.perf_counter()
        result = function(*arguments, **options)
        synchronize(self.device)
        self.seconds[part] += time.perf_counter() - start
        return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="YAML file of the run to measure"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override keys of the config"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="steps to measure; medians are reported"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure steps of a run as a whole and in parts, alternately, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"run.dir={folder}/run", "train.save_every=null", "train.eval_every=null", "train.max_minutes=null",
                 "train.max_steps=1000000", "train.fit_bigrams=off"]  # fmt: skip
        trainer = build_trainer(load_config(arguments.config, [*arguments.overrides, *fixed]))
        step, rounds = trainer.step, []
        for number in range(WARM_UP + arguments.rounds):
            batch, timer = trainer.batches.batch(number), Timer(step.device)
            timer("step", step, batch, 1.0)
            run_parts(step, batch, timer)
            rounds.append(timer.seconds)
        trainer.batches.close()
        trainer.run.unlock()
    medians = {}
    for part in ("step", *PARTS):
        medians[part] = statistics.median(each[part] for each in rounds[WARM_UP:])
    medians["other"] = max(0.0, medians["step"] - sum(medians[part] for part in PARTS))
    for part in (*PARTS, "step"):
        print(f"{part:16} {1e6 * medians[part]:12,.0f} µs  {medians[part] / medians['step']:5.0%}")
    return {
        "config": str(arguments.config), "overrides": arguments.overrides, "precision": step.train.precision,
        "fused_kernels": step.kernels.is_native,
        "parameters": sum(parameter.numel() for parameter in step.model.parameters()),
        "microseconds": {part: round(1e6 * seconds, 1) for part, seconds in medians.items()},
    }  # fmt: skip


def run_parts(step: TrainingStep, batch: Batch, timer: Timer) -> None:
    """Run a step as TrainingStep does, without its checks and the loss scale of fp16, and time the
    parts."""
    size = step.train.micro_batch_size
    with cached_weight_casts(step.model), fused_kernels(step.model, step.kernels):
        for start in range(0, len(batch.inputs), size):
            inputs, targets, document_ids = (
                tensor if tensor is None else tensor[start : start + size].to(step.device)
                for tensor in (batch.inputs, batch.targets, batch.document_ids)
            )
            loss, _ = timer(
                "forward", step.parallel_model, inputs, targets=targets, document_ids=document_ids
            )
            timer("backward", (loss / max(batch.n_targets, 1)).backward)
    timer("clipping", clip_gradients, step.model, step.train.grad_clip)
    with timed_products(timer):
        for optimizer in step.optimizers.optimizers:
            optimizer.found_inf = None
            name = "Muon" if isinstance(optimizer, muon.Muon) else "AdamW"
            timer(name, optimizer.step)
    timer.seconds["Muon: other"] = (
        timer.seconds.pop("Muon", 0.0) - timer.seconds["Muon: orthogonalization"]
    )
    step.optimizers.zero_grad()


@contextmanager
def timed_products(timer: Timer) -> Iterator[None]:
    """Context in which the orthogonalization of Muon, which is matrix products alone, is timed
    separately."""
    orthogonalize = muon.orthogonalize

    def timed(x: Tensor) -> Tensor:
        return timer("Muon: orthogonalization", orthogonalize, x)

    muon.orthogonalize = timed
    try:
        yield
    finally:
        muon.orthogonalize = orthogonalize
