"""A run directory: the resolved config, the tokenizer, metrics.jsonl, samples.jsonl and
checkpoints/."""

import contextlib
import errno
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
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
        self.samples = self.path / "samples.jsonl"
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
        self._append(self.metrics, line)

    def log_sample(self, step: int, prompt: str, text: str) -> None:
        """Append one line to samples.jsonl: the prompt, and what the model wrote after it. Raises
        RunError if the folder is gone."""
        self._append(self.samples, {"step": step, "prompt": prompt, "text": text})

    def flush_logs(self) -> None:
        """Sync metrics.jsonl and samples.jsonl to the disk.

        Call it before a checkpoint is saved, so that the lines of its steps survive with it.
        """
        for path in (self.metrics, self.samples):
            if self.writes and path.exists():
                sync_to_disk(path)

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Read the lines of metrics.jsonl.

        Skips lines that are damaged or have non-finite values.
        """
        return _read_lines(self.metrics, _are_metrics)

    def read_samples(self) -> Iterator[dict[str, Any]]:
        """Read the lines of samples.jsonl, with the keys step, prompt and text. Skips damaged
        lines."""
        return _read_lines(self.samples, _is_sample)

    def truncate_logs(self, step: int, evaluated_at: int | None) -> None:
        """Drop metrics and samples after `step`, and evaluations after `evaluated_at`.

        The run can then resume from there.
        """
        if not self.writes:
            return
        # No evaluation is kept if none had been saved.
        if evaluated_at is None:
            evaluated_at = -1
        _remove_special_file(self.metrics)
        kept = []
        for line in self.read_metrics():
            is_new = "train_loss" in line and line["step"] > step
            is_new_evaluation = "val_loss" in line and line["step"] > evaluated_at
            if not is_new and not is_new_evaluation:
                kept.append(json.dumps(line) + "\n")
        if self.metrics.exists():
            atomic_write(self.metrics, "".join(kept))

        _remove_special_file(self.samples)
        samples = [json.dumps(line) + "\n" for line in self.read_samples() if line["step"] <= step]
        if self.samples.exists():
            atomic_write(self.samples, "".join(samples))

    def latest(self) -> Path | None:
        """The newest intact checkpoint; see latest_checkpoint()."""
        return latest_checkpoint(self.checkpoints)

    def _append(self, path: Path, line: dict[str, Any]) -> None:
        self.check()
        if self.writes:
            with path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(line) + "\n")


def _read_lines(path: Path, is_valid: Callable[[Any], bool]) -> Iterator[dict[str, Any]]:
    """The valid lines of a file with one JSON value per line."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            line = None
            if text.endswith("\n"):  # otherwise the writer was killed
                with contextlib.suppress(ValueError, RecursionError):
                    line = json.loads(text)
            if is_valid(line):
                yield line


def _remove_special_file(path: Path) -> None:
    """Remove a link, which could lead anywhere, and a pipe, which would block forever."""
    if path.is_symlink() or path.is_fifo():
        path.unlink()


def _are_metrics(line: Any) -> bool:
    """Whether a line of metrics.jsonl is a mapping to finite numbers, with a step."""
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return False
    # Also excludes NaN.
    return all(isinstance(n, int | float) and abs(n) < 1e300 for n in line.values())


def _is_sample(line: Any) -> bool:
    """Whether a line of samples.jsonl has a step, a prompt and a text."""
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return False
    return isinstance(line.get("prompt"), str) and isinstance(line.get("text"), str)
