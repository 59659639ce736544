"""A run directory: the resolved config, the tokenizer, metrics.jsonl and checkpoints/."""

import contextlib
import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from thinker.checkpoint.format import CorruptCheckpoint, verify
from thinker.checkpoint.manager import list_checkpoints
from thinker.runtime.errors import RunError, UserError
from thinker.runtime.files import atomic_write, make_folder, sync_to_disk


class RunDirectory:
    """The files of one run; create() creates them. Only rank 0 (`writes`) writes and locks."""

    def __init__(self, path: str | Path, writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes
        self.config, self.metrics = self.path / "config.yaml", self.path / "metrics.jsonl"
        self.checkpoints, self.streams = self.path / "checkpoints", self.path / "streams"
        self._lock = FileLock(self.path / ".lock", timeout=0)
        self._locked_file: os.stat_result | None = None

    def create(self) -> None:
        """Create the folders. Raises UserError if that is not allowed or a file is in the way."""
        if self.writes:
            make_folder(self.checkpoints, "run.dir")

    def lock(self) -> None:
        """Lock the folder, if it exists, so that no other process trains in it.

        The operating system locks .lock and releases it when the process ends in any way. .owner names the process.
        Raises UserError if another process has the lock.
        """
        if self._locked_file is not None or not self.writes or not self.path.is_dir():
            return
        path, owner = self.path / ".lock", self.path / ".owner"
        try:
            self._lock.acquire()
        except Timeout as error:
            name = (
                owner.read_text(encoding="utf-8", errors="replace")[:200].strip()
                if owner.is_file()
                else "unknown"
            )
            message = f"another process is training in {self.path} ({name}); wait for it, or choose another run.dir"
            raise UserError(message) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            print(
                f"cannot lock files in {self.path}; do not start a second run there",
                file=sys.stderr,
            )
            path.touch()
        self._locked_file = path.stat()
        atomic_write(owner, f"process {os.getpid()} on {socket.gethostname()}\n")

    def unlock(self) -> None:
        """Let other processes train in the folder."""
        self._lock.release()
        self._locked_file = None

    def check(self) -> None:
        """Raise RunError if the folder that this process has locked was removed or replaced."""
        if self._locked_file is None:
            return
        is_same = False
        with contextlib.suppress(OSError):
            is_same = os.path.samestat(os.stat(self.path / ".lock"), self._locked_file)
        if not is_same:
            raise RunError(
                f"{self.path} was removed, moved or replaced during training; set run.dir to its new path"
            )

    def write_config(self, tree: dict[str, Any]) -> None:
        """Write the resolved config atomically."""
        if self.writes:
            atomic_write(self.config, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl. Raises RunError if the folder is gone."""
        self.check()
        if self.writes:
            with self.metrics.open("a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(line) + "\n")

    def flush_metrics(self) -> None:
        """Sync metrics.jsonl to the disk, so that its lines are there before a checkpoint of the same step."""
        if self.writes and self.metrics.exists():
            sync_to_disk(self.metrics)

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Read the lines of metrics.jsonl. Skips lines that are damaged or have non-finite values."""
        if not self.metrics.is_file():
            return
        with self.metrics.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                with contextlib.suppress(ValueError, RecursionError):
                    line = json.loads(text) if text.endswith("\n") else None
                    values = line.values() if isinstance(line, dict) else [None]
                    is_numeric = all(
                        isinstance(n, int | float) and abs(n) < 1e300 for n in values
                    )  # excludes NaN
                    if is_numeric and isinstance(line.get("step"), int):
                        yield line

    def truncate_metrics(self, step: int, evaluated_at: int | None) -> None:
        """Drop metrics after `step`, and evaluations after `evaluated_at`, so that the run can resume from there."""
        if not self.writes:
            return
        if self.metrics.is_symlink() or self.metrics.is_fifo():
            self.metrics.unlink()  # a link could lead anywhere, and a pipe block forever
        last = {"train_loss": step, "val_loss": -1 if evaluated_at is None else evaluated_at}
        kept = [
            line
            for line in self.read_metrics()
            if all(line["step"] <= last[key] for key in last if key in line)
        ]
        if self.metrics.exists():
            atomic_write(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def latest(self) -> Path | None:
        """The newest intact checkpoint, or None if there are none. Raises UserError if all are damaged."""
        damaged: set[Path] = set()
        while candidates := [
            folder for folder in list_checkpoints(self.checkpoints) if folder not in damaged
        ]:
            newest = candidates[-1]
            try:
                verify(newest)
                if damaged:
                    print(f"using {newest} instead", file=sys.stderr)
                return newest
            except CorruptCheckpoint as error:
                if newest.exists():  # otherwise a running training has just replaced it
                    print(f"skipping a damaged checkpoint: {error}", file=sys.stderr)
                    damaged.add(newest)
        if not damaged:
            return None
        has_best = bool(list_checkpoints(self.checkpoints, "best"))
        hint = "sample with --checkpoint best, or " if has_best else ""
        raise UserError(
            f"all checkpoints in {self.checkpoints} are damaged; {hint}train again in another run.dir"
        )
