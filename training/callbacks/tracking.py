"""Logging to Weights & Biases, in addition to metrics.jsonl."""

import json
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write
from thinker.training.callback import Callback, TrainingRun
from thinker.training.settings.settings import Settings

UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)


class Tracker(Callback):
    """A wandb run on rank 0 that keeps its id when training resumes.

    wandb accepts steps only in increasing order. tracking.json stores the last step sent and is
    replaced before wandb gets that step, so no step is sent twice, even if training is killed and
    repeats steps. It needs no sync, since the page cache outlives a killed process. wandb keeps the
    newest steps in memory, which a kill loses. Therefore tracking.json also has the last step that
    is known to be kept, and the next start reads how far an offline log reaches, or asks the
    server. On start, the lines of metrics.jsonl after the last step that W&B has are sent, also
    such as were trained while tracking was disabled.
    """

    def __init__(self) -> None:
        self.wandb_run: Any = None
        self.pending: dict[str, Any] = {}  # the newest step, as wandb accepts each step once

    def on_start(self, run: TrainingRun) -> None:
        """Start a wandb run. metrics.jsonl must end at the step that training resumes from.

        Raises UserError if wandb cannot start.
        """
        if not run.directory.writes:
            return
        try:
            import wandb  # noqa: F401 - before any file is written
        except ImportError as error:
            raise UserError(
                "tracking.wandb needs the wandb package; run pip install wandb, or disable it"
            ) from error
        self.path = run.directory.path / "tracking.json"
        self.run_id, self.last_step, kept_step = self._read()
        self.last_step = self._last_kept_step(kept_step)
        self.kept_step = self.last_step
        self.is_offline = run.parts.settings.tracking.wandb == "offline"
        self._save()
        self.wandb_run = self._start_wandb(run.parts.settings, run.directory.path)
        if not self.is_offline and self.wandb_run.resumed:
            self.last_step = self.wandb_run.starting_step - 1  # the last step that has arrived
        for line in run.directory.read_metrics():
            self.on_log(line)

    def on_log(self, line: Mapping[str, Any]) -> None:
        """Send one line of metrics.jsonl under its step, unless that step has been sent."""
        if self.wandb_run and line["step"] > self.last_step:
            if line["step"] != self.pending.get("step"):
                self._send()
            self.pending |= line

    def on_end(self, is_complete: bool) -> None:
        """End the wandb run. Sends the newest step only if it is complete, including its
        evaluation."""
        if not self.wandb_run:
            return
        if is_complete:
            self._send()
        self.wandb_run.finish()
        self.kept_step = self.last_step
        self._save()
        if self.wandb_run.offline:
            folder = shlex.quote(str(self.path.parent / "wandb"))
            logs = f"{folder}/offline-run-*-{self.run_id}"
            print(f"upload the log to Weights & Biases: wandb sync {logs}", file=sys.stderr)

    def _start_wandb(self, settings: Settings, folder: Path) -> Any:
        import wandb

        section = settings.tracking
        try:
            return wandb.init(
                project=section.project,
                name=section.name or folder.name,
                id=self.run_id,
                resume="allow",
                mode=section.wandb,
                dir=str(folder),
                config=settings.model_dump(),
                settings=wandb.Settings(console="off", silent=section.wandb == "offline"),
            )
        except wandb.Error as error:
            remedy = ""
            if section.wandb == "online":
                remedy = "; tracking.wandb=offline needs no account"
            names = f"tracking.project={section.project}, id {self.run_id} of {self.path}"
            raise UserError(f"wandb cannot start ({names}): {error}{remedy}") from error

    def _send(self) -> None:
        if self.pending:
            self.last_step = self.pending.pop("step")
            self._save()
            self.wandb_run.log(self.pending, step=self.last_step)
        self.pending = {}

    def _last_kept_step(self, kept_step: int) -> int:
        """The last step that W&B has: `kept_step`, or a later one in an offline log. The last step
        sent if that is unknown."""
        if kept_step == self.last_step:
            return kept_step
        from thinker.training.callbacks.offline_log import last_written_step

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
