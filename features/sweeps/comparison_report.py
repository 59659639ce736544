"""A comparison as a table, as lines of JSON, as CSV and as a plot."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinker.features.sweeps.comparison import UNITS, Comparison, Group
from thinker.features.sweeps.grid import numbers_of
from thinker.features.sweeps.run_result import finite
from thinker.runtime.files import atomic_write
from thinker.runtime.plot_style import new_figure, plain_text, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {"val_loss": "val loss", "val_bits_per_byte": "bits/byte"}
MAX_NAMES = 12  # in a legend


# ---------------------------------------------------------------- text


def format_table(comparison: Comparison) -> str:
    """The groups, best first. A mean of several seeds has its 95% interval (Student's t)."""
    header = ["setting", "seeds"]
    for key, title in TITLES.items():
        header.append(title)
        if key == comparison.measure:
            header.append("± 95%")
    header += ["best val loss", "tokens", "minutes", "parameters", "p to best"]
    if comparison.baseline is not None:
        header.append(f"from {comparison.baseline.name}")
    rows = [header]
    for values in comparison.rows():
        group = next(group for group in comparison.groups if group.name == values["name"])
        row = [values["name"], _seeds(group)]
        for key in TITLES:
            row.append(_loss(group.mean(key)))
            if key == comparison.measure:
                row.append(_formatted(values["interval"], ".4f"))
        row.append(_formatted(values["best_val_loss"], ".4f"))
        row.append(_formatted(values["tokens"], ",.0f"))
        minutes = values["seconds"]
        if minutes is not None:
            minutes /= 60
        row.append(_formatted(minutes, ".2f"))
        row.append(_formatted(values["parameters"], ","))
        row.append(_formatted(values["p_to_best"], ".2g"))
        if comparison.baseline is not None:
            row.append(_difference(group, comparison))
        rows.append(row)
    return align(rows)


def _seeds(group: Group) -> str:
    """How many runs the means are over, and of how many, if not of all."""
    n_counted, n_runs = len(group.counted), len(group.runs)
    if n_counted == n_runs:
        return str(n_runs)
    return f"{n_counted} of {n_runs}"


def _loss(mean: float | None) -> str:
    if mean is None:
        return ""
    if not math.isfinite(mean):
        return "not finite"
    return f"{mean:.4f}"


def _formatted(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return format(value, form)


def _difference(group: Group, comparison: Comparison) -> str:
    found = comparison.difference(group)
    if found is None or group is comparison.baseline:
        return ""
    difference, interval = found
    if interval == 0:
        return f"{difference:+.4f}"
    return f"{difference:+.4f} ± {interval:.4f}"


def align(rows: list[list[str]]) -> str:
    """Lines of a table: the first column to the left, the others to the right, without those that
    are empty below the header."""
    columns = [column for column in zip(*rows) if any(column[1:])]
    rows = [list(row) for row in zip(*columns)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_differences(comparison: Comparison) -> str:
    """The keys in which each group differs from the others, a line for each group."""
    lines = []
    for group in comparison.groups:
        if group.settings:
            keys = [f"{key}={_yaml(value)}" for key, value in group.settings.items()]
            lines.append(f"{group.name}: {' '.join(keys)}")
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


# ---------------------------------------------------------------- files


def print_event(event: str, **values: Any) -> None:
    """Print one line of JSON for programs."""
    print(json.dumps({"event": event, **values}), flush=True)


def write_runs_csv(comparison: Comparison, path: Path) -> None:
    """A row for each run, best group first."""
    rows = []
    for group in comparison.groups:
        for run in group.runs:
            rows.append({"setting": group.name, **group.settings, **run.as_row()})
    _write_csv(rows, path)


def write_settings_csv(comparison: Comparison, path: Path) -> None:
    """A row for each group, best first."""
    rows = []
    for row in comparison.rows():
        settings = row.pop("settings")
        row["seeds"] = " ".join(map(str, row["seeds"]))
        values = [math.nan if value is None else value for value in row["values"]]
        row["values"] = " ".join(map(str, values))
        rows.append({"setting": row.pop("name"), **settings, **row})
    _write_csv(rows, path)


def _write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(path, file.getvalue())


# ---------------------------------------------------------------- plot


def plot(comparison: Comparison, path: Path, key: str | None = None) -> None:
    """Left, the validation loss of every run over its tokens; right, the mean of each group at the
    end, with its interval: over the values of a numeric `key`, or one below the other."""
    height = max(4.5, 1 + 0.4 * len(comparison.groups))
    figure, (curves, ends) = new_figure(13, height, columns=2, share=False)
    measure = comparison.measure or "val_bits_per_byte"
    for number, group in enumerate(comparison.groups):
        label = plain_text(group.name)
        for run in group.runs:
            points = [(line["tokens"], line[measure]) for line in run.curve if measure in line]
            if points:
                # One point makes no line, so it gets a dot.
                marker = "o" if len(points) == 1 else ""
                color = f"C{number % 10}"
                curves.plot(*zip(*points), marker=marker, color=color, lw=1.2, label=label)
                label = None  # once for each group
    curves.set(xlabel="tokens", ylabel=f"validation loss ({UNITS[measure]})")
    if len(comparison.groups) <= MAX_NAMES and curves.lines:
        curves.legend(frameon=False, fontsize="small")
    if key is None:
        _plot_below(comparison, ends, measure)
    else:
        _plot_over(comparison, ends, measure, key)
    path.unlink(missing_ok=True)  # so that a link of that name is not followed
    save_figure(figure, path)


def _plot_below(comparison: Comparison, axes: Axes, measure: str) -> None:
    names = []
    for number, group in enumerate(comparison.groups):
        names.append(plain_text(group.name))
        color = f"C{number % 10}"
        values = [value for value in group.values(measure) if math.isfinite(value)]
        axes.plot(values, [number] * len(values), ".", color=color)
        mean = finite(group.mean(measure))
        if mean is not None:
            interval = group.interval(measure)
            axes.errorbar(
                mean, number, xerr=interval, fmt="|", color=color, markersize=14, capsize=4
            )
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel=f"at the end ({UNITS[measure]}), mean and 95% interval")
    axes.set_ylim(len(names) - 0.5, -0.5)


def _shift(x: Sequence[float], values: Sequence[float], share: float) -> list[float]:
    """Positions, moved to the right by a share of the axis that the values need: a logarithmic one
    if all are positive."""
    low, high = min(values), max(values)
    if low > 0:
        factor = (high / low) ** share
        return [each * factor for each in x]
    return [each + share * (high - low) for each in x]


def _plot_over(comparison: Comparison, axes: Axes, measure: str, key: str) -> None:
    lines: dict[str, list[tuple[float, float, float]]] = {}
    texts = [group.settings[key] for group in comparison.groups]
    numbers = numbers_of(texts)
    assert numbers is not None
    for group, x in zip(comparison.groups, numbers):
        mean = finite(group.mean(measure))
        if mean is None:
            continue
        others = [f"{name}={value}" for name, value in group.settings.items() if name != key]
        interval = group.interval(measure)
        if interval is None:
            interval = 0.0
        lines.setdefault(" ".join(others), []).append((x, mean, interval))
    for number, (label, points) in enumerate(lines.items()):
        x, means, intervals = zip(*sorted(points))
        # Side by side, as intervals at the same place would hide each other.
        x = _shift(x, numbers, 0.012 * (number - (len(lines) - 1) / 2))
        axes.errorbar(x, means, intervals, marker="o", markersize=4, capsize=4, label=label or None)
    values = sorted(set(numbers))
    if values[0] > 0:
        axes.set_xscale("log")
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)
    label = key
    if texts[0].startswith("x"):
        label = f"{key}, times the config's"
    axes.set(xlabel=label, ylabel=f"at the end, mean and 95% interval ({UNITS[measure]})")
    if "" not in lines and lines:
        axes.legend(frameon=False, fontsize="small")
