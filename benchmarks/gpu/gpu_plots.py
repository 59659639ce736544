"""Plots of the GPU results."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure

Rows = list[dict[str, Any]]


def select(rows: Rows, stage: str, key: str) -> Rows:
    """The results of a stage that have a key."""
    return [row for row in rows if row["stage"] == stage and row.get(key) is not None]


def plot_rates(stages: tuple[str, ...], rows: Rows, path: Path) -> None:
    """Tokens per second: one panel of horizontal bars per stage, ours in blue."""
    key = "tokens_per_second"
    selected = [select(rows, stage, key) for stage in stages]
    figure, panels = new_figure(
        15, 1 + 0.35 * max(map(len, selected)), columns=len(stages), share=False
    )
    for axes, stage, panel_rows in zip(panels, stages, selected):
        scale, room = ("log", 30) if stage.startswith("decoding") else ("linear", 1.8)
        axes.set(xscale=scale, xticks=[], xlabel=f"tokens/s ({scale} scale)", title=stage)
        if not panel_rows:
            continue
        panel_rows.sort(key=lambda row: row[key])
        names = [row["name"] for row in panel_rows]
        values = [row[key] for row in panel_rows]
        colors = [GREY if name.startswith(("transformers", "plain")) else BLUE for name in names]
        bars = axes.barh(names, values, color=colors)
        labels = []
        for value, row in zip(values, panel_rows):
            label = f"{value:,.0f}"
            if "mfu" in row:
                label += f", MFU {row['mfu']:.2f}"
            labels.append(label)
        axes.bar_label(bars, labels=labels, padding=4)
        axes.set_xlim(right=room * max(values))
    figure.savefig(path)


def plot_profile(rows: Rows, path: Path) -> None:
    """Milliseconds per step of each group of kernels, and of waiting."""
    row = select(rows, "profile", "seconds")[0]
    parts = row["seconds"] | {"idle": row["idle_share"] * row["step_s"]}
    figure, (axes,) = new_figure(8, 3)
    colors = [ORANGE if name == "idle" else BLUE for name in parts]
    bars = axes.barh([*parts], [1000 * seconds for seconds in parts.values()], color=colors)
    axes.bar_label(bars, fmt="%.1f", padding=4)
    axes.set(
        xlabel="ms per step",
        title=f"{row['launches']:.0f} kernels in {1000 * row['step_s']:.1f} ms",
    )
    axes.invert_yaxis()
    figure.savefig(path)


def plot_attention(rows: Rows, path: Path) -> None:
    """Forward and backward milliseconds by length."""
    figure, (axes,) = new_figure(9, 6)
    lengths: list[int] = []
    for row in select(rows, "attention", "median_s"):
        points = [(int(name.split()[1]), 1000 * seconds) for name, seconds in row["median_s"].items()
                  if name.startswith("train")]  # fmt: skip
        axes.plot(*zip(*points), marker="o", markersize=3, label=row["name"])
        lengths = sorted({*lengths, *(length for length, _ in points)})
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="T, tokens",
        ylabel="ms forward and backward, 16 heads of 64",
    )
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def plot_losses(rows: Rows, path: Path) -> None:
    """Losses in both precisions, and those of the real training by minute."""
    figure, panels = new_figure(12, 4, columns=2, share=False)
    for row, color in zip(select(rows, "precisions", "losses"), (BLUE, ORANGE)):
        panels[0].plot(row["losses"], color=color, label=row["name"], linewidth=1)
    for row in select(rows, "real training", "lines"):
        for key, color in (("train_loss", GREY), ("val_loss", BLUE)):
            points = [(line["elapsed_s"] / 60, line[key]) for line in row["lines"] if key in line]
            if points:
                panels[1].plot(
                    *zip(*points),
                    color=color,
                    label=key.replace("_", " "),
                    marker=".",
                    markersize=4,
                )
    panels[0].set(xlabel="step", ylabel="loss (nats per token)", title="the same training")
    panels[1].set(xlabel="minutes", title="real training")
    for axes in panels:
        if axes.lines:
            axes.legend(frameon=False)
    figure.savefig(path)


DECODING = partial(plot_rates, ("decoding, 124m", "decoding, 1.1b"))
PLOTS: dict[str, dict[str, Callable[[Rows, Path], None]]] = {  # by part and file name
    "first": {"decoding.png": DECODING, "profile.png": plot_profile},
    "A": {
        "training.png": partial(plot_rates, ("training, 124m", "training, 350m")),
        "profile.png": plot_profile,
        "losses.png": plot_losses,
    },
    "B": {"decoding.png": DECODING, "attention.png": plot_attention},
}
