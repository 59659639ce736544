"""Plots of attention patterns, as images or text."""

import math
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinker.model.patterns.pattern import CAUSAL, Pattern, TokenInfo
from thinker.model.patterns.pattern_parser import parse_pattern
from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure

GALLERY = (
    "full",
    "window(8)",
    "dilated(16, 2)",
    "window(6) | global(2)",
    "token(5)",
    "block(8, 2)",
    "strided(6) & window(20)",
    "longformer(4, 4, 2)",
    "bigbird(4, 2, 4, 2)",
    "prefix(8)",
    "topk(4)",
    "retrieve(4, 2)",
    "heads(window(4), dilated(16, 4), strided(5), full)",
    "linear(16)",
)
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
    position = torch.arange(length)
    head = torch.arange(n_heads)[:, None, None]
    # Tokens that the pattern names, far apart, among others.
    ids = torch.tensor(pattern.tokens or [-1])
    is_named = position % TOKEN_INTERVAL == TOKEN_INTERVAL // 2
    token = torch.where(is_named, ids[position // TOKEN_INTERVAL % len(ids)], -1)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, n_heads, length, length, generator=generator)
    q, k = torch.randn(2, 1, n_heads, length, 8, generator=generator)
    query = TokenInfo(position[:, None], None, token[:, None], scores, q)
    key = TokenInfo(position, token_id=token, vectors=k)
    mask = pattern(head, query, key)
    return mask.expand(1, n_heads, length, length)[0]


def describe_cache(pattern: Pattern) -> str:
    """Describe the keys and values that a KV cache keeps (model/kv_cache.py)."""
    if pattern.n_features:
        return f"{pattern.n_features} sums"
    if not pattern.fits_ring_buffer:
        return "all"
    ring = f"the newest {max(1, pattern.max_distance)}"
    if pattern.n_global:
        return f"the first {pattern.n_global} and {ring}"
    return ring


def make_pattern_plot(text: str, length: int, n_heads: int | None = None) -> PatternPlot:
    """Evaluate a pattern. Raises UserError if it cannot be parsed."""
    pattern = parse_pattern(text)
    n_heads = _n_heads_shown(pattern, n_heads)
    mask = example_mask(pattern, length, n_heads)
    # The order of the kinds of cells makes a sum of them: FUTURE is 0, and a cell that is attended
    # to is `shown - MASKED` more than one that is not, before the query (MASKED) and after it.
    shown = SUMMED if pattern.n_features else VISIBLE
    cells = MASKED * example_mask(CAUSAL, length, n_heads) + (shown - MASKED) * mask
    longer = 4 * length
    n_keys = _mean_keys(mask)
    n_keys_longer = _mean_keys(example_mask(pattern, longer, n_heads))
    facts = [
        f"{n_keys:.1f} keys per query, {n_keys_longer:.1f} at length {longer}",
        f"cache: {describe_cache(pattern)}",
    ]
    return PatternPlot(" ".join(text.split()), _note(pattern), cells, facts)


def _n_heads_shown(pattern: Pattern, n_heads: int | None) -> int:
    """One head if all have the same mask, or else as many as asked for or as tell them apart."""
    if not pattern.by_head:
        return 1
    if n_heads is not None:
        return n_heads
    if pattern.min_heads > 1:
        return min(pattern.min_heads, 16)
    return 4


def _note(pattern: Pattern) -> str:
    """What a reader has to know about the example tokens and scores."""
    notes = []
    if pattern.tokens:
        notes.append(f"every {TOKEN_INTERVAL}th token matches")
    if pattern.by_content:
        notes.append("example with random scores")
    if pattern.n_features > 0:
        notes.append("sums over features")
    return ", ".join(notes)


def _mean_keys(mask: Tensor) -> Tensor:
    """The mean number of keys that a query attends to."""
    return mask.sum(-1).float().mean()


def to_text(plot: PatternPlot) -> str:
    """Format a plot as text, with two characters per cell so that cells are square."""
    title = plot.title
    if plot.note:
        title += f" ({plot.note})"
    lines = [title]
    for head, rows in enumerate(plot.cells.tolist()):
        if len(plot.cells) > 1:
            lines.append(f"head {head}")
        for row in rows:
            line = "".join(MARKS[cell] for cell in row)
            lines.append(line.rstrip())
    lines.append("; ".join(plot.facts))
    return "\n".join(lines) + "\n"


def _used_cells(plots: list[PatternPlot]) -> list[int]:
    """List the kinds of cells for the legend."""
    used = []
    for kind in (VISIBLE, FUTURE_VISIBLE, SUMMED, MASKED):
        if any((plot.cells == kind).any() for plot in plots):
            used.append(kind)
    return used


def text_legend(plots: list[PatternPlot]) -> str:
    """Format the legend of to_text() as one line."""
    meanings = [f"{MARKS[cell].strip()} {MEANINGS[cell]}" for cell in _used_cells(plots)]
    return f"rows: queries, columns: keys; {', '.join(meanings)}\n"


def plot_patterns(plots: list[PatternPlot]) -> tuple[Any, list[Any]]:
    """Plot a square per pattern and a legend. Returns the figure and its axes."""
    n_panels = len(plots) + 1  # and the legend
    columns = min(5, n_panels)
    rows = math.ceil(n_panels / columns)
    side = 2.4 if columns == 5 else 3
    figure, (default_axes,) = new_figure(side * columns, (side + 0.7) * rows)
    # Here, because new_figure() says how to install matplotlib if it is missing.
    from matplotlib.patches import Patch

    default_axes.remove()
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    grid = figure.subplots(rows, columns, squeeze=False, subplot_kw={"aspect": "equal"})
    panels = list(grid.flat)
    for axes, plot in zip(panels, plots):
        plot_pattern(axes, plot)
    for axes in panels[len(plots) :]:
        axes.axis("off")
    patches = []
    meanings = []
    for cell in _used_cells(plots):
        patches.append(Patch(color=COLORS[cell]))
        meanings.append(textwrap.fill(MEANINGS[cell], 24))
    panels[len(plots)].legend(
        patches,
        meanings,
        loc="upper left",
        frameon=False,
        fontsize=8,
        title="rows: queries\ncolumns: keys",
        title_fontsize=8,
        alignment="left",
        borderaxespad=0,
        borderpad=0,
        handlelength=1,
        handleheight=1,
    )
    return figure, panels


def plot_pattern(axes: Any, plot: PatternPlot) -> None:
    """Plot one pattern, with cells of unit size from the upper left corner."""
    from matplotlib.colors import ListedColormap

    heads, length, _ = plot.cells.shape
    columns = math.ceil(math.sqrt(heads))
    rows = math.ceil(heads / columns)
    step = length + (length + 8) // 16  # from one head to the next
    # Lines between cells would hide cells that are small.
    edges = "white" if columns * length <= 48 else "none"
    for head, cells in enumerate(plot.cells.numpy()):
        row, column = divmod(head, columns)
        x = column * step
        y = row * step
        axes.pcolormesh(
            range(x, x + length + 1),
            range(y, y + length + 1),
            cells,
            cmap=ListedColormap(COLORS),
            vmin=0,
            vmax=len(COLORS) - 1,
            antialiased=False,
            edgecolors=edges,
            linewidth=0.4,
        )
        # Above the diagonal of a causal pattern, where there is room.
        label = []
        if heads > 1:
            label.append(f"head {head}")
        if head == 0:
            label += textwrap.wrap(plot.note, 16)
        axes.text(x + length, y, "\n".join(label), size=7.5, color=GREY, ha="right", va="top")
    width = (columns - 1) * step + length
    height = (rows - 1) * step + length
    axes.set(aspect="equal", xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    title = "\n".join(textwrap.wrap(plot.title, 34, max_lines=4, placeholder=" ..."))
    axes.set_title(title, loc="left", size=8.5, family="monospace", weight="bold", parse_math=False)
    axes.set_xlabel("\n".join(plot.facts), loc="left", size=8, color="#444444")
