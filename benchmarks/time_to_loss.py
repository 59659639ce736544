"""Two configs on the same data: how soon the second comes down to where the first one ends."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from thinker.benchmarks.environment import finish
from thinker.benchmarks.gpt2 import Gpt2
from thinker.benchmarks.training_runs import Training, train_all
from thinker.runtime.errors import UserError
from thinker.runtime.plotting import BLUE, GREY, new_figure
from thinker.training.config import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    group = parser.add_argument_group("time to a loss, instead of the time of a step")
    group.add_argument("--configs", nargs=2, type=Path, metavar=("SLOW", "FAST"), help="which is to overtake which")
    group.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="for both")
    group.add_argument("--gpt2", action="store_true", help="the first config trains transformers' GPT-2, on the CPU")
    group.add_argument("--tune", metavar="KEY=V1,V2,...", help="train the first with each value; the best one counts")


def run(arguments: argparse.Namespace) -> None:
    """Train them one after the other, in fresh folders; print a table and a line of JSON."""
    slow_config, fast_config = arguments.configs
    key, _, values = (arguments.tune or "").partition("=")
    if arguments.tune and not values:
        raise UserError(f"--tune {arguments.tune} names no values; write it as optimizer.lr=0.001,0.002")
    with tempfile.TemporaryDirectory(prefix="race-") as folder:
        trials = [[f"{key}={value}"] for value in values.split(",")] if values else [[]]
        kind = Gpt2 if arguments.gpt2 else Training
        slow = [
            kind(" ".join([slow_config.stem, *trial]), slow_config, [*arguments.set, *trial],
                     Path(folder) / f"slow-{number}")
            for number, trial in enumerate(trials)
        ]  # fmt: skip
        fast = Training(fast_config.stem, fast_config, arguments.set, Path(folder) / "fast")
        data = [load_config(training.config, training.overrides).data for training in [*slow, fast]]
        if any(each != data[-1] for each in data):
            raise UserError(f"{slow_config} and {fast_config} read different data; their losses cannot be compared")
        train_all([*slow, fast])
    best = min(slow, key=lambda training: training.loss)
    rows = [
        {"name": training.name, **_figures(training.final), "peak_memory_bytes": training.peak_memory}
        for training in [*slow, fast]
    ]
    for row in rows:
        print(
            f"{row['name']:<40} {row['val_loss']:.4f} nats {row['step']:>7,} steps {row['tokens']:>12,} tokens "
            f"{row['elapsed_s']:7.1f} s {row['peak_memory_bytes'] / 1e9:.2f} GB"
        )
    reached = next((line for line in fast.curve if line["val_loss"] <= best.loss), None)
    ratios = {} if reached is None else {key: reached[key] / best.final[key] for key in ("step", "tokens", "elapsed_s")}
    if reached is None:
        print(f"{fast.name} does not come down to {best.loss:.4f}")
    else:
        print(
            f"{fast.name} is at {reached['val_loss']:.4f} after {ratios['tokens']:.3f} of the tokens, "
            f"{ratios['step']:.3f} of the steps and {ratios['elapsed_s']:.3f} of the seconds of {best.name}"
        )
    if arguments.png:
        draw_race(best, fast, arguments.png)
    result = {"benchmark": "race", "slow": best.name, "fast": fast.name, "rows": rows, "ratios": ratios}
    result["reached"] = reached and _figures(reached)
    finish(result | {key: fast.config["train"][key] for key in ("precision", "compile")}, arguments.out)


def draw_race(slow: Training, fast: Training, path: Path) -> None:
    """Validation loss by tokens and by seconds, and the loss to be reached."""
    figure, panels = new_figure(10, 4.5, columns=2)
    for axes, key, label in zip(panels, ("tokens", "elapsed_s"), ("tokens", "seconds")):
        for training, colour in ((slow, GREY), (fast, BLUE)):
            at, losses = zip(*[(line[key], line["val_loss"]) for line in training.curve])
            axes.plot(at, losses, color=colour, marker="o", markersize=3, label=f"{training.name}, {losses[-1]:.3f}")
        axes.axhline(slow.loss, color=GREY, linestyle="--", linewidth=1)
        axes.set(xlabel=label, xlim=(0, None))
        axes.legend(frameon=False)
    lowest = min(slow.loss, fast.loss)
    panels[0].set(ylabel="validation loss (nats a token)", ylim=(lowest * 0.97, lowest * 1.6))
    figure.savefig(path)


def _figures(line: dict[str, Any]) -> dict[str, Any]:
    return {key: line[key] for key in ("val_loss", "step", "tokens", "elapsed_s")}
