"""The table, the recommendation and the plot of a search for learning rates
(tuning.py)."""

import math
import shlex
from pathlib import Path
from typing import Any

from thinker.runtime.plot_style import new_figure, save_figure
from thinker.runtime.process.invocation import other_command
from thinker.training.config.config import Config

HEADER = (
    f"{'rung':>4}  {'multiplier':>10}  {'batch size':>10}  {'tokens':>12}  "
    f"{'validation loss':>15}  {'seconds':>8}"
)


def loss_of(row: dict[str, Any]) -> float:
    """Validation loss of a result: infinite if it was not finite."""
    return math.inf if row["val_loss"] is None else row["val_loss"]


def format_rows(rows: list[dict[str, Any]]) -> str:
    """Lines of the table, the lowest loss first."""
    lines = []
    for row in sorted(rows, key=loss_of):
        is_finite = row["val_loss"] is not None
        loss, seconds = (
            (f"{row['val_loss']:.4f}", f"{row['seconds']:.1f}") if is_finite else ("not finite", "")
        )
        setting = f"{row['rung']:>4}  {row['multiplier']:>10g}  {row['batch_size']:>10}"
        lines.append(f"{setting}  {row['tokens']:>12,}  {loss:>15}  {seconds:>8}".rstrip())
    return "\n".join(lines)


def best_result(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The lowest loss in the last rung that has one."""
    finite = [row for row in rows if row["val_loss"] is not None]
    return min(finite, key=lambda row: (-row["rung"], row["val_loss"]), default=None)


def best_so_far(rows: list[dict[str, Any]]) -> str:
    """What is known when the search is interrupted."""
    best = best_result(rows)
    if best is None:
        return "stopped before the first run ended; the same command resumes the search"
    keys = " ".join(best["overrides"]) or "the config as it is"
    result = f"best so far: {keys} (loss {best['val_loss']:.4f} in rung {best['rung']})"
    return f"{result}; the same command resumes the search"


def recommendation(
    rows: list[dict[str, Any]], path: Path, overrides: list[str], config: Config
) -> list[str]:
    """The keys to change, the command with them, and what limits the result. `overrides`: of the
    config already."""
    best, train = best_result(rows), config.train
    assert best is not None
    changes, max_steps = list(best["overrides"]), train.max_steps
    if (
        max_steps is not None and best["batch_size"] != train.batch_size
    ):  # the number of tokens stays the same
        max_steps = math.ceil(max_steps * train.batch_size / best["batch_size"])
        changes.append(f"train.max_steps={max_steps}")
    lines = ["of the values tried, those of the config are best"]
    if changes:
        arguments = shlex.join([str(path), *overrides, *changes])
        command = f"{other_command('train')} {arguments}"
        lines = [f"use: {' '.join(changes)}", command]
    multipliers = sorted({row["multiplier"] for row in rows})
    if len(multipliers) > 1 and best["multiplier"] in (multipliers[0], multipliers[-1]):
        end, beyond = (
            ("smallest", "below") if best["multiplier"] == multipliers[0] else ("largest", "above")
        )
        lines.append(
            f"the best multiplier is the {end} one tried; also set --multipliers {beyond} it"
        )
    if max_steps is None:
        lines.append(
            f"the rates were tuned on runs of {best['steps']:,} steps; your run may be longer"
        )
    elif best["steps"] < max_steps:
        lines.append(
            f"the rates were tuned on shorter runs: {best['steps']:,} steps instead of "
            f"{max_steps:,}"
        )
    return lines


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Validation loss by multiplier: a panel for each rung, a line for each batch size. Crosses:
    not finite."""
    n_rungs = max(row["rung"] for row in rows)
    multipliers = sorted({row["multiplier"] for row in rows})
    batch_sizes = sorted({row["batch_size"] for row in rows})
    best = best_result(rows)
    figure, panels = new_figure(max(5.0, 3.0 * n_rungs), 4, columns=n_rungs, share=False)
    for rung, axes in enumerate(panels, start=1):
        for index, batch_size in enumerate(batch_sizes):
            found = sorted((row["multiplier"], loss_of(row)) for row in rows
                           if (row["rung"], row["batch_size"]) == (rung, batch_size))  # fmt: skip
            finite = [point for point in found if math.isfinite(point[1])]
            axes.plot(
                *zip(*finite or [(math.nan, math.nan)]),
                marker="o",
                markersize=4,
                color=f"C{index}",
                label=f"batch size {batch_size}",
            )
            diverged = [multiplier for multiplier, loss in found if not math.isfinite(loss)]
            if diverged:  # at the top of the panel
                ones, transform = [1.0] * len(diverged), axes.get_xaxis_transform()
                axes.plot(
                    diverged, ones, "x", color=f"C{index}", transform=transform, clip_on=False
                )
        if best is not None and best["rung"] == rung:
            color = f"C{batch_sizes.index(best['batch_size'])}"
            axes.plot(
                best["multiplier"],
                best["val_loss"],
                "o",
                markersize=12,
                fillstyle="none",
                color=color,
            )
        tokens = next(row["tokens"] for row in rows if row["rung"] == rung)
        axes.set(
            xscale="log",
            xlim=(multipliers[0] / 1.15, multipliers[-1] * 1.15),
            title=f"{tokens:,} tokens",
        )
        axes.set_xticks(multipliers, [f"{multiplier:g}" for multiplier in multipliers])
        axes.set_xticks([], minor=True)
    panels[0].set_ylabel("validation loss (nats per token)")
    panels[0].legend(frameon=False)
    figure.supxlabel("multiplier of the learning rates", fontsize="medium")
    save_figure(figure, path)
