"""Pictures of patterns: who may look at whom, in colors or in characters."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinker.model.pattern_parser import parse_pattern
from thinker.model.patterns import CAUSAL, LinearAttentionSpec, Pattern, TokenInfo
from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure

GALLERY = (
    "full", "window(8)", "dilated(16, 2)", "window(6) | global(2)", "token(5)", "block(8, 2)", "strided(6)",
    "strided(6) & window(20)", "longformer(4, 4, 2)", "bigbird(4, 2, 4, 2)", "prefix(8)", "topk(4)",
    "heads(window(4), dilated(16, 4), strided(5), full)", "linear(16)",
)  # fmt: skip
EVERY = 7  # one token of so many is what token() asks for
# What a cell holds: nothing (later than its query), and an index into these.
MEANINGS = "", "earlier, not seen", "later, and seen", "seen", "seen in a sum over features"
MARKS = "  ", "· ", "▓▓", "██", "░░"
COLORS = "#ffffff", "#e9edf2", ORANGE, BLUE, "#a9c6e8"


@dataclass
class Picture:
    """One pattern: its cells (H, T, T), a row for each query."""

    title: str
    note: str  # what is only an example
    cells: Tensor
    facts: list[str]


def sees(pattern: Pattern, length: int, n_heads: int) -> Tensor:
    """True where a query sees a key, (H, T, T), with tokens and scores of ours for patterns that ask for them."""
    at, head = torch.arange(length), torch.arange(n_heads)[:, None, None]
    ids = pattern.tokens or (-1,)
    token = torch.tensor([ids[t // EVERY % len(ids)] if t % EVERY == EVERY // 2 else -1 for t in range(length)])
    scores = torch.randn(1, n_heads, length, length, generator=torch.Generator().manual_seed(0))
    seen = pattern(head, TokenInfo(at[:, None], token_id=token[:, None], scores=scores), TokenInfo(at, token_id=token))
    return seen.expand(1, n_heads, length, length)[0]


def kept(pattern: Pattern | LinearAttentionSpec) -> str:
    """What a cache keeps of all keys and values (model/cache.py)."""
    if isinstance(pattern, LinearAttentionSpec):
        return f"a state of {pattern.n_features} sums"
    if not pattern.fits_ring_buffer:
        return "all"
    return (
        f"the first {pattern.n_global} and a " if pattern.n_global else "a "
    ) + f"ring of {max(1, pattern.max_distance)}"


def make_picture(text: str, length: int, n_heads: int | None = None) -> Picture:
    """What there is to show of a pattern. Raises UserError where it cannot be read."""
    pattern = parse_pattern(text)
    linear = isinstance(pattern, LinearAttentionSpec)
    shown, heads, notes = CAUSAL if linear else pattern, 1, []
    if shown.by_head:
        heads = n_heads or (min(shown.min_heads, 16) if shown.min_heads > 1 else 4)
    if shown.by_token:
        notes += [f"every {EVERY}th token is one"]
    if shown.by_score:
        notes += ["an example: scores at random"]
    if linear:
        notes += ["a sum over features"]
    seen = sees(shown, length, heads)
    cells = sees(CAUSAL, length, heads) + (3 if linear else 2) * seen
    few, many = (each.sum(-1).float().mean() for each in (seen, sees(shown, 4 * length, heads)))
    facts = [f"{few:.1f} keys a query, {many:.1f} at length {4 * length}", f"cache: {kept(pattern)}"]
    return Picture(" ".join(text.split()), ", ".join(notes), cells, facts)


def as_text(picture: Picture) -> str:
    """For a terminal: two characters a cell, so that they look square."""
    lines = [picture.title + (f" ({picture.note})" if picture.note else "")]
    for head, rows in enumerate(picture.cells.tolist()):
        lines += [f"head {head}"] if len(picture.cells) > 1 else []
        lines += ["".join(MARKS[cell] for cell in row).rstrip() for row in rows]
    return "\n".join([*lines, "; ".join(picture.facts), ""])


def key(pictures: list[Picture]) -> str:
    """What the characters of these pictures mean, in a line."""
    found = {int(cell) for picture in pictures for cell in picture.cells.unique()}
    meanings = [f"{MARKS[cell].strip()} {MEANINGS[cell]}" for cell in (3, 2, 4, 1) if cell in found]
    return f"rows: queries, columns: keys; {', '.join(meanings)}\n"


def draw(pictures: list[Picture]) -> tuple[Any, list[Any]]:
    """The figure and its panels: a square for each pattern, with several heads one beside the other, and the key."""
    from matplotlib.patches import Patch

    columns = min(5, len(pictures) + 1)
    rows, side = -(-(len(pictures) + 1) // columns), 2.4 if columns == 5 else 3
    figure, (whole,) = new_figure(side * columns, (side + 0.7) * rows)
    whole.remove()
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, picture in zip(panels, pictures):
        draw_panel(axes, picture)
    for axes in panels[len(pictures) :]:
        axes.set(aspect="equal")
        axes.axis("off")
    found = {int(cell) for picture in pictures for cell in picture.cells.unique()}
    shown = [cell for cell in (3, 2, 4, 1) if cell in found]
    panels[len(pictures)].legend(
        [Patch(color=COLORS[cell]) for cell in shown], [MEANINGS[cell] for cell in shown], loc="upper left",
        frameon=False, fontsize=8, title="rows: queries\ncolumns: keys", title_fontsize=8, alignment="left",
        borderaxespad=0, borderpad=0, handlelength=1, handleheight=1,
    )  # fmt: skip
    return figure, panels


def draw_panel(axes: Any, picture: Picture) -> None:
    """One pattern's square; a cell is one wide, the first at the upper left corner."""
    from matplotlib.colors import ListedColormap

    heads, length, _ = picture.cells.shape
    across = math.ceil(math.sqrt(heads))
    step = length + (length + 8) // 16  # from one head to the next
    for head, cells in enumerate(picture.cells.numpy()):
        x, y = head % across * step, head // across * step
        axes.pcolormesh(
            range(x, x + length + 1), range(y, y + length + 1), cells, cmap=ListedColormap(COLORS), vmin=0,
            vmax=len(COLORS) - 1, antialiased=False, edgecolors="white" if across * length <= 48 else "none",
            linewidth=0.4,
        )  # fmt: skip
        label = [f"head {head}"] * (heads > 1) + textwrap.wrap(picture.note, 16) * (head == 0)
        axes.text(x + length, y, "\n".join(label), size=7.5, color=GREY, ha="right", va="top")
    across, down = ((n - 1) * step + length for n in (across, -(-heads // across)))
    axes.set(aspect="equal", xlim=(0, across), ylim=(down, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    title = "\n".join(textwrap.wrap(picture.title, 34, max_lines=4, placeholder=" ..."))
    axes.set_title(title, loc="left", size=8.5, family="monospace", weight="bold", parse_math=False)
    axes.set_xlabel("\n".join(picture.facts), loc="left", size=8, color="#444444")
