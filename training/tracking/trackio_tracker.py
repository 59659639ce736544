"""Logging to trackio, which keeps runs in a database on this machine."""

import contextlib
import json
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinker.runtime.files import atomic_write
from thinker.training.reports.run_summary import RunSummary
from thinker.training.settings.settings import Settings
from thinker.training.tracking.tracker import TrackedRun, Tracker, require_package


class TrackioTracker(Tracker):
    """A run of trackio, which goes on when training resumes.

    trackio tells runs apart by their names, so each has a random end, which trackio.json keeps. The
    database has whole steps. Those that a kill has lost come again from metrics.jsonl; those that
    training repeats are skipped.
    """

    def __init__(self, settings: Settings) -> None:
        require_package("trackio", "tracking.trackers=trackio")
        self.project = settings.tracking.project
        self.samples: list[str] = []  # of the step to come

    def start(self, run: TrackedRun) -> int:
        """Start or resume a run of trackio. Returns the last step in its database."""
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        name = _run_name(run)
        with contextlib.redirect_stdout(sys.stderr):  # what trackio says is no result
            self.trackio_run = trackio.init(
                self.project,
                name,
                config=run.config,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        last_step = SQLiteStorage.get_last_step(self.project, name, self.trackio_run.id)
        self.last_step = -1 if last_step is None else last_step
        self.has_new_steps = False
        return self.last_step

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Keep a sample for log(), as a step that the database has is not logged again."""
        self.samples.append(prompt + text)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers and the samples of a step."""
        logged: dict[str, Any] = dict(values)
        if self.samples:
            logged["sample"] = "\n".join(self.samples)
            self.samples = []
        self.trackio_run.log(logged, step=step)
        self.last_step = step
        self.has_new_steps = True

    def summary(self, summary: RunSummary) -> None:
        """Log what is said of the result, unless the finished run was only started again."""
        import trackio

        if not self.has_new_steps:
            return
        lines = [*summary.result, *summary.assessment, *summary.advice]
        self.trackio_run.log({"summary": trackio.Markdown("\n\n".join(lines))}, self.last_step)

    def picture(self, path: Path) -> None:
        """Log a picture, unless the finished run was only started again."""
        import trackio

        if self.has_new_steps:
            self.trackio_run.log({path.stem: trackio.Image(str(path))}, self.last_step)

    def finish(self) -> None:
        """Wait until everything is in the database."""
        import trackio

        with contextlib.redirect_stdout(sys.stderr):
            trackio.finish()


def _run_name(run: TrackedRun) -> str:
    """The name of the run in trackio, which is kept in the run directory."""
    path = run.directory / "trackio.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(path.read_text(encoding="utf-8"))["name"])
    name = f"{run.name}-{secrets.token_hex(4)}"
    atomic_write(path, json.dumps({"name": name}) + "\n")
    return name
