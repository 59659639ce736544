"""Pictures, all in one style; the loss curve of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLUE, ORANGE, GREY = "#2f6db3", "#d9662b", "#777777"


def new_figure(width: float, height: float, columns: int = 1, share: bool = True) -> tuple[Any, list[Any]]:
    """A matplotlib figure of so many inches, without a display, and its panels, which may share the vertical axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, columns, sharey=share, squeeze=False)[0])
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def plot_loss(lines: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw training and validation loss by step from the lines of metrics.jsonl, with the entropy floor where known."""
    train = [(line["step"], line["train_loss"]) for line in lines if "train_loss" in line]
    val = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
    floor = next((line["entropy_floor"] for line in reversed(lines) if line.get("entropy_floor")), None)
    figure, (axes,) = new_figure(8, 4.5)
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
    axes.legend(frameon=False)
    path.unlink(missing_ok=True)  # a link in its place is not followed
    figure.savefig(path)
