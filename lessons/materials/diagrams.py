"""Drawings of the lessons, narrow enough for a phone: attention in one head, and heads that share
keys."""

from typing import Any

from thinker.runtime.plot_style import BLUE, GREY, ORANGE, new_figure


def attention_head() -> Any:
    """A figure of the way from vectors through one head to the output of one word."""
    figure, (axes,) = new_figure(4.8, 4.4)
    axes.set(xlim=(0, 100), ylim=(0, 100))
    axes.axis("off")
    boxes = [
        ("vector of sat", 17, 94, GREY),
        ("vectors of all words", 70, 94, GREY),
        ("query", 17, 73, BLUE),
        ("keys", 52, 73, ORANGE),
        ("values", 88, 73, ORANGE),
        ("scores: query · each key, divided by √D", 36, 54, BLUE),
        ("causal mask: later words get −∞", 36, 38, BLUE),
        ("softmax: weights that sum to 1", 36, 22, BLUE),
        ("sum of values, each times its weight", 54, 5, GREY),
    ]
    for name, x, y, color in boxes:
        _box(axes, name, x, y, color)
    arrows = [
        ((17, 90), (17, 77)),
        ((62, 90), (53, 77)),
        ((78, 90), (87, 77)),
        ((17, 69), (24, 58)),
        ((52, 69), (46, 58)),
        ((36, 50), (36, 42)),
        ((36, 34), (36, 26)),
        ((36, 18), (43, 9)),
        ((88, 69), (78, 9)),
    ]
    for start, end in arrows:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": GREY})
    for x in (17, 57.5, 82.5):
        axes.text(x + 2, 83.5, "· matrix", va="center", color=GREY, fontsize=10)
    return figure


def grouped_heads(n_heads: int = 4, counts: tuple[int, ...] = (4, 2, 1)) -> Any:
    """A figure of query heads and the KV heads that they read: one panel for each number of KV
    heads."""
    figure, panels = new_figure(4.8, 2.4, len(counts))
    for axes, n_kv_heads in zip(panels, counts):
        axes.set(xlim=(-0.6, n_heads - 0.4), ylim=(-0.75, 1.6))
        axes.axis("off")
        group = n_heads // n_kv_heads
        for head in range(n_heads):
            kv_head = head // group
            at = kv_head * group + (group - 1) / 2  # below the middle of its group
            axes.plot([head, at], [1, 0], color=GREY, linewidth=1.2, zorder=0)
            _box(axes, str(head), head, 1, BLUE)
            if head % group == 0:  # once for each group
                _box(axes, str(kv_head), at, 0, ORANGE)
        kind = {n_heads: "MHA", 1: "MQA"}.get(n_kv_heads, "GQA")
        axes.set_title(f"{kind}, K = {n_kv_heads}", fontsize=10)
        axes.text((n_heads - 1) / 2, 1.42, "query heads", ha="center", color=BLUE, fontsize=9)
        axes.text((n_heads - 1) / 2, -0.6, "KV heads", ha="center", color=ORANGE, fontsize=9)
    return figure


def _box(axes: Any, name: str, x: float, y: float, color: str) -> None:
    """A filled box with a name, centered at (x, y)."""
    style = {"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": "none"}
    axes.text(x, y, name, ha="center", va="center", color="white", fontsize=11, bbox=style)
