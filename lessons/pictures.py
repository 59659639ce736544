"""Tables and pictures of the lessons: in a notebook they are drawn, in a script they are
printed."""

import html
import io
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BLUE = "37, 99, 195"
STYLE = """<style>
.heat { border-collapse: separate; border-spacing: 3px; font: 13px/1.3 system-ui, sans-serif; display: inline-table;
        margin: 4px 22px 10px 0; vertical-align: top; }
.heat caption { font-weight: 600; padding: 2px 0 6px; text-align: left; }
.heat th { font-weight: 500; padding: 2px 8px; text-align: right; }
.heat thead th { text-align: center; }
.heat thead td { border: 0; }
.heat tbody td { min-width: 46px; padding: 6px 6px; text-align: center; border-radius: 5px;
                 font-variant-numeric: tabular-nums; border: 1px solid rgba(128, 128, 128, .25); }
.heat tbody:hover tr:not(:hover), .heat tbody:focus-within tr:not(:focus-within) { opacity: .3; }
.heat tbody tr:hover th, .heat tbody tr:focus th { text-decoration: underline; }
.heat .dark { color: #fff; }
.heat .hidden { border-style: dashed; opacity: .55; }
</style>"""


class Heatmap:
    """A matrix with labels: rows are queries, columns are keys. Pointing at a row of a page fades
    the others.

    Args:
        values: (rows, columns); -inf is shown as hidden.
        digits: decimals of each cell.
        shade: what a fully colored cell stands for (default: the largest finite magnitude).
    """

    def __init__(
        self, title: str, values: Tensor | Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str],
        digits: int = 2, shade: float | None = None,
    ) -> None:  # fmt: skip
        self.title, self.rows, self.columns, self.digits = title, list(rows), list(columns), digits
        self.values = torch.as_tensor(values, dtype=torch.float64)
        finite = self.values[self.values.isfinite()].abs()
        self.shade = shade or max(float(finite.max()) if len(finite) else 1.0, 1e-9)

    def text(self, value: float) -> str:
        """A cell in plain text."""
        return "hidden" if value == -torch.inf else f"{value:.{self.digits}f}"

    def __repr__(self) -> str:
        cells = [["", *self.columns]]
        cells += [
            [row, *map(self.text, line)] for row, line in zip(self.rows, self.values.tolist())
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells
        ]
        return "\n".join([self.title, *lines, ""])

    def _repr_html_(self) -> str:
        return STYLE + self.table()

    def table(self) -> str:
        """The table in HTML, without its style."""
        head = "".join(f"<th scope='col'>{html.escape(column)}</th>" for column in self.columns)
        body = ""
        for row, line in zip(self.rows, self.values.tolist()):
            cells = "".join(self.cell(value) for value in line)
            body += f"<tr tabindex='0'><th scope='row'>{html.escape(row)}</th>{cells}</tr>"
        caption = f"<caption>{html.escape(self.title)}</caption>"
        return f"<table class='heat'>{caption}<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table>"

    def cell(self, value: float) -> str:
        """A cell in HTML, in a darker color for a larger magnitude."""
        if value == -torch.inf:
            return "<td class='hidden'>hidden</td>"
        share = min(1.0, abs(value) / self.shade)
        css = " class='dark'" if share > 0.62 else ""
        return f"<td{css} style='background: rgba({BLUE}, {share:.2f})'>{self.text(value)}</td>"


class SideBySide:
    """Several heatmaps in a row."""

    def __init__(self, *heatmaps: Heatmap) -> None:
        self.heatmaps = heatmaps

    def __repr__(self) -> str:
        return "\n".join(map(str, self.heatmaps))

    def _repr_html_(self) -> str:
        return STYLE + "".join(heatmap.table() for heatmap in self.heatmaps)


def model_diagram() -> Any:
    """A figure of the way of a text through a language model, from token ids to probabilities."""
    from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure

    figure, (axes,) = new_figure(7.6, 1.9)
    axes.set(xlim=(0, 100), ylim=(2, 27))
    axes.axis("off")
    parts = [("token\nids", 6, GREY), ("embedding", 21, BLUE), ("+ attention", 39, ORANGE), ("+ MLP", 54, ORANGE),
             ("last\nmatrix", 70, BLUE), ("softmax", 83, GREY)]  # fmt: skip
    for name, x, color in parts:
        box = {"boxstyle": "round,pad=0.5", "facecolor": color, "edgecolor": "none"}
        axes.text(x, 15, name, ha="center", va="center", color="white", fontsize=10, bbox=box)
    for left, right in ((9.5, 14.5), (27.5, 32), (46, 50), (58.5, 65.5), (74.5, 78), (88, 92)):
        axes.annotate("", (right, 15), (left, 15), arrowprops={"arrowstyle": "->", "color": GREY})
    axes.plot([31, 31, 60, 60, 31], [10.5, 21, 21, 10.5, 10.5], color=GREY, lw=1, ls="--")
    axes.text(45.5, 22.5, "layer, repeated", ha="center", color=GREY, fontsize=9)
    notes = [
        ("a vector\nper token", 29),
        ("the vectors,\nchanged", 62),
        ("logits", 76.5),
        ("probabilities\nof the next token", 95),
    ]
    for note, x in notes:
        axes.text(x, 9, note, ha="center", va="top", color=GREY, fontsize=8.5)
    return figure


def show(picture: Any, alt: str = "") -> None:
    """Show a heatmap or a matplotlib figure in a notebook; in a script, print heatmaps and skip
    figures.

    alt: what a figure shows, for readers who cannot see it.
    """
    is_figure = hasattr(picture, "savefig")
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        from IPython.display import HTML, display

        display(HTML(figure_html(picture, alt)) if is_figure else picture)
    elif not is_figure:
        print(picture)


def figure_html(figure: Any, alt: str) -> str:
    """A matplotlib figure as an image with a description, on white paper; dark pages invert it."""
    import base64

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    data = base64.b64encode(buffer.getvalue()).decode()
    style = "max-width: 100%; background: #fff; border-radius: 8px"
    return f"<img alt='{html.escape(alt, quote=True)}' style='{style}' src='data:image/png;base64,{data}'>"
