"""The checkpoints of one run as they are made: one after the other, perhaps in the background, and which are kept."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from thinker.checkpoint import checkpoint
from thinker.checkpoint.checkpoint import Files
from thinker.runtime.process_group import SINGLE_PROCESS, DistContext


class CheckpointManager:
    """Writes checkpoints into a folder and then removes those that are kept no longer, never before.

    Args:
        keep_last: how many step-N are kept; of another kind only the one that was written last is.
        keep_every: step-N whose N is a multiple of it are kept for ever.
        background: save() copies the tensors and returns; a thread writes one checkpoint at a time.
        share: of its time, what that thread may work while nobody waits for it. 1 where training leaves cores free.
        dist: that train together, and all save at once. Rank 0 writes.
        sharded: each rank writes its own part, in the foreground.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        keep_every: int | None = None,
        background: bool = False,
        share: float = 1.0,
        dist: DistContext = SINGLE_PROCESS,
        sharded: bool = False,
    ) -> None:
        self.folder, self.keep_last, self.keep_every, self.share = folder, keep_last, keep_every, share
        self.dist, self.sharded = dist, sharded
        self._pool = ThreadPoolExecutor(1, "saver") if background else None
        self._writing: Future[None] | None = None
        self._awaited = threading.Event()

    def save(self, kind: str, step: int, files: Files) -> None:
        """Write KIND-STEP. Raises OSError where that fails, or the checkpoint before it has failed meanwhile."""
        self.wait()
        name = f"{kind}-{step:08d}"
        if not self.sharded and (self._pool is not None or self.dist.world_size > 1):
            files = checkpoint.copied(files, self.dist, always=self._pool is not None)
            if not self.dist.is_main:
                return
        if self._pool is None:
            self._write(name, kind, files)
        else:
            self._awaited.clear()
            self._writing = self._pool.submit(self._write, name, kind, files)

    def wait(self) -> None:
        """Until what was begun is on the disk. Raises OSError where it failed."""
        self._awaited.set()
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the thread, when it has finished its work."""
        self._awaited.set()
        if self._pool is not None:
            self._pool.shutdown()

    def _write(self, name: str, kind: str, files: Files) -> None:
        shared_by = self.dist if self.sharded else None
        checkpoint.write(self.folder / name, files, self._rest if self._pool else lambda seconds: None, shared_by)
        if not self.dist.is_main:
            return
        for folder in checkpoint.list_checkpoints(self.folder, kind)[: -self.keep_last if kind == "step" else None]:
            kept = kind == "step" and self.keep_every and int(folder.name.split("-")[1]) % self.keep_every == 0
            if folder.name != name and not kept:
                checkpoint.remove(folder)

    def _rest(self, worked: float) -> None:
        if self.share < 1:
            self._awaited.wait(worked * (1 / self.share - 1))
