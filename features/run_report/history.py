"""What a report keeps of metrics.jsonl and samples.jsonl, so that it need not read them again."""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

MAX_POINTS = 400  # of the curve of the training loss


class Point(NamedTuple):
    """A loss in nats per token."""

    step: int
    loss: float


@dataclass
class History:
    """The lines of a run until now."""

    train: list[Point] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # lines with val_loss
    last_train: dict[str, Any] = field(default_factory=dict)  # the newest line with train_loss
    samples: list[dict[str, Any]] = field(default_factory=list)  # step, prompt, text

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        if "train_loss" in line:
            self.train.append(Point(line["step"], line["train_loss"]))
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

    def train_loss_since(self, before: int, until: int) -> float | None:
        """The mean training loss of the lines after step `before` and up to step `until`."""
        first = bisect.bisect_right(self.train, before, key=_step)
        end = bisect.bisect_right(self.train, until, key=_step)
        if first == end:
            return None
        return sum(loss for _, loss in self.train[first:end]) / (end - first)

    def evaluation_rows(self) -> list[tuple[dict[str, Any], float | None]]:
        """Each evaluation, with the mean training loss since the one before."""
        ends = [0, *[line["step"] for line in self.evaluations]]
        rows = []
        for line, (before, until) in zip(self.evaluations, pairwise(ends)):
            rows.append((line, self.train_loss_since(before, until)))
        return rows


def _step(point: Point) -> int:
    return point.step


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most `most` points: each is the mean loss of a group of neighbors, at its last step."""
    size = -(-len(points) // most)
    if size <= 1:
        return list(points)
    means = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        mean = sum(loss for _, loss in group) / len(group)
        means.append(Point(group[-1].step, mean))
    return means


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(i * last / (most - 1))] for i in range(most)]
