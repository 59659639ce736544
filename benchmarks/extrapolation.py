"""Trained at one length, read at 1, 2 and 4 times of it: every kind of positions, and RoPE stretched afterwards.

The same tokens are predicted each time, the last of the longest windows; what differs is how much is seen before them.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from tqdm import tqdm

from thinker.benchmarks.ablation import ALWAYS, CONFIGS
from thinker.benchmarks.environment import finish
from thinker.benchmarks.training_runs import Training, train_all
from thinker.data.batches import PackedDataset
from thinker.evaluation.long_context import loss_by_position, stretch
from thinker.interop import load
from thinker.runtime.device import choose_device, configure_backend
from thinker.runtime.errors import UserError
from thinker.runtime.plotting import GREY, new_figure
from thinker.training.config import load_config
from thinker.training.corpus import prepare_training_data

TIMES = (1, 2, 4)
KINDS = ("rope", "alibi", "learned", "sinusoidal", "none")
SCALINGS = ("linear", "dynamic", "yarn", "llama3")  # of the model with rope, without further training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=CONFIGS["pysource"][2])
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, the cores shared out")
    parser.add_argument("--windows", type=int, default=64, help="of the longest length; shorter ones cut the same text")
    parser.add_argument("--folder", type=Path, default=Path("runs/extrapolation"), help="what is there is not repeated")
    parser.add_argument("--png", type=Path, help="draw the loss by length")
    parser.add_argument("--out", type=Path, help="append the line of JSON there")


def run(arguments: argparse.Namespace) -> None:
    """Train each kind, read the same text in windows of each length, print a table and a line of JSON."""
    if arguments.windows < 1:
        raise UserError(f"--windows is {arguments.windows}; it must be at least 1")
    file, batch_size, _ = CONFIGS["pysource"]
    path, trainings = Path(__file__).parent / "configs" / file, {}
    length = load_config(path, []).data.seq_len
    for kind in KINDS:
        for seed in range(1, arguments.seeds + 1):
            # Room for learned positions beyond the training, as they were drawn: others have it by themselves.
            keys = [f"model.positions={kind}", f"model.max_seq_len={length * (max(TIMES) if kind == 'learned' else 1)}"]
            overrides = [*ALWAYS, *keys, f"run.seed={seed}", f"train.max_steps={arguments.steps}"]
            overrides.append(f"train.batch_size={batch_size}")
            trainings[kind, seed] = Training(f"{kind}, {seed}", path, overrides, arguments.folder / f"{kind}-{seed}")
    train_all(list(trainings.values()), arguments.jobs)
    tokens = prepare_training_data(load_config(path, [])).val
    configure_backend(choose_device("cpu"))
    rows: list[dict[str, Any]] = []
    cases = [(kind, None) for kind in KINDS] + [("rope", scaling) for scaling in SCALINGS]
    print(
        f"trained at {length}; nats a token of the same {length} at the end of windows of {[n * length for n in TIMES]}"
    )
    for kind, scaling in tqdm(cases, desc="reading"):
        losses: dict[int, list[float]] = {n: [] for n in TIMES}
        for seed in range(1, arguments.seeds + 1):
            model, _ = load(trainings[kind, seed].folder)
            if scaling is not None:
                original = {} if scaling == "linear" else {"original_max_seq_len": length}
                stretch(model, {"type": scaling, "factor": max(TIMES), **original})
            for n in TIMES:
                windows = PackedDataset(tokens, n * length, "contiguous")
                found = loss_by_position(model, windows, 4, arguments.windows * max(TIMES) // n)
                every = max(TIMES) // n  # of so many windows the last ends where one of the longest does
                losses[n].append(found.nats[every - 1 :: every, -length:].nanmean().item())
        name = kind if scaling is None else f"{kind}, {scaling} x{max(TIMES)}"
        row = {"name": name, "losses": losses, "means": {n: statistics.mean(values) for n, values in losses.items()}}
        row["spread"] = {n: statistics.stdev(v) if len(v) > 1 else 0.0 for n, v in losses.items()}
        rows.append(row)
        tqdm.write(f"{name:<20}" + "".join(f"  {row['means'][n]:.3f} ± {row['spread'][n]:.3f}" for n in TIMES))
    if arguments.png:
        draw(rows, length, arguments.png)
    finish({"benchmark": "extrapolation", "trained_length": length, "rows": rows}, arguments.out)


def draw(rows: list[dict[str, Any]], length: int, path: Path) -> None:
    """Loss by the length of windows: kinds of positions, and beside them RoPE as it was scaled afterwards."""
    figure, panels = new_figure(10, 4.4, columns=2)
    lengths = [n * length for n in TIMES]
    for axes, kinds in zip(panels, (KINDS, ("rope", *(f"rope, {scaling} x{max(TIMES)}" for scaling in SCALINGS)))):
        for number, kind in enumerate(kinds):
            row = next(row for row in rows if row["name"] == kind)
            values = ([row[name][n] for n in TIMES] for name in ("means", "spread"))
            color = f"C{number if kind in KINDS else number + 4}"
            axes.errorbar(lengths, *values, color=color, marker="o", markersize=4, capsize=3, label=kind)
        axes.axvline(length, color=GREY, linestyle="--", label=f"trained length, {length}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(one) for one in lengths])
        axes.margins(y=0.22)
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
        axes.set(xlabel=f"length of windows, the last {length} tokens of which are predicted")
    panels[0].set_ylabel("loss (nats a token)")
    panels[0].set_title("kinds of positions", loc="left")
    panels[1].set_title("RoPE scaled after the training", loc="left")
    figure.savefig(path)
