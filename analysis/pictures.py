"""Pictures of what was found inside: heatmaps whose cells are labelled as long as there is room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.reports import Panel
from errors import UserError
from training.picture import new_figure

ANNOTATED = 200  # cells at most that carry their number
LABELLED = 64  # rows or columns at most that carry their label


def draw(panels: list[Panel], path: Path, title: str) -> None:
    """Every panel below the other, as a PNG. Raises UserError where the file cannot be written."""
    heights = [max(1.6, min(8.0, 0.34 * len(panel.rows) + 1.2)) for panel in panels]
    widest = max(len(panel.columns) for panel in panels)
    figure, _ = new_figure(min(16.0, max(6.0, 0.42 * widest + 2.5)), sum(heights), len(panels), share=False)
    figure.clear()
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    for number, panel in enumerate(panels):
        _heatmap(figure, figure.add_subplot(grid[number]), panel)
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _heatmap(figure: Any, axes: Any, panel: Panel) -> None:
    values = panel.values
    top = panel.top or max(values.abs().max().item(), 1e-9)
    low, colors = (-top, "RdBu_r") if panel.signed else (min(0.0, values.min().item()), "Blues")
    image = axes.imshow(values, cmap=colors, vmin=low, vmax=top, aspect="auto", interpolation="nearest")
    upright = 90 if len(panel.columns) > 8 else 0
    for labels, place, turn in ((panel.columns, axes.set_xticks, upright), (panel.rows, axes.set_yticks, 0)):
        if len(labels) <= LABELLED:
            place(range(len(labels)), [text.replace("$", r"\$") for text in labels], rotation=turn, fontsize=8)
    if values.numel() <= ANNOTATED:
        for row in range(values.shape[0]):
            for column in range(values.shape[1]):
                value = values[row, column].item()
                if value == 0:  # what is not seen
                    continue
                color = "white" if abs(value) > 0.6 * top else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    axes.set_title(panel.title, fontsize=9)
    axes.grid(False)
    figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
