"""The callback that writes the report of a run."""

import sys
from collections.abc import Mapping
from typing import Any

from thinker.features.run_report.attention_picture import AttentionPicture, attention_picture
from thinker.features.run_report.history import History
from thinker.features.run_report.report_facts import (
    FINISHED,
    PAUSED,
    RUNNING,
    STOPPED,
    gather_facts,
)
from thinker.features.run_report.report_html import html_page
from thinker.features.run_report.report_markdown import markdown_page
from thinker.runtime.files import atomic_write
from thinker.training.callback import Callback, TrainingRun
from thinker.training.reports.run_summary import RunSummary
from thinker.training.settings.settings import Settings


def run_reports(settings: Settings) -> list[Callback]:
    """The report, unless the config turns it off."""
    return [RunReport()] if settings.train.report else []


class RunReport(Callback):
    """Writes report.html and report.md when training starts, at each evaluation and at the end.

    It only reads: no weight and no random number changes.
    """

    def __init__(self) -> None:
        self.history = History()
        self.summary: RunSummary | None = None
        self.attention: AttentionPicture | str = "The picture is made at the next evaluation."
        self.saved_step: int | None = None

    def on_start(self, run: TrainingRun) -> None:
        """Read what the run has logged before, and write the first report."""
        self.run = run
        if run.state.step:
            self.saved_step = run.state.step
        if not run.directory.writes:
            return
        for line in run.directory.read_metrics():
            self.history.add(line)
        self.history.samples = list(run.directory.read_samples())
        if not self._is_finished():
            self._write(RUNNING)

    def on_log(self, line: Mapping[str, Any]) -> None:
        """Keep the line, and write a report after an evaluation."""
        if not self.run.directory.writes:
            return
        self.history.add(line)
        if "val_loss" in line:
            self._look_at_attention()
            self._write(RUNNING)

    def on_sample(self, step: int, prompt: str, text: str) -> None:
        """Keep the sample."""
        if self.run.directory.writes:
            self.history.samples.append({"step": step, "prompt": prompt, "text": text})

    def on_save(self, step: int) -> None:
        """Keep the step from which the run would resume."""
        self.saved_step = step

    def on_summary(self, summary: RunSummary) -> None:
        """Write the last report, and say where it is."""
        self.summary = summary
        is_alone = self.run.parts.dist.world_size == 1  # other ranks do not call this
        if isinstance(self.attention, str) and is_alone:  # a finished run was started again
            with self.run.evaluated_weights():
                self._look_at_attention()
        self._write(FINISHED)
        print(f"report {self.run.directory.path / 'report.html'}", file=sys.stderr)

    def on_end(self, is_evaluated: bool) -> None:
        """Say in the report that the run has not reached its end."""
        if self.summary is not None or not self.run.directory.writes:
            return
        if self._is_finished():
            status = FINISHED  # without a summary, as metrics.jsonl is damaged
        elif self.saved_step == self.run.state.step:
            status = PAUSED
        else:
            status = STOPPED
        self._write(status)

    def _is_finished(self) -> bool:
        state = self.run.state
        is_at_end = state.progress(self.run.parts.settings.train) >= 1
        return state.step > 0 and is_at_end and state.evaluated_at == state.step

    def _look_at_attention(self) -> None:
        if self.run.directory.writes:
            self.attention = attention_picture(self.run.parts.model, self.run.corpus)

    def _write(self, status: str) -> None:
        """Write both files. Raises RunError if the folder is gone, OSError if the disk is full."""
        directory = self.run.directory
        directory.check()
        facts = gather_facts(
            self.run, self.history, self.summary, self.attention, status, self.saved_step
        )
        atomic_write(directory.path / "report.html", html_page(facts), sync=False)
        atomic_write(directory.path / "report.md", markdown_page(facts), sync=False)
