"""Validation loss of a config with named sets of overrides, each trained for the same time with several seeds."""

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

from thinker.benchmarks.training_runs import TrainingRun, train_all
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import GREY, new_figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file to train")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override keys of all runs")
    parser.add_argument("--variant", action="append", required=True, metavar="NAME: section.key=value ...",
                        help="overrides of a variant; repeatable; the others are compared with the first")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=5.0, help="training time of each run (default: 5)")
    parser.add_argument("--seeds", type=int, default=3, help="runs per variant, with seeds 1 to N (default: 3)")
    parser.add_argument("--jobs", type=int, default=1, help="training runs in parallel, which share the cores")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/equal_time"), help="folder for runs; finished runs are reused"
    )
    parser.add_argument("--line", metavar="NAME=LOSS", help="draw a line at a loss, such as that of a teacher")
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot losses over time")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all variants in turns and print a table of their mean losses."""
    variants = dict(parse_variant(text) for text in arguments.variant)
    runs: dict[str, list[TrainingRun]] = {name: [] for name in variants}
    for seed in range(1, arguments.seeds + 1):
        for name, overrides in variants.items():
            options = [*arguments.overrides, f"train.max_minutes={arguments.minutes}", f"run.seed={seed}", *overrides]
            folder = arguments.folder / f"{name}-{seed}".replace(" ", "-")
            runs[name].append(TrainingRun(f"{name}, seed {seed}", arguments.config, options, folder))
    train_all([each for group in zip(*runs.values()) for each in group], arguments.jobs)
    base, rows = [each.loss for each in next(iter(runs.values()))], []
    for name, group in runs.items():
        losses = [each.loss for each in group]
        mean, interval = mean_and_interval([loss - other for loss, other in zip(losses, base)])
        row = {"name": name, "losses": losses, "loss": statistics.fmean(losses), "difference": mean}
        row |= {"interval": interval, "tokens": statistics.fmean(each.final["tokens"] for each in group)}
        rows.append(row)
        print("{name:<28} {loss:.4f} nats  {difference:+.4f} ± {interval:.4f}  {tokens:,.0f} tokens".format(**rows[-1]))
    if arguments.png:
        plot(runs, arguments.line, arguments.png)
    return {"config": arguments.config.name, "minutes": arguments.minutes, "jobs": arguments.jobs, "rows": rows}


def parse_variant(text: str) -> tuple[str, list[str]]:
    """Split "name: a.b=1 c.d=2" into the name and its overrides. Raises UserError without a name."""
    name, colon, overrides = text.partition(":")
    if not (name.strip() and colon):
        raise UserError(f"{text!r} is not a variant; write it as 'NAME: section.key=value ...'")
    return name.strip(), overrides.split()


def mean_and_interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval (Student's t); 0 for a single value or equal ones."""
    if len(values) < 2:
        return values[0], 0.0
    from scipy.stats import t  # slow to import

    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(t.ppf(0.975, len(values) - 1)) * error


def plot(runs: dict[str, list[TrainingRun]], line: str | None, path: Path) -> None:
    """The loss of every run over minutes, in one color per variant."""
    figure, (axes,) = new_figure(7, 4.5)
    lowest = min(each.loss for group in runs.values() for each in group)
    for number, (name, group) in enumerate(runs.items()):
        for each in group:
            points = [(entry["elapsed_s"] / 60, entry["val_loss"]) for entry in each.curve]
            label = f"{name}, {statistics.fmean(other.loss for other in group):.3f}" if each is group[0] else None
            axes.plot(*zip(*points), color=f"C{number}", linewidth=1.2, label=label)
    if line is not None:
        name, _, loss = line.partition("=")
        axes.axhline(float(loss), color=GREY, linestyle="--", linewidth=1, label=f"{name}, {float(loss):.3f}")
    axes.set(xlabel="minutes", ylabel="validation loss (nats per token)", xlim=(0, None))
    axes.set_ylim(min(lowest, float(line.partition("=")[2]) if line else lowest) * 0.98, lowest * 1.15)
    axes.legend(frameon=False)
    figure.savefig(path)
