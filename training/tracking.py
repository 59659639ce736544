"""Weights & Biases, when asked for. metrics.jsonl is written in any case, by the loop."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Any

from errors import UserError
from storage.run_directory import RunDirectory
from training.recipe import Recipe


class Tracker:
    """A run in wandb that goes on under the same id when the training is resumed; nothing at all when disabled.

    What was sent cannot be taken back. So tracking.json in the run directory keeps the id, and how far the run had come
    when it was last interrupted: steps that are made again, from an older checkpoint, are not sent again.
    """

    def __init__(self, recipe: Recipe, run: RunDirectory, run_id: str | None) -> None:
        """`run_id` is that of the earlier part of a resumed run, None for a new one. Before metrics.jsonl is cut.

        Raises UserError where wandb is missing or cannot be reached.
        """
        self.run: Any = None
        self.sent = (-1, False)  # step, and whether its evaluation too
        section = recipe.tracking
        if section.wandb == "disabled":
            return
        try:
            import wandb
        except ImportError as error:
            raise UserError("tracking.wandb needs the package wandb: pip install wandb, or disabled") from error
        known = self._read(run)
        if known is not None and run_id in (None, known[0]):
            run_id, self.sent = known
            self.sent = max([self.sent, *map(_place, run.read_metrics())])
        run_id = run_id or secrets.token_hex(4)
        try:
            self.run = wandb.init(
                project=section.project,
                name=section.name or run.path.name,
                id=run_id,
                resume="allow",
                mode=section.wandb,
                dir=str(run.path),
                config=recipe.model_dump(),
                settings=wandb.Settings(console="off", silent=section.wandb == "offline"),
            )
        except (wandb.Error, wandb.errors.CommError, wandb.errors.UsageError) as error:
            raise UserError(f"wandb cannot start: {error}; tracking.wandb=offline needs no account") from error

        self._path(run).write_text(json.dumps({"wandb_id": run_id, "sent": self.sent}) + "\n", encoding="utf-8")

    @property
    def run_id(self) -> str | None:
        """The id to hand in when the run goes on."""
        return self.run.id if self.run else None

    def log(self, line: dict[str, Any]) -> None:
        """Send one line of metrics.jsonl under its step."""
        if self.run and _place(line) > self.sent:
            self.run.log({key: value for key, value in line.items() if key != "step"}, step=line["step"])

    def finish(self) -> None:
        """Send what is still on its way and end."""
        if self.run:
            self.run.finish()

    @staticmethod
    def _path(run: RunDirectory) -> Path:
        return run.path / "tracking.json"

    def _read(self, run: RunDirectory) -> tuple[str, tuple[int, bool]] | None:
        """Id and place of the run that was tracked here before; None where there is none, or the file is damaged."""
        try:
            known = json.loads(self._path(run).read_text(encoding="utf-8"))
            step, evaluated = known["sent"]
            return str(known["wandb_id"]), (int(step), bool(evaluated))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            print(f"{self._path(run)} is damaged: steps that wandb has may be sent again", file=sys.stderr)
            return None


def _place(line: dict[str, Any]) -> tuple[int, bool]:
    """Where a line of metrics.jsonl stands among the others."""
    return line["step"], "val_loss" in line
