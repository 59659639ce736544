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
from training.recipe import load_recipe

TIMES = (1, 2, 4)
KINDS = ("rope", "alibi", "learned", "sinusoidal", "none")
SCALINGS = ("linear", "dynamic", "yarn", "llama3")  # of the model with rope, without further training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=RECIPES["pydocs"][2])
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, the cores shared out")
    parser.add_argument("--windows", type=int, default=64, help="of the longest length; shorter ones cut the same text")
    parser.add_argument("--folder", type=Path, default=Path("runs/extrapolation"), help="what is there is not repeated")
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
        for seed in range(1, arguments.seeds + 1):
            thinker, _ = load(trainings[kind, seed].folder)
            if scaling is not None:
                original = {} if scaling == "linear" else {"original_max_seq_len": length}
                stretch(thinker, {"type": scaling, "factor": max(TIMES), **original})
            for n in TIMES:
                windows = Windows(tokens, n * length, "contiguous")
                found = loss_by_position(thinker, windows, 4, arguments.windows * max(TIMES) // n)
                losses[n].append(found.segment((n - 1) * length, n * length).loss)
        name = kind if scaling is None else f"{kind}, {scaling} x{max(TIMES)}"
        row = {"name": name, "losses": losses, "means": {n: statistics.mean(values) for n, values in losses.items()}}
        row["spread"] = {n: statistics.stdev(v) if len(v) > 1 else 0.0 for n, v in losses.items()}
        rows.append(row)
        tqdm.write(f"{name:<20}" + "".join(f"  {row['means'][n]:.3f} ± {row['spread'][n]:.3f}" for n in TIMES))
    finish({"benchmark": "extrapolation", "trained_length": length, "rows": rows}, arguments.out)
