"""A run directory: the resolved recipe, the tokenizer, metrics.jsonl and checkpoints/."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from errors import FULL_DISK, UserError
from storage.checkpoint import Damaged, list_checkpoints, verify


class RunDirectory:
    """The files of one run. Nothing is created before create()."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"

    def create(self) -> None:
        """Make the folders. Raises UserError where that is not allowed or a file is in the way."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in FULL_DISK:
                raise
            raise UserError(f"run.dir {self.path} cannot be made a folder: {error.strerror}") from error

    def lock(self) -> None:
        """Keep other trainings out for as long as this process lives. Raises UserError where one is at work here."""
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another training is at work in {self.path}; choose another run.dir") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # some file systems have no locks
                raise

    def unlock(self) -> None:
        """Let others in."""
        os.close(self._lock)

    def write_config(self, tree: dict[str, Any]) -> None:
        """Write the resolved recipe, whole or not at all."""
        temporary = self.config.with_suffix(".tmp")
        temporary.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
        temporary.replace(self.config)

    def read_config(self) -> dict[str, Any] | None:
        """The resolved recipe of a run that was begun here, or None. Raises UserError where it cannot be read."""
        if not self.config.exists():
            return None
        try:
            tree = yaml.safe_load(self.config.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{self.config} is no longer YAML; remove it or choose another run.dir") from error
        return tree if isinstance(tree, dict) else None

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line that was cut off by a crash is left out."""
        if not self.metrics.exists():
            return
        with self.metrics.open(encoding="utf-8") as file:
            for text in file:
                if text.endswith("\n"):
                    yield json.loads(text)

    def cut_metrics(self, step: int) -> None:
        """Remove the lines after `step`: the run goes on from there and will write them again."""
        if not self.metrics.exists():
            return
        kept = [line for line in self.read_metrics() if line["step"] <= step]
        temporary = self.metrics.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        temporary.replace(self.metrics)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, None if there is none yet. One that is damaged is passed over, and said so.

        Raises UserError where there are checkpoints and none of them is whole.
        """
        found = list_checkpoints(self.checkpoints)
        damage: Damaged | None = None
        for folder in reversed(found):
            try:
                verify(folder)
            except Damaged as error:
                print(f"passing over a checkpoint: {error}", file=sys.stderr)
                damage = error
                continue
            if damage is not None:
                print(f"using {folder} instead", file=sys.stderr)
            return folder
        if damage is not None:
            raise UserError(f"no checkpoint in {self.checkpoints} is whole; remove the folder to begin anew")
        return None
