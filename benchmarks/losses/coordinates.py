"""Activations, and how far steps of training move them, by width and depth (a coordinate check).

If the default learning rates suit every size, then the same steps change activations by about as
much in a wide model as in a narrow one (Yang et al. 2022, arXiv:2203.03466, appendix D).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinker.benchmarks.training_runs import ROOT
from thinker.data.batches.prefetch import Batch
from thinker.data.text.tales import generate_story
from thinker.model import Thinker
from thinker.runtime.plot_style import BLUE, ORANGE, new_figure, save_figure
from thinker.runtime.process.progress import Progress
from thinker.training.config.load import load_config
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep, build_model

STEPS = (1, 2, 4, 8)
BATCH, LENGTH = 4, 64
HEAD_DIM = 32
VOCABULARY = 256  # bytes
TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # of the plot
OTHER_AXIS = {"width": ("layers", 2), "layers": ("width", 64)}  # what is fixed along an axis
# What is measured, by the name in tables; of the residual stream, the last block's.
QUANTITIES = ("embedding", "residual stream", "attention logits", "logits")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[64, 128, 256, 512, 1024, 2048],
        help="widths of two layers (default: 64 to 2048)",
    )
    parser.add_argument(
        "--depths",
        type=int,
        nargs="+",
        default=[2, 4, 8, 16, 24],
        help="numbers of layers of width 64 (default: 2 to 24)",
    )
    parser.add_argument(
        "--steps", type=int, choices=STEPS[1:], default=8, help="steps of training (default: 8)"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot to write")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all sizes for a few steps, and print how activations and their changes grow."""
    sizes = [(width, 2) for width in arguments.widths] + [(64, n) for n in arguments.depths]
    rows = []
    for width, n_layers in Progress(dict.fromkeys(sizes), desc="sizes"):
        rows += measure(width, n_layers, arguments.steps)
    slopes = []
    axes = (("width", arguments.widths), ("layers", arguments.depths))
    for axis, values in axes:
        if len(values) > 1:
            slopes += growth(rows, axis, arguments.steps)
    print(
        f"{'by':<7} {'activation':<17} {'value: largest/smallest':>24} {'change':>8} {'slope':>6}"
    )
    for row in slopes:
        print(
            f"{row['by']:<7} {row['activation']:<17} {row['rms_ratio']:>24.2f} "
            f"{row['change_ratio']:>8.2f} {row['change_slope']:>6.2f}"
        )
    if arguments.png is not None:
        plot(rows, arguments.png)
    return {"rows": rows, "slopes": slopes}


def text_batch() -> Tensor:
    """The same bytes of text for every size. (B, T + 1)."""
    n_bytes = BATCH * (LENGTH + 1)
    stories = (generate_story(1, index).text for index in range(10))
    text = "\n".join(stories).encode()[:n_bytes]
    return torch.tensor(list(text)).view(BATCH, LENGTH + 1)


def measure(width: int, n_layers: int, n_steps: int = 8, *overrides: str) -> list[dict[str, Any]]:
    """Train a model with the default optimizer at its peak learning rates, on one batch, and
    measure its activations after 0, 1, 2, 4, ... steps.

    A row has the root mean square of an activation and of its change since the initialization.
    """
    shape = [f"model.d_model={width}", f"model.n_layers={n_layers}"]
    shape += [f"model.n_heads={width // HEAD_DIM}", f"model.vocab_size={VOCABULARY}"]
    data = [f"data.seq_len={LENGTH}", "train.batch_size=16", "train.compile=false"]
    config = load_config(ROOT / "configs" / "chars.yaml", [*shape, *data, *overrides])
    device = torch.device("cpu")
    settings = resolve_settings(config, config.thinker_config(VOCABULARY), device, "fp32")
    model = build_model(settings.model, settings.run.seed, device)
    step = TrainingStep(model, settings)
    text = text_batch()
    inputs, targets = text[:, :-1], text[:, 1:]
    batch = Batch(inputs, targets, targets.numel())
    first = activations(model, inputs)
    rows = []
    for number in range(n_steps + 1):
        if number > 0:
            step.optimizers.set_momentum(number - 1)
            step(batch, 1.0)
        if number > 0 and number not in STEPS:
            continue
        now = activations(model, inputs)
        for name in QUANTITIES:
            change = now[name] - first[name]
            rows.append(
                {
                    "width": width,
                    "layers": n_layers,
                    "step": number,
                    "activation": name,
                    "rms": root_mean_square(now[name]),
                    "change": root_mean_square(change),
                }
            )
    return rows


@torch.no_grad()
def activations(model: Thinker, tokens: Tensor) -> dict[str, Tensor]:
    """The activations that are measured. Attention logits are those of pairs that may attend."""
    is_training = model.training
    model.eval()
    last = model.config.n_layers - 1
    scores = f"blocks.{last}.attention.scores"
    with model.record("embedding", f"blocks.{last}", scores, "logits") as found:
        model(tokens)
    model.train(is_training)
    may_attend = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return {
        "embedding": found["embedding"],
        "residual stream": found[f"blocks.{last}"],
        "attention logits": found[scores][..., may_attend],
        "logits": found["logits"],
    }


def root_mean_square(x: Tensor) -> float:
    """√(mean of x²)."""
    return float(x.float().square().mean().sqrt())


def growth(rows: list[dict[str, Any]], axis: str, step: int) -> list[dict[str, Any]]:
    """How values and changes after a step grow along "width" or "layers": the largest size's by the
    smallest's, and the slope of a straight line on log axes. A slope of 0 means no growth. From the
    second step on: the first moves the head alone."""
    found = []
    for name in QUANTITIES:
        line = line_of(rows, axis, step, name)
        sizes = np.log([row[axis] for row in line])
        row: dict[str, Any] = {"by": axis, "activation": name, "step": step}
        row |= {"smallest": line[0][axis], "largest": line[-1][axis]}
        for value in ("rms", "change"):
            values = [each[value] for each in line]
            row[f"{value}_ratio"] = values[-1] / values[0]
            row[f"{value}_slope"] = float(np.polyfit(sizes, np.log(values), 1)[0])
        found.append(row)
    return found


def line_of(
    rows: list[dict[str, Any]], axis: str, step: int, activation: str
) -> list[dict[str, Any]]:
    """The rows of an activation after a step along "width" or "layers", smallest first."""
    other, fixed = OTHER_AXIS[axis]
    line = []
    for row in rows:
        if row[other] == fixed and row["step"] == step and row["activation"] == activation:
            line.append(row)
    return sorted(line, key=lambda row: row[axis])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The change of each activation after each number of steps, by width and by depth."""
    figure, panels = new_figure(12, 3.6, columns=len(QUANTITIES))
    for axes, name in zip(panels, QUANTITIES):
        for color, axis in ((BLUE, "width"), (ORANGE, "layers")):
            for step in STEPS:
                line = line_of(rows, axis, step, name)
                if len(line) < 2:
                    continue
                sizes = [row[axis] / line[0][axis] for row in line]
                changes = [row["change"] for row in line]
                if min(changes) == 0:  # the first step moves the head alone
                    continue
                shade = 0.25 + 0.75 * STEPS.index(step) / (len(STEPS) - 1)
                axes.plot(sizes, changes, "o-", markersize=3, color=color, alpha=shade)
        axes.set(xscale="log", yscale="log", title=name, xlabel="width or layers, by the smallest")
        axes.minorticks_off()
        axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    panels[0].set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    panels[0].minorticks_off()
    panels[0].set_ylabel("change since the initialization (RMS)")
    panels[0].plot([], [], color=BLUE, label="by width (2 layers)")
    panels[0].plot([], [], color=ORANGE, label="by layers (width 64)")
    panels[0].legend(
        frameon=False, fontsize=8, loc="lower left", title="pale to dark: 1, 2, 4, 8 steps"
    )
    save_figure(figure, path)
