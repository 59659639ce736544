"""Logging to Weights & Biases, in addition to metrics.jsonl."""

import json
import secrets
import shlex
import sys
from typing import Any

from thinker.checkpoint.run_directory import RunDirectory
from thinker.runtime.errors import UserError
from thinker.runtime.files import atomic_write
from thinker.training.settings.settings import Settings


class Tracker:
    """A wandb run on rank 0 that keeps its id when training resumes. Does nothing if disabled.

    wandb accepts steps only in increasing order. tracking.json stores the last step sent and is replaced before wandb
    gets that step, so no step is sent twice, even if training is killed and repeats steps. It needs no sync, since the
    page cache outlives a killed process. A kill loses only steps that wandb still has in memory. On start, the lines of
    metrics.jsonl after the last step sent are sent, such as steps trained while tracking was disabled.
    """

    def __init__(self, settings: Settings, run: RunDirectory) -> None:
        """metrics.jsonl must end at the step that training resumes from. Raises UserError if wandb cannot start."""
        self.run: Any = None
        self.path = run.path / "tracking.json"
        self.pending: dict[
            str, Any
        ] = {}  # lines of the newest step, as wandb accepts each step once
        section = settings.tracking
        if section.wandb == "disabled" or not run.writes:
            return
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "tracking.wandb needs the wandb package; run pip install wandb, or disable it"
            ) from error
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            self.run_id, self.last_step = str(saved["wandb_id"]), int(saved["last_step"])
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
            RecursionError,
        ):  # not tracked before
            self.run_id, self.last_step = secrets.token_hex(4), -1
        self._save()
        try:
            self.run = wandb.init(
                project=section.project, name=section.name or run.path.name, id=self.run_id, resume="allow",
                mode=section.wandb, dir=str(run.path), config=settings.model_dump(),
                settings=wandb.Settings(console="off", silent=section.wandb == "offline"),
            )  # fmt: skip
        except wandb.Error as error:
            remedy = (
                "; tracking.wandb=offline needs no account" if section.wandb == "online" else ""
            )
            names = f"tracking.project={section.project}, id {self.run_id} of {self.path}"
            raise UserError(f"wandb cannot start ({names}): {error}{remedy}") from error
        if section.wandb == "online" and self.run.resumed:
            self.last_step = self.run.starting_step - 1  # the last step that has arrived
        for line in run.read_metrics():
            self.log(line)

    def log(self, line: dict[str, Any]) -> None:
        """Send one line of metrics.jsonl under its step, unless that step has been sent."""
        if self.run and line["step"] > self.last_step:
            if line["step"] != self.pending.get("step"):
                self._send()
            self.pending |= line

    def finish(self, is_complete: bool = True) -> None:
        """End the wandb run. Sends the newest step only if it is complete, including its evaluation."""
        if self.run:
            if is_complete:
                self._send()
            self.run.finish()
            if self.run.offline:
                logs = f"{shlex.quote(str(self.path.parent / 'wandb'))}/offline-run-*-{self.run_id}"
                print(f"upload the log to Weights & Biases: wandb sync {logs}", file=sys.stderr)

    def _send(self) -> None:
        if self.pending:
            self.last_step = self.pending.pop("step")
            self._save()
            self.run.log(self.pending, step=self.last_step)
        self.pending = {}

    def _save(self) -> None:
        atomic_write(
            self.path,
            json.dumps({"wandb_id": self.run_id, "last_step": self.last_step}) + "\n",
            sync=False,
        )
