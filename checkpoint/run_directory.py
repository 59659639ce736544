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

from thinker.checkpoint.listing import CHECKPOINTS, latest_checkpoint
from thinker.runtime.errors import RunError, UserError
from thinker.runtime.files import atomic_write, make_folder, sync_to_disk


class RunDirectory:
    """The files of one run; create() creates them. Only rank 0 (`writes`) writes and locks."""

    def __init__(self, path: str | Path, writes: bool = True) -> None:
        self.path = Path(path)
        self.writes = writes
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / CHECKPOINTS
        self.dataset_files = self.path / "streams"  # for as long as a run reads them
        self._lock = FileLock(self.path / ".lock", timeout=0)
        self._locked_file: os.stat_result | None = None

    def create(self) -> None:
        """Create the folders. Raises UserError if that is not allowed or a file is in the way."""
        if self.writes:
            make_folder(self.checkpoints, "run.dir")

    def lock(self) -> None:
        """Lock the folder, if it exists, so that no other process trains in it.

        The operating system locks .lock and releases it when the process ends in any way. .owner
        names the process. Raises UserError if another process has the lock.
        """
        if self._locked_file is not None or not self.writes or not self.path.is_dir():
            return
        path = self.path / ".lock"
        owner = self.path / ".owner"
        try:
            self._lock.acquire()
        except Timeout as error:
            name = "unknown"
            if owner.is_file():
                name = owner.read_text(encoding="utf-8", errors="replace")[:200].strip()
            raise UserError(
                f"another process is training in {self.path} ({name}); "
                "wait for it, or choose another run.dir"
            ) from error
        except OSError as error:
            # Some file systems cannot lock files.
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            print(
                f"cannot lock files in {self.path}; do not start a second run there",
                file=sys.stderr,
            )
            path.touch()
        # To notice if the folder is removed or replaced while we train.
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
                f"{self.path} was removed, moved or replaced during training; "
                "set run.dir to its new path"
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
        """Sync metrics.jsonl to the disk.

        Call it before a checkpoint is saved, so that the lines of its steps survive with it.
        """
        if self.writes and self.metrics.exists():
            sync_to_disk(self.metrics)

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Read the lines of metrics.jsonl.

        Skips lines that are damaged or have non-finite values.
        """
        if not self.metrics.is_file():
            return
        with self.metrics.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                line = None
                if text.endswith("\n"):  # otherwise the writer was killed
                    with contextlib.suppress(ValueError, RecursionError):
                        line = json.loads(text)
                if _are_metrics(line):
                    yield line

    def truncate_metrics(self, step: int, evaluated_at: int | None) -> None:
        """Drop metrics after `step`, and evaluations after `evaluated_at`.

        The run can then resume from there.
        """
        if not self.writes:
            return
        if self.metrics.is_symlink() or self.metrics.is_fifo():
            self.metrics.unlink()  # a link could lead anywhere, and a pipe block forever
        # No evaluation is kept if none had been saved.
        if evaluated_at is None:
            evaluated_at = -1
        kept = []
        for line in self.read_metrics():
            is_new = "train_loss" in line and line["step"] > step
            is_new_evaluation = "val_loss" in line and line["step"] > evaluated_at
            if not is_new and not is_new_evaluation:
                kept.append(json.dumps(line) + "\n")
        if self.metrics.exists():
            atomic_write(self.metrics, "".join(kept))

    def latest(self) -> Path | None:
        """The newest intact checkpoint; see latest_checkpoint()."""
        return latest_checkpoint(self.checkpoints)


def _are_metrics(line: Any) -> bool:
    """Whether a line of metrics.jsonl is a mapping to finite numbers, with a step."""
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return False
    # Also excludes NaN.
    return all(isinstance(n, int | float) and abs(n) < 1e300 for n in line.values())
