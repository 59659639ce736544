"""Is a config near the best of its surroundings? One key at a time, at several sizes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from thinker.benchmarks.environment import finish
from thinker.benchmarks.training_runs import Training, read_shapes, train_all
from thinker.runtime.errors import UserError
from thinker.runtime.plotting import GREY, new_figure
from thinker.training.config import Config, load_config
from thinker.training.optimizers import resolve_learning_rates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value, for all")
    parser.add_argument("--vary", action="append", required=True, metavar="KEY=V1,V2,...",
                        help="x0.5: half of what the config comes to; may come repeatedly")  # fmt: skip
    parser.add_argument("--shapes", metavar="WIDTHxLAYERSxHEADS,...", help="the config at each of these sizes")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, the cores shared out")
    parser.add_argument("--folder", type=Path, default=Path("runs/sweep"), help="what is trained there is not repeated")
    parser.add_argument("--png", type=Path, help="draw it")
    parser.add_argument("--out", type=Path, help="append the line of JSON there")


def run(arguments: argparse.Namespace) -> None:
    """Train the config and its neighbours; print a table a size and a line of JSON."""
    neighbours = [("", "")]
    for text in arguments.vary:
        key, _, values = text.partition("=")
        if not values:
            raise UserError(f"--vary {text} names no values; write it as optimizer.lr=0.01,0.04")
        neighbours += [(key, value) for value in values.split(",")]
    shapes = read_shapes(arguments.shapes) if arguments.shapes else {"": []}
    trainings = []
    for shape, sizes in shapes.items():
        for key, value in neighbours:
            name = "-".join(part for part in (shape, key.split(".")[-1], value) if part) or "config"
            overrides = [*arguments.overrides, *sizes]
            if key:
                overrides.append(f"{key}={_resolve(load_config(arguments.config, overrides), key, value)}")
            load_config(arguments.config, overrides)  # a mistake shows before the first hour of training
            trainings.append(Training(name, arguments.config, overrides, arguments.folder / name))
    train_all(trainings, arguments.jobs)
    rows = []
    for shape, first in zip(shapes, range(0, len(trainings), len(neighbours))):
        here = trainings[first : first + len(neighbours)]
        best = min(training.loss for training in here)
        for (key, value), training in zip(neighbours, here):
            row = {"shape": shape, "key": key, "value": value, "loss": training.loss, "above": training.loss / best - 1}
            row["tokens"] = training.final["tokens"]
            if key:
                section, name = key.split(".")
                row |= {"at": training.config[section][name], "config_at": here[0].config[section][name]}
            rows.append(row)
            print(f"{shape:<12} {key + '=' + value if key else 'the config':<32} {row['loss']:.4f} {row['above']:+.2%}")
    if arguments.png:
        draw_sweep(rows, arguments.png)
    finish({"benchmark": "sweep", "config": arguments.config.name, "rows": rows}, arguments.out)


def _resolve(config: Config, key: str, value: str) -> str:
    """ "x0.5" as half of what the config comes to, anything else as it is."""
    if not value.startswith("x"):
        return value
    config.optimizer = resolve_learning_rates(
        config.optimizer, config.thinker_config(vocab_size=1), config.train.batch_size
    )
    base: Any = config
    for part in key.split("."):
        base = getattr(base, part, None)
    if not isinstance(base, (int, float)):
        raise UserError(f"{key} is {base!r} in the config; {value} can only multiply a number")
    try:
        return f"{float(value[1:]) * base:.6g}"
    except ValueError as error:
        raise UserError(f"{value} is no multiple; write it as x0.5") from error


def draw_sweep(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for each key, a line for each size: how far above the best of its size every value ends."""
    keys = list(dict.fromkeys(row["key"] for row in rows if row["key"]))
    figure, panels = new_figure(4 * len(keys) + 0.5, 4, columns=len(keys))
    for axes, key in zip(panels, keys):
        for shape in dict.fromkeys(row["shape"] for row in rows):
            here = [row for row in rows if row["shape"] == shape]
            base = next(row for row in here if not row["key"])
            varied = [row for row in here if row["key"] == key]
            points = [(row["at"], row["above"]) for row in varied] + [(varied[0]["config_at"], base["above"])]
            at, above = zip(*sorted(points))
            (drawn,) = axes.plot(at, [100 * a for a in above], marker="o", markersize=4, label=shape or None)
            axes.plot(points[-1][0], 100 * points[-1][1], marker="o", markersize=11, fillstyle="none",
                      color=drawn.get_color())  # fmt: skip
        axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set(xscale="log", xlabel=key)
    panels[0].set_ylabel("% above the best of its size (ringed: the config)")
    if rows[0]["shape"]:
        panels[0].legend(frameon=False)
    figure.savefig(path)
