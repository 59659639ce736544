"""Write and remove the checkpoints of a run, optionally in the background."""

import re
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from thinker.checkpoint import write_files
from thinker.checkpoint.format import Files
from thinker.checkpoint.listing import list_checkpoints, number_of
from thinker.checkpoint.model_files import to_cpu
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext


class CheckpointManager:
    """Writes checkpoints into a folder, then removes older ones.

    Args:
        keep_last: number of step-N to keep; of "best" and "nonfinite" only the newest is kept.
        keep_every: never remove step-N if N is a multiple of this.
        background: save() copies the tensors and returns; a thread writes one checkpoint at a time.
            Copies of one step at most are in memory.
        cpu_share: share of its time in which that thread may work while nobody waits for it. 1: no
            limit.
        dist: the ranks that train together. All call save(), and rank 0 writes.
        sharded: each rank writes its own part, in the foreground.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        keep_every: int | None = None,
        background: bool = False,
        cpu_share: float = 1.0,
        dist: DistContext = SINGLE_PROCESS,
        sharded: bool = False,
    ) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.cpu_share = cpu_share
        self.dist = dist
        self.sharded = sharded
        self._executor = None
        if background:
            self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._writing: list[Future[None]] = []  # of one step
        self._writing_step = 0
        self._is_awaited = threading.Event()

    def save(self, kind: str, step: int, files: Files) -> None:
        """Write KIND-STEP. Raises OSError if that fails, or the previous save in the background."""
        if step != self._writing_step:
            self.wait()
        in_background = self._executor is not None
        if not self.sharded and (in_background or self.dist.world_size > 1):
            # Training changes the tensors while the thread writes, and rank 0 needs all rows.
            files = to_cpu(files, self.dist, always=in_background)
            if not self.dist.is_main:
                return
        if in_background:
            self._is_awaited.clear()
            self._writing_step = step
            self._writing.append(self._executor.submit(self._write, kind, step, files))
        else:
            self._write(kind, step, files)

    def wait(self) -> None:
        """Wait until all saves are on the disk. Raises OSError if one failed."""
        self._is_awaited.set()
        writing = self._writing
        self._writing = []  # so that an error is raised once
        for save in writing:
            save.result()

    def check(self) -> None:
        """Raise OSError if a save in the background has failed. Waits for nothing otherwise."""
        if any(save.done() and save.exception() is not None for save in self._writing):
            self.wait()

    def close(self) -> None:
        """Let the thread finish its work, and end it."""
        self._is_awaited.set()
        if self._executor is not None:
            self._executor.shutdown()

    def _write(self, kind: str, step: int, files: Files) -> None:
        throttle = None
        if self._executor is not None and self.cpu_share < 1:
            throttle = self._throttle
        folder = self.folder / f"{kind}-{step:08d}"
        ranks = self.dist if self.sharded else None
        write_files.write_checkpoint(folder, files, throttle, ranks)
        if self.dist.is_main:
            self._remove_older(kind, written=folder)

    def _remove_older(self, kind: str, written: Path) -> None:
        # Of other kinds, all older ones go.
        folders = list_checkpoints(self.folder, kind)
        if kind == "step":
            folders = folders[: -self.keep_last]
        for folder in folders:
            is_milestone = False
            if kind == "step" and self.keep_every:
                is_milestone = number_of(folder) % self.keep_every == 0
            if folder != written and not is_milestone:
                # Renamed first, so that a crash cannot leave a partial checkpoint under its name.
                hidden = folder.with_name(f".{folder.name}.removed")
                shutil.rmtree(hidden, ignore_errors=True)
                folder.rename(hidden)
                shutil.rmtree(hidden)

    def _throttle(self, seconds_worked: float) -> None:
        """Rest after work, unless somebody waits for the checkpoint."""
        self._is_awaited.wait(seconds_worked * (1 / self.cpu_share - 1))


def quarantine(folder: Path, prefix: str) -> None:
    """Rename a checkpoint to PREFIX-NAME, so that the run ignores it. Deletes nothing."""
    target = folder.with_name(f"{prefix}-{folder.name}")
    shutil.rmtree(target, ignore_errors=True)
    folder.rename(target)


def recover(folder: Path) -> None:
    """Clean up after a process that was killed while writing or removing checkpoints.

    No other process may write.
    """
    hidden_name = r"\.((?:step|best|nonfinite)-\d+)\.(?:\d+\.)?(tmp|removed|replaced)"
    for path in folder.glob(".*"):
        found = re.fullmatch(hidden_name, path.name)
        if not found:
            continue
        checkpoint = folder / found[1]
        if found[2] == "replaced" and not checkpoint.exists():
            path.rename(checkpoint)  # its successor is not there yet
        else:
            shutil.rmtree(path, ignore_errors=True)
