"""Plots of report panels: heatmaps, colored text, tables, lines."""

import math
import textwrap
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from thinker.interpretability.reports import Panel, decimal
from thinker.runtime.plot_style import GREY, new_figure, plain_text, save_figure

ANNOTATED = 200  # maximum number of cells with values
LABELLED = 64  # maximum number of row or column labels
LINE = 88  # characters per line of colored text


def plot_panels(
    panels: list[Panel], file: Path | BinaryIO, title: str, panels_per_row: int = 1
) -> None:
    """Plot panels as a PNG, `panels_per_row` side by side. Raises UserError if it cannot be written."""
    widths, tall = zip(*map(_size, panels))
    heights = [
        max(tall[start : start + panels_per_row]) for start in range(0, len(panels), panels_per_row)
    ]
    figure, _ = new_figure(max(6.0, min(16.0, max(widths) * panels_per_row)), sum(heights) + 0.4)
    figure.clear()
    grid = figure.add_gridspec(len(heights), panels_per_row, height_ratios=heights)
    plotters = {"heatmap": _heatmap, "table": _heatmap, "text": _text, "lines": _lines}
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(number, panels_per_row)])
        plotters[panel.style](figure, axes, panel)
        axes.set_title(plain_text(panel.title), fontsize=9)
    if title:
        figure.suptitle(plain_text(title), fontsize=10)
    save_figure(figure, file)


def _size(panel: Panel) -> tuple[float, float]:
    """Return width and height in inches."""
    if panel.style == "lines":
        return 9.0, 4.0
    if panel.style == "text":
        return 9.0, 0.6 + 0.3 * len(_wrapped(panel.columns))
    widest, column = 8.0, 0.42
    if panel.cells is not None:
        widest, column = 16.0, 0.25 + 0.075 * max(len(text) for row in panel.cells for text in row)
    tiles = panel.values.shape[0] > len(panel.rows)  # square attention maps side by side
    row = 4.4 / len(panel.columns) if tiles else 0.34
    width = min(widest, max(5.0, column * len(panel.columns) + 2.5))
    return width, max(1.6, min(9.0, row * len(panel.rows) + 1.4))


def _scale(panel: Panel) -> tuple[str, float, float]:
    """Return the palette and its lowest and highest value."""
    values = panel.values[~panel.values.isnan()]
    if not len(values):
        return "Blues", 0.0, 1.0
    top = panel.vmax or values.abs().max().item() or 1.0
    return ("RdBu_r", -top, top) if panel.signed else ("Blues", min(0.0, values.min().item()), top)


def _heatmap(figure: Any, axes: Any, panel: Panel) -> None:
    from matplotlib import colormaps

    (colors, low, top), values = _scale(panel), panel.values.detach().float().numpy()
    aspect = "equal" if len(panel.rows) < len(values) else "auto"  # maps side by side
    palette = colormaps[colors].with_extremes(bad="#e9e9ec")
    image = axes.imshow(
        values, cmap=palette, vmin=low, vmax=top, aspect=aspect, interpolation="nearest"
    )
    upright = 90 if len(panel.columns) > 8 or max(map(len, panel.columns), default=0) > 12 else 0
    for labels, size, set_ticks, rotation in (
        (panel.columns, values.shape[1], axes.set_xticks, upright),
        (panel.rows, values.shape[0], axes.set_yticks, 0),
    ):
        step, every = (
            size / len(labels),
            -(-len(labels) // LABELLED),
        )  # step 1 unless a label covers several cells
        ticks = [(i + 0.5) * step - 0.5 for i in range(0, len(labels), every)]
        short = [
            plain_text(label if len(label) <= 28 else label[:27] + "…") for label in labels[::every]
        ]
        set_ticks(ticks, short, rotation=rotation, fontsize=8)
    if panel.cells is not None or values.size <= ANNOTATED:
        for row, column in zip(*(~np.isnan(values)).nonzero()):
            value = values[row, column].item()
            text = (
                decimal(value, 2) if panel.cells is None else plain_text(panel.cells[row][column])
            )
            color = "white" if abs(value) > 0.6 * top else "black"
            axes.text(
                column, row, text, ha="center", va="center", fontsize=7, color=color, clip_on=True
            )
    if panel.highlighted_row is not None:
        frame = {"fill": False, "edgecolor": "#d9662b", "linewidth": 1.6, "clip_on": False}
        axes.axhspan(panel.highlighted_row - 0.5, panel.highlighted_row + 0.5, **frame)
    axes.set(xlabel=panel.axis_labels[0], ylabel=panel.axis_labels[1])
    axes.grid(False)
    figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01).ax.tick_params(labelsize=8)


def _wrapped(tokens: list[str]) -> list[list[int]]:
    """Wrap tokens: their indices per line."""
    lines, room = [[]], LINE
    for number, token in enumerate(tokens):
        if len(token) > room and lines[-1]:
            lines.append([])
            room = LINE
        lines[-1].append(number)
        room -= len(token)
    return lines


def _text(figure: Any, axes: Any, panel: Panel) -> None:
    """Plot tokens as monospaced text on the colors of their values."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    colors, low, top = _scale(panel)
    scale = ScalarMappable(Normalize(low, top), colors)
    lines, values = _wrapped(panel.columns), panel.values[0].tolist()
    axes.set(xlim=(0, LINE), ylim=(len(lines), 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    for row, line in enumerate(lines):
        x = 0
        for number in line:
            text, value = (
                textwrap.shorten(panel.columns[number], LINE, placeholder="…"),
                values[number],
            )
            box = {"facecolor": scale.to_rgba(value), "edgecolor": "white", "linewidth": 0.8}
            axes.add_patch(Rectangle((x, row + 0.05), len(text), 0.9, **box))
            color = "white" if abs(value) > 0.6 * top else "black"
            axes.text(x + len(text) / 2, row + 0.5, plain_text(text), ha="center", va="center", fontsize=9,
                      family="monospace", color=color)  # fmt: skip
            x += len(text)
    figure.colorbar(scale, ax=axes, fraction=0.03, pad=0.01).ax.tick_params(labelsize=8)


def _lines(figure: Any, axes: Any, panel: Panel) -> None:
    """Plot one line per column over numeric row labels; the highest lines have names."""
    palette = [
        f"C{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9)
    ]  # C7 is gray, as are unnamed lines
    x, values = [float(row) for row in panel.rows], panel.values
    highest_first = values.nan_to_num(-math.inf).amax(dim=0).argsort(descending=True).tolist()
    for rank, column in enumerate(highest_first):
        style = {"linewidth": 0.9, "color": GREY, "alpha": 0.5}
        if rank < 8:
            style = {
                "linewidth": 1.8,
                "label": f"head {panel.columns[column]}",
                "color": palette[column % 9],
            }
        axes.plot(x, values[:, column].tolist(), **style)
    axes.set(xlabel="step", ylim=(-0.02, panel.vmax and panel.vmax * 1.02))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, ncols=2)
