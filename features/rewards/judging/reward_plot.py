"""The rewards of a run by step, as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinker.runtime.plot_style import BLUE, ORANGE, new_figure, plain_text, save_figure

WINDOW = 0.05  # share of a curve's points, on each side of one, that are averaged with it


def plot_rewards(lines: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Plot mean rewards by step, from the lines of metrics.jsonl: of the answers of steps, with
    their moving average, and of prompts of the validation split."""
    steps = _points(lines, "reward")
    figure, (axes,) = new_figure(8, 4.5)
    axes.plot(*zip(*steps), ".", color=BLUE, alpha=0.35, markersize=4, label="answers of a step")
    axes.plot(*zip(*moving_average(steps)), color=BLUE, label="moving average")
    validation = _points(lines, "val_reward")
    if validation:
        axes.plot(*zip(*validation), "o-", color=ORANGE, markersize=4, label="validation prompts")
    axes.set(xlabel="step", ylabel="mean reward", title=plain_text(title))
    axes.legend(frameon=False)
    path.unlink(missing_ok=True)  # so that a link of that name is not followed
    save_figure(figure, path)


def moving_average(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Each point with the mean of its value and those of its neighbors on both sides."""
    n_side = round(WINDOW * len(points))
    averages = []
    for index, (step, _) in enumerate(points):
        neighbors = points[max(0, index - n_side) : index + n_side + 1]
        averages.append((step, statistics.fmean(value for _, value in neighbors)))
    return averages


def _points(lines: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """The step and the value of each line that has a key."""
    return [(line["step"], line[key]) for line in lines if key in line]
