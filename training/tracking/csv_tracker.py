"""Logging to CSV files in the run directory: metrics.csv and samples.csv."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinker.runtime.files import atomic_write
from thinker.training.settings.settings import Settings
from thinker.training.tracking.tracker import TrackedRun, Tracker


class CsvTracker(Tracker):
    """Writes a row per step to metrics.csv, and one per sample to samples.csv.

    The config, the pictures and the summary are in the run directory anyway.
    """

    def __init__(self, settings: Settings) -> None:
        pass

    def start(self, run: TrackedRun) -> int:
        """Remove the rows from `run.step` on."""
        self.metrics = CsvFile(run.directory / "metrics.csv")
        self.samples = CsvFile(run.directory / "samples.csv")
        last_step = self.metrics.truncate(run.step - 1)
        self.samples.truncate(last_step)
        return last_step

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Add a row to samples.csv."""
        self.samples.append({"step": step, "prompt": prompt, "text": text})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row to metrics.csv."""
        if values:
            self.metrics.append({"step": step, **values})


class CsvFile:
    """A CSV file of rows by step, whose columns grow: a cell of a key that a row lacks is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []

    def truncate(self, last_step: int) -> int:
        """Remove the rows after a step, and whatever is no row. Returns the last step that is left;
        -1 if there is none."""
        kept = [row for row in self._read() if -1 < _step(row) <= last_step]
        if self.path.exists():
            self._write(kept)
        return max(map(_step, kept), default=-1)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row. New keys become columns, for which the file is written anew."""
        new = [key for key in row if key not in self.columns]
        if new:
            rows = self._read()
            self.columns += new
            self._write(rows)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)

    def _read(self) -> list[dict[str, str]]:
        if not self.path.is_file():
            return []
        with self.path.open(encoding="utf-8", errors="replace", newline="") as file:
            reader = csv.DictReader(file)
            self.columns = list(reader.fieldnames or ())
            return list(reader)

    def _write(self, rows: list[dict[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore")
        if self.columns:
            writer.writeheader()
        writer.writerows(rows)
        atomic_write(self.path, text.getvalue())


def _step(row: Mapping[str, Any]) -> int:
    """The step of a row; -1 if it is damaged."""
    try:
        return int(row["step"])
    except (KeyError, TypeError, ValueError):
        return -1
