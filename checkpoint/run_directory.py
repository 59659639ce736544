"""A run directory: the resolved config, the tokenizer, metrics.jsonl and checkpoints/."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from thinker.checkpoint.checkpoint import CorruptCheckpoint, flush, list_checkpoints, verify
from thinker.runtime.errors import FULL_DISK, RunError, UserError


class RunDirectory:
    """The files of one run. Nothing is created before create().

    Args: writes: false on all ranks but the first, where nothing is written, and nothing locked.
    """

    def __init__(self, path: str | Path, writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None

    def create(self) -> None:
        """Make the folders. Raises UserError where that is not allowed or a file is in the way."""
        if not self.writes:
            return
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in FULL_DISK:
                raise
            raise UserError(f"run.dir {self.path} cannot be made a folder: {error.strerror}") from error

    def lock(self) -> None:
        """Keep other trainings out for as long as this process lives, if the folder is there yet.

        The lock is the system's, so that one of a dead process does not outlive it; the file only tells whose it is.
        Raises UserError where a training is at work here, or the folder cannot be written to.
        """
        if self._lock is not None or not self.writes or not self.path.is_dir():
            return
        path = self.path / ".lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno in FULL_DISK:
                raise
            raise UserError(f"run.dir {self.path} cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(lock, 200).decode(errors="replace").strip()
            os.close(lock)
            raise UserError(
                f"another training is at work in {self.path} ({owner}); wait for it, or choose another run.dir"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            print(f"{self.path} lies where files cannot be locked: start no second training there", file=sys.stderr)
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._lock = lock

    def unlock(self) -> None:
        """Let others in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def check(self) -> None:
        """Raise RunError where the folder that this process has locked is gone, or another is in its place."""
        if self._lock is None:
            return
        try:
            there = os.stat(self.path / ".lock")
        except OSError as error:
            raise RunError(f"{self.path} was removed or moved away while the training was at work in it") from error
        if not os.path.samestat(there, os.fstat(self._lock)):
            raise RunError(f"{self.path} was replaced by another folder while the training was at work in it")

    def write_config(self, tree: dict[str, Any]) -> None:
        """Write the resolved config, whole or not at all."""
        if not self.writes:
            return
        replace_file(self.config, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl. Raises RunError where the folder is gone."""
        self.check()
        if not self.writes:
            return
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def flush_metrics(self) -> None:
        """Have the disk hold every line, before it holds a checkpoint of the same step."""
        if self.writes and self.metrics.exists():
            flush(self.metrics)

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl; one that was cut off or spoilt by a crash is left out."""
        if not self.metrics.exists():
            return
        with self.metrics.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                with contextlib.suppress(ValueError, RecursionError):
                    line = json.loads(text) if text.endswith("\n") else None
                    numbers = isinstance(line, dict) and all(isinstance(value, int | float) for value in line.values())
                    if numbers and isinstance(line.get("step"), int):
                        yield line

    def truncate_metrics(self, step: int, evaluated_at: int | None) -> None:
        """Keep what was logged up to `step`, and of evaluations up to `evaluated_at`: the run goes on from there."""
        if not self.writes:
            return
        if self.metrics.is_symlink():
            self.metrics.unlink()  # it could lead anywhere
        if not self.metrics.exists():
            return
        last = {"train_loss": step, "val_loss": -1 if evaluated_at is None else evaluated_at}
        kept = [
            line for line in self.read_metrics() if all(line["step"] <= end for key, end in last.items() if key in line)
        ]
        replace_file(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def latest(self) -> Path | None:
        """The newest whole checkpoint, None if there is none yet. One that is damaged is passed over, and said so.

        Raises UserError where there are checkpoints and none of them is whole.
        """
        found = list_checkpoints(self.checkpoints)
        damaged = False
        for folder in reversed(found):
            try:
                verify(folder)
            except CorruptCheckpoint as error:
                if not folder.exists():
                    return self.latest()  # a training at work has just removed it, and made another
                print(f"passing over a checkpoint: {error}", file=sys.stderr)
                damaged = True
                continue
            if damaged:
                print(f"using {folder} instead", file=sys.stderr)
            return folder
        if damaged:
            best = ", ".join(path.name for path in list_checkpoints(self.checkpoints, "best"))
            hint = f"; there is {best} to sample from (--checkpoint best)" if best else ""
            raise UserError(
                f"no checkpoint in {self.checkpoints} is whole{hint}; to train anew choose another run.dir, or move "
                "that folder away"
            )
        return None


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all; a link in its place is replaced, not followed."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
    flush(temporary)
    temporary.replace(path)
