"""Time until a config reaches the final loss of a baseline config."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from thinker.benchmarks.losses.gpt2 import Gpt2Run
from thinker.benchmarks.training_runs import parse_assignments, train_all
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import BLUE, GREY, new_figure
from thinker.training.config.load import load_config
from thinker.training.processes.training_process import TrainingProcess


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "baseline", type=Path, metavar="BASELINE", help="config that sets the target loss"
    )
    parser.add_argument(
        "candidate",
        type=Path,
        metavar="CANDIDATE",
        help="config to time until it reaches this loss",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override keys of both configs"
    )
    parser.add_argument(
        "--gpt2",
        action="store_true",
        help="train GPT-2 of transformers as the baseline, on the CPU",
    )
    parser.add_argument(
        "--tune",
        metavar="KEY=V1,V2,...",
        help="tune a key of the baseline: train each value, keep the best",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot validation losses")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train both configs, one after the other, in a temporary folder, and print a table."""
    trials = parse_assignments("--tune", arguments.tune, "0.001,0.002") if arguments.tune else []
    with tempfile.TemporaryDirectory(prefix="time-to-loss-") as folder:
        baselines = []
        run_class = Gpt2Run if arguments.gpt2 else TrainingProcess
        for number, trial in enumerate([[f"{key}={value}"] for key, value in trials] or [[]]):
            name = " ".join([arguments.baseline.stem, *trial])
            overrides = [*arguments.overrides, *trial]
            baselines.append(
                run_class(name, arguments.baseline, overrides, Path(folder) / f"baseline-{number}")
            )
        candidate = TrainingProcess(
            arguments.candidate.stem,
            arguments.candidate,
            arguments.overrides,
            Path(folder) / "candidate",
        )
        data = [load_config(run.config, run.overrides).data for run in [*baselines, candidate]]
        if any(section != data[-1] for section in data):
            raise UserError(
                f"{arguments.baseline} and {arguments.candidate} read different data; use the same data section"
            )
        train_all([*baselines, candidate])
    baseline = min(baselines, key=lambda run: run.loss)
    rows = [
        {"name": run.name, **summarize(run.final), "peak_memory_bytes": run.peak_memory}
        for run in [*baselines, candidate]
    ]
    for row in rows:
        print(
            f"{row['name']:<40} {row['val_loss']:.4f} nats {row['step']:>7,} steps {row['tokens']:>12,} tokens "
            f"{row['elapsed_s']:7.1f} s {row['peak_memory_bytes'] / 1e9:.2f} GB"
        )
    reached = next(
        (summarize(line) for line in candidate.curve if line["val_loss"] <= baseline.loss), None
    )
    if reached is None:
        ratios = {}
        print(f"{candidate.name} did not reach {baseline.loss:.4f}")
    else:
        ratios = {
            key: reached[key] / baseline.final[key] for key in ("step", "tokens", "elapsed_s")
        }
        print(
            f"{candidate.name} reaches {reached['val_loss']:.4f} after {ratios['tokens']:.3f} times the tokens, "
            f"{ratios['step']:.3f} times the steps and {ratios['elapsed_s']:.3f} times the seconds of {baseline.name}"
        )
    if arguments.png:
        plot(baseline, candidate, arguments.png)
    result = {
        "baseline": baseline.name,
        "candidate": candidate.name,
        "rows": rows,
        "ratios": ratios,
    }
    return (
        result
        | {"reached": reached}
        | {key: candidate.resolved["train"][key] for key in ("precision", "compile")}
    )


def summarize(line: dict[str, Any]) -> dict[str, Any]:
    """Select the recorded values of an evaluation."""
    return {key: line[key] for key in ("val_loss", "step", "tokens", "elapsed_s")}


def plot(baseline: TrainingProcess, candidate: TrainingProcess, path: Path) -> None:
    """Validation loss by tokens and by seconds, and the loss to reach."""
    figure, panels = new_figure(10, 4.5, columns=2)
    for axes, key, label in zip(panels, ("tokens", "elapsed_s"), ("tokens", "seconds")):
        for run, color in ((baseline, GREY), (candidate, BLUE)):
            x, losses = zip(*[(line[key], line["val_loss"]) for line in run.curve])
            axes.plot(
                x,
                losses,
                color=color,
                marker="o",
                markersize=3,
                label=f"{run.name}, {losses[-1]:.3f}",
            )
        axes.axhline(baseline.loss, color=GREY, linestyle="--", linewidth=1)
        axes.set(xlabel=label, xlim=(0, None))
        axes.legend(frameon=False)
    lowest = min(baseline.loss, candidate.loss)
    panels[0].set(ylabel="validation loss (nats per token)", ylim=(lowest * 0.97, lowest * 1.6))
    figure.savefig(path)
