"""Loss by learning rate, as a multiple of the default, for several widths and batch sizes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinker.benchmarks.training_runs import ROOT
from thinker.data.batches.prefetch import Batch
from thinker.runtime.plot_style import new_figure, save_figure
from thinker.runtime.process.progress import Progress
from thinker.training.config.load import load_config
from thinker.training.data.run_corpus import prepare_training_data
from thinker.training.optim.schedule import lr_multiplier
from thinker.training.settings.resolve import resolve_settings
from thinker.training.step import TrainingStep, build_model

LENGTH = 64  # of a sequence, in characters
N_LAYERS = 2
HEAD_DIM = 32
EVAL_SEQUENCES = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[64, 128, 256], help="(default: 64 128 256)"
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[4, 16, 64], help="sequences (default: 4 16 64)"
    )
    parser.add_argument(
        "--multiples",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 1.0, 2.0, 4.0],
        help="of all default rates (default: 0.25 0.5 1 2 4)",
    )
    parser.add_argument(
        "--tokens", type=int, default=131_072, help="training tokens of a run (default: 131072)"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot to write")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train every combination on the same tokens, and print the losses."""
    config = load_config(ROOT / "configs" / "chars.yaml", ["data.source=pysource"])
    corpus = prepare_training_data(config, None)
    train = torch.from_numpy(np.asarray(corpus.train.shards[0].tokens).astype(np.int64))
    val = torch.from_numpy(np.asarray(corpus.val.shards[0].tokens).astype(np.int64))
    vocab_size = corpus.tokenizer.vocab_size
    cases = []
    for width in arguments.widths:
        for batch_size in arguments.batches:
            for multiple in arguments.multiples:
                cases.append((width, batch_size, multiple))
    rows = []
    for width, batch_size, multiple in Progress(cases, desc="runs"):
        n_steps = arguments.tokens // batch_size // LENGTH
        loss = train_loss(train, val, vocab_size, width, batch_size, n_steps, multiple)
        rows.append({"width": width, "batch": batch_size, "multiple": multiple, "loss": loss})
        Progress.write(f"width {width} batch {batch_size} × {multiple:g}: {loss:.4f}")
    if arguments.png is not None:
        plot(rows, arguments.png)
    return {"tokens": arguments.tokens, "rows": rows}


def train_loss(
    train: Tensor,
    val: Tensor,
    vocab_size: int,
    width: int,
    batch_size: int,
    n_steps: int,
    multiple: float,
) -> float:
    """Train with the default schedule, every rate multiplied, and evaluate (nats per token)."""
    overrides = [f"model.d_model={width}", f"model.n_layers={N_LAYERS}", "train.compile=false"]
    n_heads = max(1, width // HEAD_DIM)
    overrides += [f"model.n_heads={n_heads}", f"data.seq_len={LENGTH}"]
    overrides += [f"train.batch_size={batch_size}", f"train.max_steps={n_steps}"]
    config = load_config(ROOT / "configs" / "chars.yaml", overrides)
    device = torch.device("cpu")
    settings = resolve_settings(config, config.thinker_config(vocab_size), device, "fp32")
    model = build_model(settings.model, settings.run.seed, device)
    step = TrainingStep(model, settings)
    random = torch.Generator().manual_seed(1)
    starts = torch.randint(len(train) - LENGTH, (n_steps * batch_size,), generator=random)
    for number in range(n_steps):
        windows = windows_at(train, starts[number * batch_size : (number + 1) * batch_size])
        batch = Batch(windows[:, :-1], windows[:, 1:], batch_size * LENGTH)
        step.optimizers.set_momentum(number)
        step(batch, multiple * lr_multiplier(settings.train, number, number / n_steps))
    model.eval()
    windows = windows_at(val, torch.arange(EVAL_SEQUENCES) * LENGTH)
    with torch.no_grad():
        total, count = model(windows[:, :-1], targets=windows[:, 1:])
    return float(total) / int(count)


def windows_at(tokens: Tensor, starts: Tensor) -> Tensor:
    """The sequences at some positions, each with the token after it. (B, T + 1)."""
    return tokens[starts[:, None] + torch.arange(LENGTH + 1)]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The loss above the best of each width and batch size: a panel for each batch size."""
    batches = sorted({row["batch"] for row in rows})
    widths = sorted({row["width"] for row in rows})
    figure, panels = new_figure(3.6 * len(batches), 3.6, columns=len(batches))
    for axes, batch_size in zip(panels, batches):
        for width in widths:
            line = [row for row in rows if (row["batch"], row["width"]) == (batch_size, width)]
            best = min(row["loss"] for row in line)
            multiples = [row["multiple"] for row in line]
            excess = [100 * (row["loss"] / best - 1) for row in line]
            axes.plot(multiples, excess, "o-", markersize=4, label=f"width {width}")
        axes.axvline(1, color="grey", alpha=0.4, linewidth=1)
        axes.set(xscale="log", title=f"{batch_size} sequences", xlabel="multiple of the defaults")
        axes.set_xticks(multiples, [f"{multiple:g}" for multiple in multiples])
        axes.minorticks_off()
    panels[0].set_ylabel("loss above the best, %")
    panels[0].legend(frameon=False)
    save_figure(figure, path)
