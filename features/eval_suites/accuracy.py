"""An accuracy with its interval and its chance level, and the table of several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Accuracy:
    """The share of right answers on a task."""

    name: str
    accuracy: float
    low: float  # of the confidence interval
    high: float
    chance: float  # what guessing reaches
    n_items: int
    version: str = ""  # of the task
    shots: int = 0  # examples before each item


def wilson_interval(share: float, n_items: int, confidence: float) -> tuple[float, float]:
    """The confidence interval of a share (Wilson 1927), which stays between 0 and 1."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    center = share + z * z / (2 * n_items)
    spread = z * math.sqrt(share * (1 - share) / n_items + z * z / (4 * n_items**2))
    scale = 1 + z * z / n_items
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def share_of_items(
    name: str, n_right: float, n_items: int, chance: float, confidence: float
) -> Accuracy:
    """The accuracy of independent items, with Wilson's interval. A tie is half a right answer."""
    share = n_right / n_items
    low, high = wilson_interval(share, n_items, confidence)
    return Accuracy(name, share, low, high, chance, n_items)


def format_accuracies(rows: Sequence[Accuracy]) -> str:
    """A table with one line per accuracy."""
    width = max(len("task"), *(len(row.name) for row in rows))
    has_versions = any(row.version for row in rows)
    header = f"{'task':<{width}}  {'accuracy':>8}  {'interval':>14}  {'chance':>6}  {'items':>6}"
    if has_versions:
        header += f"  {'shots':>5}  version"
    lines = [header]
    for row in rows:
        interval = f"[{row.low:.3f}, {row.high:.3f}]"
        line = f"{row.name:<{width}}  {row.accuracy:8.3f}  {interval:>14}  {row.chance:6.3f}"
        line += f"  {row.n_items:6,}"
        if has_versions:
            line += f"  {row.shots:5}  {row.version}"
        lines.append(line)
    return "\n".join(lines)
