"""Loss when one key of a config varies, at several model sizes."""

import argparse
from pathlib import Path
from typing import Any

from thinker.benchmarks.training_runs import parse_assignments, parse_shapes, train_all
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import GREY, new_figure
from thinker.training.config.config import Config
from thinker.training.config.load import load_config
from thinker.training.optim.optimizers import resolve_learning_rates
from thinker.training.processes.training_process import TrainingProcess


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file to vary")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override keys of the config"
    )
    parser.add_argument("--vary", action="append", required=True, metavar="KEY=V1,V2,...",
                        help="values of a key; x0.5 multiplies the config's value; repeatable")  # fmt: skip
    parser.add_argument(
        "--shapes", metavar="WIDTHxLAYERSxHEADS,...", help="model sizes (default: the config's)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="training runs in parallel, which share the cores"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/sweep"),
        help="folder for runs; finished runs are reused",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot losses")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train the config and its neighbours at each size and print a table."""
    variations = [("", "")]  # the config as it is
    for text in arguments.vary:
        variations += parse_assignments("--vary", text, "0.01,0.04")
    shapes = parse_shapes(arguments.shapes) if arguments.shapes else {"": []}
    runs: dict[str, list[TrainingProcess]] = {}
    for shape, sizes in shapes.items():
        runs[shape] = []
        for key, setting in variations:
            name = (
                "-".join(part for part in (shape, key.split(".")[-1], setting) if part) or "config"
            )
            overrides = [*arguments.overrides, *sizes]
            if key:
                overrides.append(
                    f"{key}={scale_setting(load_config(arguments.config, overrides), key, setting)}"
                )
            runs[shape].append(
                TrainingProcess(name, arguments.config, overrides, arguments.folder / name)
            )
    train_all([run for shape_runs in runs.values() for run in shape_runs], arguments.jobs)
    rows = []
    for shape, shape_runs in runs.items():
        best_loss = min(run.loss for run in shape_runs)
        for (key, setting), run in zip(variations, shape_runs):
            row = {"shape": shape, "key": key, "setting": setting, "loss": run.loss}
            row |= {"relative_excess": run.loss / best_loss - 1, "tokens": run.final["tokens"]}
            if key:
                row |= {"value": lookup(run, key), "config_value": lookup(shape_runs[0], key)}
            rows.append(row)
            label = f"{key}={setting}" if key else "the config"
            print(f"{shape:<12} {label:<32} {row['loss']:.4f} {row['relative_excess']:+.2%}")
    if arguments.png:
        plot(rows, arguments.png)
    return {"config": arguments.config.name, "rows": rows}


def lookup(run: TrainingProcess, key: str) -> Any:
    """The value of section.key that the run was trained with."""
    section, name = key.split(".")
    return run.resolved[section][name]


def scale_setting(config: Config, key: str, setting: str) -> str:
    """Replace "x0.5" by half of the config's value, defaults included; any other setting stays as
    it is."""
    if not setting.startswith("x"):
        return setting
    section, _, name = key.partition(".")
    values = getattr(config, section, None)
    if section == "optimizer":
        values = resolve_learning_rates(
            values, config.thinker_config(vocab_size=1), config.train.batch_size
        )
    base: Any = getattr(values, name, None)
    if not isinstance(base, (int, float)):
        raise UserError(
            f"{key} is {base!r} in the config, so {setting} cannot scale it; list values instead"
        )
    try:
        return f"{float(setting[1:]) * base:.6g}"
    except ValueError as error:
        raise UserError(f"{setting} is not a multiplier; write it as x0.5") from error


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel per key, one line per size: the loss of each value relative to the best of its
    size."""
    keys = list(dict.fromkeys(row["key"] for row in rows if row["key"]))
    figure, panels = new_figure(4 * len(keys) + 0.5, 4, columns=len(keys))
    for axes, key in zip(panels, keys):
        for shape in dict.fromkeys(row["shape"] for row in rows):
            varied = [row for row in rows if row["shape"] == shape and row["key"] == key]
            unchanged = next(row for row in rows if row["shape"] == shape and not row["key"])
            x, y = varied[0]["config_value"], 100 * unchanged["relative_excess"]
            points = sorted(
                [(x, y), *((row["value"], 100 * row["relative_excess"]) for row in varied)]
            )
            (line,) = axes.plot(*zip(*points), marker="o", markersize=4, label=shape or None)
            axes.plot(x, y, marker="o", markersize=11, fillstyle="none", color=line.get_color())
        axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set(xscale="log", xlabel=key)
    panels[0].set_ylabel("% above the best of its size")
    if rows[0]["shape"]:
        panels[0].legend(frameon=False)
    figure.savefig(path)
