"""Logging to Weights & Biases."""

import html
import json
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write
from thinker.training.reports.run_summary import RunSummary
from thinker.training.settings.settings import Settings
from thinker.training.tracking.tracker import TrackedRun, Tracker, require_package

UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)


class WandbTracker(Tracker):
    """A wandb run that keeps its id when training resumes.

    wandb accepts steps only in increasing order. tracking.json stores the last step sent and is
    replaced before wandb gets that step, so no step is sent twice, even if training is killed and
    repeats steps. It needs no sync, since the page cache outlives a killed process. wandb keeps the
    newest steps in memory, which a kill loses. Therefore tracking.json also has the last step that
    is known to be kept, and the next start reads how far an offline log reaches, or asks the
    server. The steps after that come again from metrics.jsonl, also such as were trained while
    tracking was disabled.
    """

    def __init__(self, settings: Settings) -> None:
        require_package("wandb", "tracking.wandb")
        self.section = settings.tracking
        self.samples: list[str] = []  # of the step to come, as HTML

    def start(self, run: TrackedRun) -> int:
        """Start a wandb run. Returns the last step that W&B has. Raises UserError if wandb cannot
        start."""
        self.path = run.directory / "tracking.json"
        self.run_id, self.last_step, kept_step = self._read()
        self.last_step = self._last_kept_step(kept_step)
        self.kept_step = self.last_step
        self.is_offline = self.section.wandb == "offline"
        self._save()
        self.wandb_run = self._start_wandb(run)
        if not self.is_offline and self.wandb_run.resumed:
            self.last_step = self.wandb_run.starting_step - 1  # the last step that has arrived
        return self.last_step

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Keep a sample for log(), as W&B accepts each step once."""
        self.samples.append(f"<pre>{html.escape(prompt)}<b>{html.escape(text)}</b></pre>")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send a step."""
        import wandb

        logged: dict[str, Any] = dict(values)
        if self.samples:
            logged["sample"] = wandb.Html("".join(self.samples), inject=False)
            self.samples = []
        self.last_step = step
        self._save()
        self.wandb_run.log(logged, step=step)

    def summary(self, summary: RunSummary) -> None:
        """Put the numbers of the result, and what is said of it, into the summary of the run."""
        values: dict[str, Any] = {f"final/{key}": value for key, value in summary.values.items()}
        values["final/report"] = "\n".join([*summary.result, *summary.assessment, *summary.advice])
        self.wandb_run.summary.update(values)

    def picture(self, path: Path) -> None:
        """Put a picture into the summary of the run."""
        import wandb

        self.wandb_run.summary[f"final/{path.stem}"] = wandb.Image(str(path))

    def finish(self) -> None:
        """End the wandb run, and say how to upload the log of one that is offline."""
        self.wandb_run.finish()
        self.kept_step = self.last_step
        self._save()
        if self.wandb_run.offline:
            folder = shlex.quote(str(self.path.parent / "wandb"))
            logs = f"{folder}/offline-run-*-{self.run_id}"
            print(f"upload the log to Weights & Biases: wandb sync {logs}", file=sys.stderr)

    def _start_wandb(self, run: TrackedRun) -> Any:
        import wandb

        section = self.section
        try:
            return wandb.init(
                project=section.project,
                name=run.name,
                id=self.run_id,
                resume="allow",
                mode=section.wandb,
                dir=str(run.directory),
                config=run.config,
                settings=wandb.Settings(console="off", silent=section.wandb == "offline"),
            )
        except wandb.Error as error:
            remedy = ""
            if section.wandb == "online":
                remedy = "; tracking.wandb=offline needs no account"
            names = f"tracking.project={section.project}, id {self.run_id} of {self.path}"
            raise UserError(f"wandb cannot start ({names}): {error}{remedy}") from error

    def _last_kept_step(self, kept_step: int) -> int:
        """The last step that W&B has: `kept_step`, or a later one in an offline log. The last step
        sent if that is unknown."""
        if kept_step == self.last_step:
            return kept_step
        from thinker.training.tracking.wandb_log import last_written_step

        try:
            written = last_written_step(self.path.parent / "wandb", self.run_id)
        except UserError as error:
            print(f"{error}; its newest steps may be missing", file=sys.stderr)
            return self.last_step
        return max(kept_step, written)

    def _read(self) -> tuple[str, int, int]:
        """The id of the wandb run, the last step sent and the last step known to be kept; a new id
        if the run was not tracked before."""
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            last_step = int(saved["last_step"])
            return str(saved["wandb_id"]), last_step, int(saved.get("kept_step", last_step))
        except UNREADABLE:
            return secrets.token_hex(4), -1, -1

    def _save(self) -> None:
        if not self.is_offline:
            self.kept_step = self.last_step  # the server knows what has arrived
        saved = {"wandb_id": self.run_id, "last_step": self.last_step, "kept_step": self.kept_step}
        atomic_write(self.path, json.dumps(saved) + "\n", sync=False)
