"""Trained at one length, read at 1, 2 and 4 times of it: every kind of positions, and RoPE stretched afterwards."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.ablation import ALWAYS, RECIPES
from benchmarks.machine import finish
from benchmarks.trainings import Training, train_all
from data.loader import Windows
from device import choose_device, tune
from errors import UserError
from evaluation.long import loss_by_position, stretch
from storage import load
from training.loop import prepare_data
from training.picture import GREY, new_figure
from training.recipe import load_recipe

TIMES = (1, 2, 4)
KINDS = ("rope", "alibi", "learned", "sinusoidal", "none")
SCALINGS = ("linear", "dynamic", "yarn", "llama3")  # of the model with rope, without further training

PARTS = 8  # points of a curve for each trained length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=RECIPES["pydocs"][2])
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, the cores shared out")
    parser.add_argument("--windows", type=int, default=64, help="of the longest length; shorter ones cut the same text")
    parser.add_argument("--folder", type=Path, default=Path("runs/extrapolation"), help="what is there is not repeated")
    parser.add_argument("--png", type=Path, help="draw the loss by position")
    parser.add_argument("--out", type=Path, help="append the line of JSON there")


def run(arguments: argparse.Namespace) -> None:
    """Train each kind, read the same text in windows of each length, print a table and a line of JSON."""
    if arguments.windows < 1:
        raise UserError(f"--windows is {arguments.windows}; it must be at least 1")
    file, batch_size, _ = RECIPES["pydocs"]
    path, trainings = Path(__file__).parent / "recipes" / file, {}
    length = load_recipe(path, []).data.seq_len
    for kind in KINDS:
        for seed in range(1, arguments.seeds + 1):
            # Room for learned positions beyond the training, as they were drawn: others have it by themselves.
            keys = [f"model.positions={kind}", f"model.max_seq_len={length * (max(TIMES) if kind == 'learned' else 1)}"]
            overrides = [*ALWAYS, *keys, f"run.seed={seed}", f"train.max_steps={arguments.steps}"]
            overrides.append(f"train.batch_size={batch_size}")
            trainings[kind, seed] = Training(f"{kind}, {seed}", path, overrides, arguments.folder / f"{kind}-{seed}")
    train_all(list(trainings.values()), arguments.jobs)
    tokens = prepare_data(load_recipe(path, [])).val
    tune(choose_device("cpu"))
    rows: list[dict[str, Any]] = []
    cases = [(kind, None) for kind in KINDS] + [("rope", scaling) for scaling in SCALINGS]
    print(f"trained at {length}; nats a token of the last {length} in windows of {[n * length for n in TIMES]}")
    for kind, scaling in tqdm(cases, desc="reading"):
        losses: dict[int, list[float]] = {n: [] for n in TIMES}
        curves = []
        for seed in range(1, arguments.seeds + 1):
            thinker, _ = load(trainings[kind, seed].folder)
            if scaling is not None:
                original = {} if scaling == "linear" else {"original_max_seq_len": length}
                stretch(thinker, {"type": scaling, "factor": max(TIMES), **original})
            for n in TIMES:
                windows = Windows(tokens, n * length, "contiguous")
                found = loss_by_position(thinker, windows, 4, arguments.windows * max(TIMES) // n)
                losses[n].append(found.segment((n - 1) * length, n * length).loss)
            part = length // PARTS
            curves.append([found.segment(at, at + part).loss for at in range(0, max(TIMES) * length, part)])
        name = kind if scaling is None else f"{kind}, {scaling} x{max(TIMES)}"
        row = {"name": name, "losses": losses, "means": {n: statistics.mean(values) for n, values in losses.items()}}
        row["spread"] = {n: statistics.stdev(v) if len(v) > 1 else 0.0 for n, v in losses.items()}
        row["curve"] = [statistics.mean(values) for values in zip(*curves)]  # by position, in the longest windows
        rows.append(row)
        tqdm.write(f"{name:<20}" + "".join(f"  {row['means'][n]:.3f} ± {row['spread'][n]:.3f}" for n in TIMES))
    if arguments.png:
        draw(rows, length, arguments.png)
    finish({"benchmark": "extrapolation", "trained_length": length, "rows": rows}, arguments.out)


def draw(rows: list[dict[str, Any]], length: int, path: Path) -> None:
    """Loss by position in the longest windows: kinds of positions, and beside them RoPE as it was scaled afterwards."""
    figure, panels = new_figure(12, 4.6, columns=2)
    part = length // PARTS
    for axes, kinds in zip(panels, (KINDS, ("rope", *(f"rope, {scaling} x{max(TIMES)}" for scaling in SCALINGS)))):
        for number, kind in enumerate(kinds):
            curve = next(row["curve"] for row in rows if row["name"] == kind)
            at = [part * (i + 0.5) for i in range(len(curve))]
            axes.plot(
                at, curve, marker="o", markersize=3, color=f"C{number if kind in KINDS else number + 4}", label=kind
            )
        axes.axvline(length, color=GREY, linestyle="--", label=f"trained length, {length}")
        axes.set(xlabel="position", ylabel="loss (nats a token)")
        axes.legend(frameon=False, fontsize=8)
    panels[0].set_title("kinds of positions", loc="left")
    panels[1].set_title("RoPE scaled after the training", loc="left")
    figure.savefig(path)
