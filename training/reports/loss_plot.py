"""The loss curve of a run."""

from pathlib import Path
from typing import Any

from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure, plain_text, save_figure


def plot_loss(lines: list[dict[str, Any]], path: Path, title: str) -> None:
    """Plot training and validation loss by step from the lines of metrics.jsonl, and the floor if
    known."""
    train = [(line["step"], line["train_loss"]) for line in lines if "train_loss" in line]
    val = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
    floor = next(
        (line["entropy_floor"] for line in reversed(lines) if line.get("entropy_floor")), None
    )
    figure, (axes,) = new_figure(
        8, 4.5, layout=None
    )  # faster than "constrained", which draws everything twice
    figure.subplots_adjust(left=0.09, bottom=0.11, right=0.97, top=0.92)
    if train:
        axes.plot(*zip(*train), color=BLUE, alpha=0.35, linewidth=1, label="training")
    for name in sorted(
        {key.partition("/")[2] for line in lines for key in line if key.startswith("val_loss/")}
    ):
        points = [
            (line["step"], line[f"val_loss/{name}"]) for line in lines if f"val_loss/{name}" in line
        ]
        axes.plot(
            *zip(*points), linewidth=1, linestyle=":", label=f"validation, {plain_text(name)}"
        )
    axes.plot(*zip(*val), color=ORANGE, marker="o", markersize=4, linewidth=1.8, label="validation")
    axes.annotate(
        f"{val[-1][1]:.3f}", val[-1], xytext=(0, 9), textcoords="offset points", ha="right",
        color=ORANGE, fontweight="bold",
    )  # fmt: skip
    if floor:
        axes.axhline(
            floor,
            color=GREY,
            linestyle="--",
            linewidth=1.2,
            label=f"entropy of the corpus ({floor:.3f})",
        )
    losses = [loss for _, loss in train + val]
    lowest, highest = min([*losses, floor or losses[0]]), max(losses)
    if lowest > 0 and highest > 3 * lowest:
        axes.set_yscale("log")
        axes.set_ylim(lowest * 0.93, highest * 1.05)
        ticks = [
            t
            for t in (0.2, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 10, 12)
            if lowest * 0.93 <= t <= highest * 1.05
        ]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=plain_text(title))
    axes.legend(frameon=False)
    path.unlink(missing_ok=True)  # so that a link of that name is not followed
    save_figure(figure, path)
