"""The colours and the figures of all plots."""

from __future__ import annotations

from typing import Any

BLUE, ORANGE, GREY = "#2f6db3", "#d9662b", "#777777"


def new_figure(
    width: float, height: float, columns: int = 1, share: bool = True, layout: str | None = "constrained"
) -> tuple[Any, list[Any]]:
    """A figure of width x height inches, and its panels, which `share` the vertical axis; no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout=layout)
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, columns, sharey=share, squeeze=False)[0])
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels
