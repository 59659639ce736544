"""Validation loss of a config with named sets of overrides, each trained for the same time with
several seeds."""

import argparse
import itertools
import math
import statistics
from pathlib import Path
from typing import Any

from thinker.benchmarks.training_runs import train_all
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import GREY, new_figure
from thinker.training.processes.training_process import TrainingProcess


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file to train")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override keys of all runs"
    )
    parser.add_argument("--variant", action="append", required=True, metavar="NAME: section.key=value ...",
                        help="overrides of a variant; repeatable; the others are compared with the first")  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="training time of each run (default: 5)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs per variant, with seeds 1 to N (default: 3)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="training runs in parallel, which share the cores"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/equal_time"),
        help="folder for runs; finished runs are reused",
    )
    parser.add_argument(
        "--line", metavar="NAME=LOSS", help="draw a line at a loss, such as that of a teacher"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot losses over time")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all variants in turns and print a table of their mean losses."""
    variants = dict(parse_variant(text) for text in arguments.variant)
    runs: dict[str, list[TrainingProcess]] = {name: [] for name in variants}
    for seed in range(1, arguments.seeds + 1):
        for name, overrides in variants.items():
            options = [
                *arguments.overrides,
                f"train.max_minutes={arguments.minutes}",
                f"run.seed={seed}",
                *overrides,
            ]
            folder = arguments.folder / f"{name}-{seed}".replace(" ", "-")
            runs[name].append(
                TrainingProcess(f"{name}, seed {seed}", arguments.config, options, folder)
            )
    train_all([each for group in zip(*runs.values()) for each in group], arguments.jobs)
    base, rows = [each.loss for each in next(iter(runs.values()))], []
    for name, group in runs.items():
        losses = [each.loss for each in group]
        mean, interval = mean_and_interval([loss - other for loss, other in zip(losses, base)])
        row = {"name": name, "losses": losses, "loss": statistics.fmean(losses), "difference": mean}
        row |= {
            "interval": interval,
            "tokens": statistics.fmean(each.final["tokens"] for each in group),
        }
        rows.append(row)
        print(
            "{name:<28} {loss:.4f} nats  {difference:+.4f} ± {interval:.4f}  {tokens:,.0f} tokens".format(
                **rows[-1]
            )
        )
    if arguments.png:
        plot(runs, arguments.line, arguments.png)
    return {
        "config": arguments.config.name,
        "minutes": arguments.minutes,
        "jobs": arguments.jobs,
        "rows": rows,
    }


def parse_variant(text: str) -> tuple[str, list[str]]:
    """Split "name: a.b=1 c.d=2" into the name and its overrides. Raises UserError without a
    name."""
    name, colon, overrides = text.partition(":")
    if not (name.strip() and colon):
        raise UserError(f"{text!r} is not a variant; write it as 'NAME: section.key=value ...'")
    return name.strip(), overrides.split()


def mean_and_interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval (Student's t); 0 for a single value or equal
    ones."""
    if len(values) < 2:
        return values[0], 0.0
    from scipy.stats import t  # slow to import

    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(t.ppf(0.975, len(values) - 1)) * error


def plot(runs: dict[str, list[TrainingProcess]], line: str | None, path: Path) -> None:
    """Left the loss of every run over minutes, or tokens if all have about as many; right how far
    each variant ends from the first one, seed by seed.
    """
    figure, (curves, ends) = new_figure(
        12, max(4.0, 0.5 + 0.45 * len(runs)), columns=2, share=False
    )
    base = next(iter(runs.values()))
    everything = list(itertools.chain.from_iterable(runs.values()))
    losses = [each.loss for each in everything]
    lowest, highest = min(losses), max(losses)
    tokens = [each.curve[-1]["tokens"] for each in everything]
    is_equal = max(tokens) < 1.02 * min(tokens)  # limited by steps
    unit, factor, label = (
        ("tokens", 1e6, "million tokens") if is_equal else ("elapsed_s", 60, "minutes")
    )
    for number, group in enumerate(runs.values()):
        color = f"C{number}"
        for each in group:
            points = [(entry[unit] / factor, entry["val_loss"]) for entry in each.curve]
            curves.plot(*zip(*points), color=color, linewidth=1.2)
        differences = [each.loss - other.loss for each, other in zip(group, base)]
        mean, interval = mean_and_interval(differences)
        ends.errorbar(mean, number, xerr=interval, fmt="|", color=color, markersize=14, capsize=4)
        ends.plot(differences, [number] * len(group), ".", color=color)
    if line is not None:
        name, _, loss = line.partition("=")
        curves.axhline(
            float(loss), color=GREY, linestyle="--", linewidth=1, label=f"{name}, {float(loss):.3f}"
        )
        curves.legend(frameon=False)
        lowest = min(lowest, float(loss))
    margin = 0.3 * (highest - lowest) + 0.01 * lowest
    curves.set(xlabel=label, ylabel="validation loss (nats per token)", xlim=(0, None))
    curves.set_ylim(lowest - margin, highest + 4 * margin)
    labels = []
    for name, group in runs.items():
        mean = statistics.fmean(each.loss for each in group)
        labels.append(f"{name}\n{mean:.3f}")
    ends.set_yticks(range(len(runs)), labels)
    ends.axvline(0, color=GREY, linewidth=1)
    ends.set(
        xlabel=f"difference from {next(iter(runs))}, mean and 95% interval",
        ylim=(len(runs) - 0.5, -0.5),
    )
    for tick, number in zip(ends.get_yticklabels(), range(len(runs))):
        tick.set_color(f"C{number}")
    figure.savefig(path)
