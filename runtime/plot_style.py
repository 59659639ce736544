"""Colors and figures of all plots."""

import os
import warnings
from pathlib import Path
from typing import IO, Any

from thinker.runtime.errors import UserError
from thinker.runtime.files import output_file

BLUE = "#2f6db3"
ORANGE = "#d9662b"
GREY = "#777777"


def new_figure(
    width: float,
    height: float,
    columns: int = 1,
    share: bool = True,
    layout: str | None = "constrained",
) -> tuple[Any, list[Any]]:
    """A figure of width x height inches and its panels, which `share` the y axis.

    Needs no display.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ValueError as error:
        raise UserError(f"matplotlib failed to start; check your matplotlibrc: {error}") from error
    if "THINKER_COMMAND" in os.environ:
        matplotlib.rcdefaults()  # equal plots on all machines; notebooks keep their style
    figure = Figure(figsize=(width, height), dpi=120, layout=layout)
    FigureCanvasAgg(figure)  # draws without a window
    grid = figure.subplots(1, columns, sharey=share, squeeze=False)
    panels = list(grid[0])
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def plain_text(text: str) -> str:
    """Escape a text for a plot: dollars do not start math, and invalid characters become ?."""
    return text.encode(errors="replace").decode().replace("$", r"\$")


def save_figure(figure: Any, file: Path | IO[bytes], **options: Any) -> None:
    """Write a figure as PNG. Characters that the font lacks become boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(file, format="png", **options)


def png_file(name: str | Path) -> Path:
    """Check a PNG file to write, as output_file() does; used as the `type` of a flag."""
    if Path(name).suffix.lower() not in (".png", ""):
        raise UserError(
            f"cannot write plot {name}: plots are PNG files; give a name that ends in .png"
        )
    return output_file(name)
