"""Weights & Biases, when asked for. metrics.jsonl is written in any case, by the loop."""

from __future__ import annotations

import secrets
from typing import Any

from errors import UserError
from storage.run_directory import RunDirectory
from training.recipe import Recipe


class Tracker:
    """A run in wandb that goes on under the same id when the training is resumed; nothing at all when disabled."""

    def __init__(self, recipe: Recipe, run: RunDirectory, run_id: str | None) -> None:
        """`run_id` is that of the earlier part of a resumed run, None for a new one.

        Raises UserError where wandb is missing or cannot be reached.
        """
        self.run: Any = None
        section = recipe.tracking
        if section.wandb == "disabled":
            return
        try:
            import wandb
        except ImportError as error:
            raise UserError("tracking.wandb needs the package wandb: pip install wandb, or disabled") from error
        try:
            self.run = wandb.init(
                project=section.project,
                name=section.name or run.path.name,
                id=run_id or secrets.token_hex(4),
                resume="allow",
                mode=section.wandb,
                dir=str(run.path),
                config=recipe.model_dump(),
                settings=wandb.Settings(console="off", silent=section.wandb == "offline"),
            )
        except (wandb.Error, wandb.errors.CommError, wandb.errors.UsageError) as error:
            raise UserError(f"wandb cannot start: {error}; tracking.wandb=offline needs no account") from error

    @property
    def run_id(self) -> str | None:
        """The id to hand in when the run goes on."""
        return self.run.id if self.run else None

    def log(self, line: dict[str, Any]) -> None:
        """Send one line of metrics.jsonl under its step."""
        if self.run:
            self.run.log({key: value for key, value in line.items() if key != "step"}, step=line["step"])

    def finish(self) -> None:
        """Send what is still on its way and end."""
        if self.run:
            self.run.finish()
