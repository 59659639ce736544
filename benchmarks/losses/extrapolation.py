"""Loss at 1, 2 and 4 times the trained length, by position encoding and RoPE scaling.

The same tokens are predicted each time, the last ones of the longest windows; only the length of
their context differs.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from thinker.benchmarks.losses.ablation import COMMON_OVERRIDES, CORPORA
from thinker.benchmarks.training_runs import ROOT, train_all
from thinker.data.batches.windows import PackedDataset
from thinker.evaluation.long_context import loss_by_position, override_rope_scaling
from thinker.interop import load
from thinker.runtime.backend import configure_backend
from thinker.runtime.device import choose_device
from thinker.runtime.errors import UserError
from thinker.runtime.plot_style import GREY, new_figure
from thinker.runtime.process.progress import Progress
from thinker.training.config.load import load_config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.processes.training_process import TrainingProcess

MULTIPLES = (1, 2, 4)  # of the trained length
LONGEST = max(MULTIPLES)
POSITIONS = ("rope", "alibi", "learned", "sinusoidal", "none")
SCALINGS = (
    "linear",
    "dynamic",
    "yarn",
    "llama3",
)  # of the model with RoPE, without further training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--seeds", type=int, default=3, help="training runs per encoding, with seeds 1 to N"
    )
    parser.add_argument("--steps", type=int, default=CORPORA["pysource"][2], help="training steps")
    parser.add_argument(
        "--jobs", type=int, default=2, help="training runs in parallel, which share the cores"
    )
    parser.add_argument(
        "--windows",
        type=int,
        default=64,
        help="windows of the longest length; shorter lengths use the same text",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/extrapolation"),
        help="folder for runs; finished runs are reused",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot loss by length")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train each kind of positions, evaluate the same tokens with each length of context, and print
    a table."""
    if arguments.windows < 1:
        raise UserError(f"--windows is {arguments.windows}; use at least 1")
    file, batch_size, _ = CORPORA["pysource"]
    path = ROOT / "benchmarks" / "configs" / file
    config = load_config(path, [])
    trained_length = config.data.seq_len
    runs: dict[tuple[str, int], TrainingProcess] = {}
    for positions in POSITIONS:
        # Learned positions need rows for the lengths beyond the training, which stay at their
        # initial values.
        max_seq_len = trained_length * LONGEST if positions == "learned" else trained_length
        for seed in range(1, arguments.seeds + 1):
            overrides = [*COMMON_OVERRIDES, f"model.positions={positions}", f"model.max_seq_len={max_seq_len}",
                         f"run.seed={seed}", f"train.max_steps={arguments.steps}",
                         f"train.batch_size={batch_size}"]  # fmt: skip
            folder = arguments.folder / f"{positions}-{seed}"
            runs[positions, seed] = TrainingProcess(f"{positions}, {seed}", path, overrides, folder)
    train_all(list(runs.values()), arguments.jobs)
    validation_tokens = prepare_training_data(config).val
    configure_backend(choose_device("cpu"))
    print(
        f"trained at {trained_length}; nats per token at the end of windows of that length times {MULTIPLES}"
    )
    rows: list[dict[str, Any]] = []
    cases = [(positions, None) for positions in POSITIONS] + [
        ("rope", scaling) for scaling in SCALINGS
    ]
    for positions, scaling in Progress(cases, desc="evaluating"):
        losses: dict[int, list[float]] = {multiple: [] for multiple in MULTIPLES}
        for seed in range(1, arguments.seeds + 1):
            model, _ = load(runs[positions, seed].folder)
            if scaling is not None:
                original = {} if scaling == "linear" else {"original_max_seq_len": trained_length}
                override_rope_scaling(model, {"type": scaling, "factor": LONGEST, **original})
            for multiple in MULTIPLES:
                windows = PackedDataset(validation_tokens, multiple * trained_length, "contiguous")
                every = (
                    LONGEST // multiple
                )  # each every-th window ends where one of the longest does
                result = loss_by_position(model, windows, 4, arguments.windows * every)
                losses[multiple].append(
                    result.nats[every - 1 :: every, -trained_length:].nanmean().item()
                )
        row = {
            "name": positions if scaling is None else scaled_name(scaling),
            "losses": losses,
            "mean_losses": {
                multiple: statistics.mean(values) for multiple, values in losses.items()
            },
            "stds": {
                multiple: statistics.stdev(v) if len(v) > 1 else 0.0
                for multiple, v in losses.items()
            },
        }
        rows.append(row)
        cells = [
            f"  {row['mean_losses'][multiple]:.3f} ± {row['stds'][multiple]:.3f}"
            for multiple in MULTIPLES
        ]
        Progress.write(f"{row['name']:<20}" + "".join(cells))
    if arguments.png:
        plot(rows, trained_length, arguments.png)
    return {"trained_length": trained_length, "rows": rows}


def scaled_name(scaling: str) -> str:
    """Name RoPE that was scaled after training."""
    return f"rope, {scaling} x{LONGEST}"


def plot(rows: list[dict[str, Any]], trained_length: int, path: Path) -> None:
    """Loss by length: position encodings on the left, scaled RoPE on the right."""
    figure, panels = new_figure(10, 4.4, columns=2)
    lengths = [multiple * trained_length for multiple in MULTIPLES]
    by_name = {row["name"]: row for row in rows}
    scaled = [scaled_name(scaling) for scaling in SCALINGS]
    colors = {name: f"C{number}" for number, name in enumerate((*POSITIONS, *scaled))}
    for axes, names in zip(panels, (POSITIONS, ("rope", *scaled))):
        for name in names:
            means, stds = (by_name[name][key].values() for key in ("mean_losses", "stds"))
            axes.errorbar(lengths, list(means), list(stds), color=colors[name], marker="o", markersize=4, capsize=3,
                          label=name)  # fmt: skip
        axes.axvline(
            trained_length, color=GREY, linestyle="--", label=f"trained length, {trained_length}"
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.margins(y=0.22)
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
        axes.set(xlabel=f"window length; the last {trained_length} tokens are predicted")
    panels[0].set_ylabel("loss (nats per token)")
    panels[0].set_title("position encodings", loc="left")
    panels[1].set_title("RoPE scaled after training", loc="left")
    figure.savefig(path)
