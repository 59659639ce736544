"""Plots of attention patterns, as images or text."""

import math
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinker.model.patterns.pattern_parser import parse_pattern
from thinker.model.patterns.patterns import CAUSAL, Pattern, TokenInfo
from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure

GALLERY = (
    "full", "window(8)", "dilated(16, 2)", "window(6) | global(2)", "token(5)", "block(8, 2)",
    "strided(6) & window(20)", "longformer(4, 4, 2)", "bigbird(4, 2, 4, 2)", "prefix(8)", "topk(4)",
    "retrieve(4, 2)", "heads(window(4), dilated(16, 4), strided(5), full)", "linear(16)",
)  # fmt: skip
TOKEN_INTERVAL = 7  # in the example, every 7th token is in token()
# Cell values; indices into MEANINGS, MARKS and COLORS.
FUTURE, MASKED, FUTURE_VISIBLE, VISIBLE, SUMMED = range(5)
MEANINGS = (
    "",
    "masked",
    "attended to, after the query",
    "attended to",
    "attended to (sums over features)",
)
MARKS = "  ", "· ", "▓▓", "██", "░░"
COLORS = "#ffffff", "#e9edf2", ORANGE, BLUE, "#a9c6e8"


@dataclass
class PatternPlot:
    """Cells (H, T, T) of a pattern, one row per query, with a title and notes."""

    title: str
    note: str  # about the example tokens and scores
    cells: Tensor
    facts: list[str]


def example_mask(pattern: Pattern, length: int, n_heads: int) -> Tensor:
    """Return which keys a query attends to, (H, T, T), for example tokens and random scores."""
    position, head = torch.arange(length), torch.arange(n_heads)[:, None, None]
    ids = torch.tensor(pattern.tokens or [-1])
    is_named = position % TOKEN_INTERVAL == TOKEN_INTERVAL // 2
    token = torch.where(is_named, ids[position // TOKEN_INTERVAL % len(ids)], -1)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, n_heads, length, length, generator=generator)
    q, k = torch.randn(2, 1, n_heads, length, 8, generator=generator)
    query = TokenInfo(position[:, None], None, token[:, None], scores, q)
    return pattern(head, query, TokenInfo(position, token_id=token, vectors=k)).expand(
        1, n_heads, length, length
    )[0]


def describe_cache(pattern: Pattern) -> str:
    """Describe the keys and values that a KV cache keeps (model/kv_cache.py)."""
    if pattern.n_features:
        return f"{pattern.n_features} sums"
    if not pattern.fits_ring_buffer:
        return "all"
    ring = f"the newest {max(1, pattern.max_distance)}"
    return f"the first {pattern.n_global} and {ring}" if pattern.n_global else ring


def make_pattern_plot(text: str, length: int, n_heads: int | None = None) -> PatternPlot:
    """Evaluate a pattern. Raises UserError if it cannot be parsed."""
    pattern = parse_pattern(text)
    if not pattern.by_head:
        n_heads = 1
    elif n_heads is None:
        n_heads = min(pattern.min_heads, 16) if pattern.min_heads > 1 else 4
    notes = {
        f"every {TOKEN_INTERVAL}th token matches": pattern.tokens,
        "example with random scores": pattern.by_content,
        "sums over features": pattern.n_features > 0,
    }
    mask, shown = example_mask(pattern, length, n_heads), SUMMED if pattern.n_features else VISIBLE
    cells = MASKED * example_mask(CAUSAL, length, n_heads) + (shown - MASKED) * mask
    n_keys, n_keys_longer = (
        x.sum(-1).float().mean() for x in (mask, example_mask(pattern, 4 * length, n_heads))
    )
    keys = f"{n_keys:.1f} keys per query, {n_keys_longer:.1f} at length {4 * length}"
    note = ", ".join(note for note, applies in notes.items() if applies)
    return PatternPlot(
        " ".join(text.split()), note, cells, [keys, f"cache: {describe_cache(pattern)}"]
    )


def to_text(plot: PatternPlot) -> str:
    """Format a plot as text, with two characters per cell so that cells are square."""
    lines = [plot.title + (f" ({plot.note})" if plot.note else "")]
    for head, rows in enumerate(plot.cells.tolist()):
        if len(plot.cells) > 1:
            lines.append(f"head {head}")
        lines += ["".join(MARKS[cell] for cell in row).rstrip() for row in rows]
    return "\n".join([*lines, "; ".join(plot.facts), ""])


def _used_cells(plots: list[PatternPlot]) -> list[int]:
    """List the kinds of cells for the legend."""
    return [
        kind
        for kind in (VISIBLE, FUTURE_VISIBLE, SUMMED, MASKED)
        if any((x.cells == kind).any() for x in plots)
    ]


def text_legend(plots: list[PatternPlot]) -> str:
    """Format the legend of to_text() as one line."""
    meanings = [f"{MARKS[cell].strip()} {MEANINGS[cell]}" for cell in _used_cells(plots)]
    return f"rows: queries, columns: keys; {', '.join(meanings)}\n"


def plot_patterns(plots: list[PatternPlot]) -> tuple[Any, list[Any]]:
    """Plot a square per pattern and a legend. Returns the figure and its axes."""
    columns = min(5, len(plots) + 1)
    rows, side = -(-(len(plots) + 1) // columns), 2.4 if columns == 5 else 3
    figure, (default_axes,) = new_figure(side * columns, (side + 0.7) * rows)
    from matplotlib.patches import Patch

    default_axes.remove()
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    panels = list(
        figure.subplots(rows, columns, squeeze=False, subplot_kw={"aspect": "equal"}).flat
    )
    for axes, plot in zip(panels, plots):
        plot_pattern(axes, plot)
    for axes in panels[len(plots) :]:
        axes.axis("off")
    cells = _used_cells(plots)
    panels[len(plots)].legend(
        [Patch(color=COLORS[cell]) for cell in cells], [textwrap.fill(MEANINGS[cell], 24) for cell in cells],
        loc="upper left", frameon=False, fontsize=8, title="rows: queries\ncolumns: keys", title_fontsize=8,
        alignment="left", borderaxespad=0, borderpad=0, handlelength=1, handleheight=1,
    )  # fmt: skip
    return figure, panels


def plot_pattern(axes: Any, plot: PatternPlot) -> None:
    """Plot one pattern, with cells of unit size from the upper left corner."""
    from matplotlib.colors import ListedColormap

    heads, length, _ = plot.cells.shape
    columns = math.ceil(math.sqrt(heads))
    step = length + (length + 8) // 16  # from one head to the next
    for head, cells in enumerate(plot.cells.numpy()):
        x, y = head % columns * step, head // columns * step
        axes.pcolormesh(
            range(x, x + length + 1), range(y, y + length + 1), cells, cmap=ListedColormap(COLORS), vmin=0,
            vmax=len(COLORS) - 1, antialiased=False, edgecolors="white" if columns * length <= 48 else "none",
            linewidth=0.4,
        )  # fmt: skip
        label = [f"head {head}"] if heads > 1 else []
        if head == 0:
            label += textwrap.wrap(plot.note, 16)
        axes.text(x + length, y, "\n".join(label), size=7.5, color=GREY, ha="right", va="top")
    width, height = ((n - 1) * step + length for n in (columns, -(-heads // columns)))
    axes.set(aspect="equal", xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    title = "\n".join(textwrap.wrap(plot.title, 34, max_lines=4, placeholder=" ..."))
    axes.set_title(title, loc="left", size=8.5, family="monospace", weight="bold", parse_math=False)
    axes.set_xlabel("\n".join(plot.facts), loc="left", size=8, color="#444444")
