"""Plot of decoding speeds."""

from pathlib import Path
from typing import Any

from thinker.runtime.plot_style import BLUE, ORANGE, new_figure


def plot(rows: list[dict[str, Any]], shape: str, path: Path) -> None:
    """Plot a bar per variant, with its share of the measured bandwidth."""
    figure, (axes,) = new_figure(8, 1 + 0.32 * len(rows))
    names = [
        f"{row['name']}, {row['batch']} rows" if row["batch"] > 1 else row["name"] for row in rows
    ]
    speeds = [row["decode_tokens_per_second"] for row in rows]
    is_peer = [name.startswith(("llama.cpp", "transformers")) for name in names]
    bars = axes.barh(names, speeds, color=[ORANGE if peer else BLUE for peer in is_peer])
    labels = [f"{speed:,.0f} ({row['bandwidth_share']:.0%})" for speed, row in zip(speeds, rows)]
    axes.bar_label(bars, labels, padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel(f"tokens per second, shape {shape} (share of the measured bandwidth)")
    figure.savefig(path)
