"""The colours and the figures of all plots."""

import os
import warnings
from pathlib import Path
from typing import IO, Any

from thinker.runtime.errors import UserError

BLUE, ORANGE, GREY = "#2f6db3", "#d9662b", "#777777"


def new_figure(
    width: float, height: float, columns: int = 1, share: bool = True, layout: str | None = "constrained"
) -> tuple[Any, list[Any]]:
    """A figure of width x height inches, and its panels, which `share` the vertical axis; no display is needed."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ValueError as error:
        raise UserError(f"matplotlib cannot start, perhaps because of your matplotlibrc: {error}") from error
    if "THINKER_COMMAND" in os.environ:  # a command's plots are the same on every machine; a notebook has its own style
        matplotlib.rcdefaults()
    figure = Figure(figsize=(width, height), dpi=120, layout=layout)
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, columns, sharey=share, squeeze=False)[0])
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def plain_text(text: str) -> str:
    """A text from outside for a plot: its dollars are no mathematics, and what is no character becomes a ?."""
    return text.encode(errors="replace").decode().replace("$", r"\$")


def save_figure(figure: Any, file: Path | IO[bytes], **options: Any) -> None:
    """Write a figure as PNG; a box stands for a character that the font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(file, format="png", **options)
