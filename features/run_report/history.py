"""What a report keeps of metrics.jsonl and samples.jsonl, so that it need not read them again."""

import bisect
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

MAX_POINTS = 400  # of a curve


class Point(NamedTuple):
    """A loss in nats per token."""

    step: int
    loss: float


@dataclass
class History:
    """The lines of a run until now."""

    # Of the lines with train_loss, which may be a million: their steps, and their losses.
    train_steps: array = field(default_factory=lambda: array("q"))
    train_losses: array = field(default_factory=lambda: array("d"))
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # lines with val_loss
    last_train: dict[str, Any] = field(default_factory=dict)  # the newest line with train_loss
    samples: list[dict[str, Any]] = field(default_factory=list)  # step, prompt, text

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        if "train_loss" in line:
            self.train_steps.append(line["step"])
            self.train_losses.append(line["train_loss"])
            self.last_train = dict(line)
        elif "val_loss" in line:
            self.evaluations.append(dict(line))

    def curve(self, key: str) -> list[Point]:
        """A loss of the evaluations, such as "val_loss", by step."""
        return [Point(line["step"], line[key]) for line in self.evaluations if key in line]

    def sources(self) -> list[str]:
        """The sources of a mixture, in the order of their first evaluation."""
        names: dict[str, None] = {}
        for line in self.evaluations:
            for key in line:
                if key.startswith("val_loss/"):
                    names[key.partition("/")[2]] = None
        return list(names)

    def train_curve(self) -> list[Point]:
        """The training loss by step, thinned."""
        return thin(np.array(self.train_steps), np.array(self.train_losses))

    def train_loss_since(self, before: int, until: int) -> float | None:
        """The mean training loss of the lines after step `before` and up to step `until`."""
        first = bisect.bisect_right(self.train_steps, before)
        end = bisect.bisect_right(self.train_steps, until)
        if first == end:
            return None
        return float(np.mean(self.train_losses[first:end]))

    def evaluation_rows(self) -> list[tuple[dict[str, Any], float | None]]:
        """Each evaluation, with the mean training loss since the one before."""
        ends = [0, *[line["step"] for line in self.evaluations]]
        rows = []
        for line, (before, until) in zip(self.evaluations, pairwise(ends)):
            rows.append((line, self.train_loss_since(before, until)))
        return rows


def thin(steps: np.ndarray, losses: np.ndarray, most: int = MAX_POINTS) -> list[Point]:
    """At most `most` points: each is the mean loss of a group of neighbors, at its last step."""
    n = len(steps)
    size = max(1, -(-n // most))
    starts = np.arange(0, n, size)
    if not len(starts):
        return []
    ends = np.minimum(starts + size, n)
    means = np.add.reduceat(losses, starts) / (ends - starts)
    return [Point(step, loss) for step, loss in zip(steps[ends - 1].tolist(), means.tolist())]


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(i * last / (most - 1))] for i in range(most)]
