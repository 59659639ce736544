"""The loss curve of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure, plain_text, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


TICKS = (0.2, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 10, 12)  # nats per token, on a logarithmic axis


def plot_loss(lines: list[dict[str, Any]], path: Path, title: str) -> None:
    """Plot training and validation loss by step from the lines of metrics.jsonl, and the floor if
    known."""
    train = _points(lines, "train_loss")
    val = _points(lines, "val_loss")
    floors = [line["entropy_floor"] for line in lines if line.get("entropy_floor")]
    # Faster than the layout "constrained", which draws everything twice.
    figure, (axes,) = new_figure(8, 4.5, layout=None)
    figure.subplots_adjust(left=0.09, bottom=0.11, right=0.97, top=0.92)
    if train:
        axes.plot(*zip(*train), color=BLUE, alpha=0.35, linewidth=1, label="training")
    for name in _sources(lines):
        points = _points(lines, f"val_loss/{name}")
        label = f"validation, {plain_text(name)}"
        axes.plot(*zip(*points), linewidth=1, linestyle=":", label=label)
    axes.plot(*zip(*val), color=ORANGE, marker="o", markersize=4, linewidth=1.8, label="validation")
    last = val[-1]
    above = {"xytext": (0, 9), "textcoords": "offset points", "ha": "right"}
    axes.annotate(f"{last[1]:.3f}", last, color=ORANGE, fontweight="bold", **above)
    losses = [loss for _, loss in train + val]
    lowest = min(losses)
    if floors:
        floor = floors[-1]
        lowest = min(lowest, floor)
        label = f"entropy of the corpus ({floor:.3f})"
        axes.axhline(floor, color=GREY, linestyle="--", linewidth=1.2, label=label)
    if lowest > 0 and max(losses) > 3 * lowest:
        _use_log_scale(axes, lowest, max(losses))
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=plain_text(title))
    axes.legend(frameon=False)
    path.unlink(missing_ok=True)  # so that a link of that name is not followed
    save_figure(figure, path)


def _points(lines: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """The step and the value of each line that has a key."""
    return [(line["step"], line[key]) for line in lines if key in line]


def _sources(lines: list[dict[str, Any]]) -> list[str]:
    """The sources of a mixture, whose keys are val_loss/NAME."""
    names = set()
    for line in lines:
        for key in line:
            if key.startswith("val_loss/"):
                names.add(key.partition("/")[2])
    return sorted(names)


def _use_log_scale(axes: "Axes", lowest: float, highest: float) -> None:
    bottom = lowest * 0.93
    top = highest * 1.05
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    ticks = [tick for tick in TICKS if bottom <= tick <= top]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
