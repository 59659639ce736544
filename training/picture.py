"""The loss curve of a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLUE, ORANGE, GREY = "#2f6db3", "#d9662b", "#777777"


def draw_loss(lines: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw training and validation loss by step from the lines of metrics.jsonl, with the entropy floor where known."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [(line["step"], line["train_loss"]) for line in lines if "train_loss" in line]
    val = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
    floor = next((line["entropy_floor"] for line in reversed(lines) if line.get("entropy_floor")), None)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train)
        axes.plot(steps, losses, color=BLUE, alpha=0.35, linewidth=1, label="training")
    if val:
        steps, losses = zip(*val)
        axes.plot(steps, losses, color=ORANGE, marker="o", markersize=4, linewidth=1.8, label="validation")
        axes.annotate(
            f"{losses[-1]:.3f}", (steps[-1], losses[-1]), xytext=(0, 9), textcoords="offset points", ha="right",
            color=ORANGE, fontweight="bold",
        )  # fmt: skip
    if floor:
        axes.axhline(floor, color=GREY, linestyle="--", linewidth=1.2, label=f"entropy of the corpus, {floor:.3f}")
    lowest = min([loss for _, loss in train + val] + ([floor] if floor else []))
    highest = max([loss for _, loss in train + val], default=lowest + 1)
    if lowest > 0 and highest > 3 * lowest:
        axes.set_yscale("log")
        axes.set_ylim(lowest * 0.93, highest * 1.05)
        ticks = [t for t in (0.2, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 10, 12) if lowest * 0.93 <= t <= highest * 1.05]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
