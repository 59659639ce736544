"""The curves of the losses and the levels to compare them with, in nats per token."""

import math
from dataclasses import dataclass

from thinker.features.run_report.history import MAX_POINTS, History, Point, spread
from thinker.training.reports.run_summary import RunSummary

LEVELS = ("5-gram", "gzip")  # the simple models that are drawn
MAX_SOURCES = 5  # of a mixture that are drawn
TICKS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 50, 100)


@dataclass(frozen=True)
class Curve:
    """A loss by step. kind: "train", "val" or "source-N"; the style sheet draws it so."""

    name: str
    kind: str
    points: list[Point]


@dataclass(frozen=True)
class Level:
    """A loss that does not change. kind: "floor", "ngram" or "gzip"."""

    name: str
    kind: str
    loss: float


@dataclass(frozen=True)
class LossCurves:
    """What a chart of the losses shows, and its axes."""

    curves: list[Curve]
    levels: list[Level]
    is_log: bool
    lowest: float  # of the vertical axis
    highest: float
    last_step: int  # of the horizontal axis, which begins with the first step
    first_step: int

    def x(self, step: float) -> float:
        """The place of a step from left to right, from 0 to 1."""
        return (step - self.first_step) / max(1, self.last_step - self.first_step)

    def y(self, loss: float) -> float:
        """The place of a loss from top to bottom, from 0 to 1."""
        lowest, highest = self.lowest, self.highest
        if self.is_log:
            lowest, highest, loss = math.log(lowest), math.log(highest), math.log(loss)
        return (highest - loss) / (highest - lowest)

    def loss_ticks(self) -> list[float]:
        """Losses to label, from the lowest to the highest."""
        if self.is_log:
            ticks = [tick for tick in TICKS if self.lowest <= tick <= self.highest]
            return ticks[:: -(-len(ticks) // 8)]  # every n-th, so that there are 8 at most
        return _even_ticks(self.lowest, self.highest, 5)

    def step_ticks(self) -> list[float]:
        """Steps to label."""
        return _even_ticks(self.first_step, self.last_step, 4)


def loss_curves(history: History, summary: RunSummary | None) -> LossCurves | None:
    """The curves until now; None if nothing was logged. summary: brings the simple models."""
    curves = []
    if history.train_steps:
        curves.append(Curve("training", "train", history.train_curve()))
    for number, name in enumerate(history.sources()[:MAX_SOURCES]):
        points = spread(history.curve(f"val_loss/{name}"), MAX_POINTS)
        curves.append(Curve(f"validation, {name}", f"source-{number}", points))
    if history.evaluations:
        curves.append(Curve("validation", "val", spread(history.curve("val_loss"), MAX_POINTS)))
    if not curves:
        return None
    levels = _levels(history, summary)
    steps = []
    losses = [level.loss for level in levels]
    for curve in curves:
        for step, loss in curve.points:
            steps.append(step)
            losses.append(loss)
    lowest, highest = min(losses), max(losses)
    is_log = lowest > 0 and highest > 3 * lowest
    if is_log:
        lowest, highest = lowest * 0.93, highest * 1.05
    else:
        margin = 0.06 * (highest - lowest) or 0.5
        lowest, highest = lowest - margin, highest + margin
    return LossCurves(curves, levels, is_log, lowest, highest, max(steps), min(steps))


def _levels(history: History, summary: RunSummary | None) -> list[Level]:
    if not history.evaluations:
        return []
    last = history.evaluations[-1]
    levels = []
    if last.get("entropy_floor"):
        levels.append(Level("floor, the entropy of the corpus", "floor", last["entropy_floor"]))
    if summary is not None and last.get("val_bits_per_byte"):
        # Nats per token in a bit per byte, which are constant for a text and a tokenizer.
        scale = last["val_loss"] / last["val_bits_per_byte"]
        for name, kind in zip(LEVELS, ("ngram", "gzip")):
            if name in summary.baselines:
                bits = summary.baselines[name]
                levels.append(Level(f"{name} ({bits:.2f} bits per byte)", kind, bits * scale))
    return levels


def _even_ticks(lowest: float, highest: float, most: int) -> list[float]:
    """Round numbers from lowest to highest, at most `most` + 1 of them, evenly spaced."""
    span = max(highest - lowest, 1e-9)
    unit = 10.0 ** math.floor(math.log10(span / most))
    width = unit
    for factor in (1, 2, 5, 10):
        width = factor * unit
        if span / width <= most:
            break
    first = math.ceil(lowest / width)
    last = math.floor(highest / width)
    return [round(number * width, 10) for number in range(first, last + 1)]
