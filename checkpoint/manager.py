"""List, write and remove the checkpoints of a run, optionally in the background."""

import os
import re
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from thinker.checkpoint import format as checkpoint_format
from thinker.checkpoint.format import Files
from thinker.checkpoint.weights import to_cpu
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext


class CheckpointManager:
    """Writes checkpoints into a folder, then removes older ones.

    Args:
        keep_last: number of step-N to keep; of "best" and "nonfinite" only the newest is kept.
        keep_every: never remove step-N if N is a multiple of this.
        background: save() copies the tensors and returns; a thread writes one checkpoint at a time.
        cpu_share: share of its time in which that thread may work while nobody waits for it. 1: no limit.
        dist: the ranks that train together. All call save(), and rank 0 writes.
        sharded: each rank writes its own part, in the foreground.
    """

    def __init__(
        self, folder: Path, keep_last: int, keep_every: int | None = None, background: bool = False,
        cpu_share: float = 1.0, dist: DistContext = SINGLE_PROCESS, sharded: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.keep_last, self.keep_every = folder, keep_last, keep_every
        self.cpu_share, self.dist, self.sharded = cpu_share, dist, sharded
        self._executor = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._writing: Future[None] | None = None
        self._is_awaited = threading.Event()

    def save(self, kind: str, step: int, files: Files) -> None:
        """Write KIND-STEP. Raises OSError if that, or the previous save in the background, fails."""
        self.wait()
        name = f"{kind}-{step:08d}"
        if not self.sharded and (self._executor is not None or self.dist.world_size > 1):
            files = to_cpu(files, self.dist, always=self._executor is not None)
            if not self.dist.is_main:
                return
        if self._executor is None:
            self._write(name, kind, files)
        else:
            self._is_awaited.clear()
            self._writing = self._executor.submit(self._write, name, kind, files)

    def wait(self) -> None:
        """Wait until the last save is on the disk. Raises OSError if it failed."""
        self._is_awaited.set()
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Let the thread finish its work, and end it."""
        self._is_awaited.set()
        if self._executor is not None:
            self._executor.shutdown()

    def _write(self, name: str, kind: str, files: Files) -> None:
        throttle = self._throttle if self._executor is not None and self.cpu_share < 1 else None
        checkpoint_format.write_checkpoint(
            self.folder / name, files, throttle, self.dist if self.sharded else None
        )
        if not self.dist.is_main:
            return
        for folder in list_checkpoints(self.folder, kind)[
            : -self.keep_last if kind == "step" else None
        ]:
            is_milestone = (
                kind == "step" and self.keep_every and _number(folder) % self.keep_every == 0
            )
            if folder.name != name and not is_milestone:
                # Renamed first, so that a crash cannot leave a partial checkpoint under its name.
                hidden = folder.with_name(f".{folder.name}.removed")
                shutil.rmtree(hidden, ignore_errors=True)
                folder.rename(hidden)
                shutil.rmtree(hidden)

    def _throttle(self, seconds_worked: float) -> None:
        self._is_awaited.wait(seconds_worked * (1 / self.cpu_share - 1))


def list_checkpoints(folder: Path, kind: str = "step") -> list[Path]:
    """The checkpoints KIND-N in a folder, oldest first, including damaged ones."""
    matching = list(folder.glob(f"{kind}-*"))
    folders = [path for path in matching if path.is_dir() and not path.is_symlink()]
    if not all(map(os.path.lexists, matching)):  # a running training has just replaced one
        return list_checkpoints(folder, kind)
    return sorted(
        (path for path in folders if re.fullmatch(rf"{kind}-\d+", path.name)), key=_number
    )


def _number(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def quarantine(folder: Path, prefix: str) -> None:
    """Rename a checkpoint to PREFIX-NAME, so that the run ignores it. Deletes nothing."""
    target = folder.with_name(f"{prefix}-{folder.name}")
    shutil.rmtree(target, ignore_errors=True)
    folder.rename(target)


def recover(folder: Path) -> None:
    """Clean up after a process that was killed while writing or removing checkpoints. No other process may write."""
    for path in folder.glob(".*"):
        hidden = re.fullmatch(
            r"\.((?:step|best|nonfinite)-\d+)\.(?:\d+\.)?(tmp|removed|replaced)", path.name
        )
        if hidden and hidden[2] == "replaced" and not (folder / hidden[1]).exists():
            path.rename(folder / hidden[1])
        elif hidden:
            shutil.rmtree(path, ignore_errors=True)
