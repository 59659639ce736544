"""An accuracy with its interval and its chance level, and the table of several."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinker.evaluation.wilson import wilson_interval


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
