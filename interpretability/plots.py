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
N_NAMED = 8  # lines with a name in a plot
LINE_COLORS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")  # C7 is gray


def plot_panels(
    panels: list[Panel], file: Path | BinaryIO, title: str, panels_per_row: int = 1
) -> None:
    """Plot panels as a PNG, `panels_per_row` side by side.

    Raises UserError if it cannot be written.
    """
    sizes = [_size(panel) for panel in panels]
    widest = max(width for width, _ in sizes)
    heights = []  # of each row: of its tallest panel
    for start in range(0, len(panels), panels_per_row):
        in_row = sizes[start : start + panels_per_row]
        heights.append(max(height for _, height in in_row))
    width = max(6.0, min(16.0, widest * panels_per_row))
    figure, _ = new_figure(width, sum(heights) + 0.4)
    figure.clear()  # of the axes, which the grid replaces
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
    widest = 8.0
    column = 0.42
    if panel.cells is not None:
        longest = max(len(text) for row in panel.cells for text in row)
        widest = 16.0
        column = 0.25 + 0.075 * longest
    row = 0.34
    if panel.values.shape[0] > len(panel.rows):  # square attention maps side by side
        row = 4.4 / len(panel.columns)
    width = min(widest, max(5.0, column * len(panel.columns) + 2.5))
    height = max(1.6, min(9.0, row * len(panel.rows) + 1.4))
    return width, height


def _scale(panel: Panel) -> tuple[str, float, float]:
    """Return the palette and its lowest and highest value."""
    values = panel.values[~panel.values.isnan()]
    if not len(values):
        return "Blues", 0.0, 1.0
    top = panel.vmax
    if not top:
        top = values.abs().max().item()
    if top == 0:  # all values are; a scale needs a length
        top = 1.0
    if panel.signed:
        return "RdBu_r", -top, top
    return "Blues", min(0.0, values.min().item()), top


def _heatmap(figure: Any, axes: Any, panel: Panel) -> None:
    from matplotlib import colormaps

    colors, low, top = _scale(panel)
    values = panel.values.detach().float().numpy()
    aspect = "equal" if len(panel.rows) < len(values) else "auto"  # maps side by side
    palette = colormaps[colors].with_extremes(bad="#e9e9ec")
    image = axes.imshow(
        values, cmap=palette, vmin=low, vmax=top, aspect=aspect, interpolation="nearest"
    )
    longest = max(map(len, panel.columns), default=0)
    are_upright = len(panel.columns) > 8 or longest > 12  # otherwise they would overlap
    ticks, labels = _ticks(panel.columns, values.shape[1])
    rotation = 90 if are_upright else 0
    axes.set_xticks(ticks, labels, rotation=rotation, fontsize=8)
    ticks, labels = _ticks(panel.rows, values.shape[0])
    axes.set_yticks(ticks, labels, rotation=0, fontsize=8)
    if panel.cells is not None or values.size <= ANNOTATED:
        _annotate(axes, panel, values, top)
    if panel.highlighted_row is not None:
        frame = {"fill": False, "edgecolor": "#d9662b", "linewidth": 1.6, "clip_on": False}
        axes.axhspan(panel.highlighted_row - 0.5, panel.highlighted_row + 0.5, **frame)
    axes.set(xlabel=panel.axis_labels[0], ylabel=panel.axis_labels[1])
    axes.grid(False)
    figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01).ax.tick_params(labelsize=8)


def _ticks(labels: list[str], size: int) -> tuple[list[float], list[str]]:
    """Places and texts of the labels of a side with `size` cells."""
    step = size / len(labels)  # 1 unless a label covers several cells
    every = math.ceil(len(labels) / LABELLED)
    places = []
    texts = []
    for number in range(0, len(labels), every):
        label = labels[number]
        if len(label) > 28:
            label = label[:27] + "…"
        places.append((number + 0.5) * step - 0.5)
        texts.append(plain_text(label))
    return places, texts


def _annotate(axes: Any, panel: Panel, values: np.ndarray, top: float) -> None:
    """Write the text or the value of each cell that is not empty."""
    for row, column in zip(*(~np.isnan(values)).nonzero()):
        value = values[row, column].item()
        if panel.cells is None:
            text = decimal(value, 2)
        else:
            text = plain_text(panel.cells[row][column])
        color = _text_color(value, top)
        axes.text(
            column, row, text, ha="center", va="center", fontsize=7, color=color, clip_on=True
        )


def _text_color(value: float, top: float) -> str:
    """The color of text on the color of a value."""
    # Both palettes are dark at their ends.
    return "white" if abs(value) > 0.6 * top else "black"


def _wrapped(tokens: list[str]) -> list[list[int]]:
    """Wrap tokens: their indices per line."""
    lines = [[]]
    room = LINE
    for number, token in enumerate(tokens):
        if len(token) > room and lines[-1]:  # a token longer than a line has its own
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
    # A plot of patches has no scale of its own, which the color bar needs.
    scale = ScalarMappable(Normalize(low, top), colors)
    lines = _wrapped(panel.columns)
    values = panel.values[0].tolist()
    # Units are characters and lines.
    axes.set(xlim=(0, LINE), ylim=(len(lines), 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    for row, line in enumerate(lines):
        x = 0
        for number in line:
            text = textwrap.shorten(panel.columns[number], LINE, placeholder="…")
            value = values[number]
            box = {"facecolor": scale.to_rgba(value), "edgecolor": "white", "linewidth": 0.8}
            axes.add_patch(Rectangle((x, row + 0.05), len(text), 0.9, **box))
            axes.text(
                x + len(text) / 2,
                row + 0.5,
                plain_text(text),
                ha="center",
                va="center",
                fontsize=9,
                family="monospace",
                color=_text_color(value, top),
            )
            x += len(text)
    figure.colorbar(scale, ax=axes, fraction=0.03, pad=0.01).ax.tick_params(labelsize=8)


def _lines(figure: Any, axes: Any, panel: Panel) -> None:
    """Plot one line per column over numeric row labels; the highest lines have names."""
    x = [float(row) for row in panel.rows]
    values = panel.values
    highest = values.nan_to_num(-math.inf).amax(dim=0)  # of each column
    highest_first = highest.argsort(descending=True).tolist()
    for rank, column in enumerate(highest_first):
        style = {"linewidth": 0.9, "color": GREY, "alpha": 0.5}
        if rank < N_NAMED:
            # By column, so that a head has the same color in all panels.
            style = {
                "linewidth": 1.8,
                "label": f"head {panel.columns[column]}",
                "color": LINE_COLORS[column % len(LINE_COLORS)],
            }
        axes.plot(x, values[:, column].tolist(), **style)
    highest_shown = panel.vmax
    if panel.vmax is not None:
        highest_shown = panel.vmax * 1.02
    axes.set(xlabel="step", ylim=(-0.02, highest_shown))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, ncols=2)
