"""Batches made ready in a thread, while the step before is computed."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from thinker.data.batches import BatchLoader
from thinker.runtime.constants import IGNORE_INDEX


class Batch(NamedTuple):
    """What one optimizer step learns from."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, -1 where nothing is to be learned
    n_targets: int  # targets that are counted
    document_ids: Tensor | None = None  # (B, T) int64, numbered, where they are isolated


class Prefetcher:
    """A loader whose next batches are always in the making. They stay a pure function of the step: none is skipped.

    Args:
        pinned: in page-locked memory, from which a GPU reads while the host goes on.
        rows: which of each batch's: those of one rank.
        num_workers: threads, each making a batch; 0: a batch is made when it is asked for.
    """

    def __init__(
        self, loader: BatchLoader, pinned: bool = False, rows: slice = slice(None), num_workers: int = 1
    ) -> None:
        self.loader, self.pinned, self.rows, self.num_workers = loader, pinned, rows, num_workers
        self.waited = 0.0  # seconds, in all
        self._pool = ThreadPoolExecutor(max(1, num_workers), thread_name_prefix="batches")
        self._coming: dict[int, Future[Batch]] = {}

    def batch(self, step: int) -> Batch:
        """The batch of a step (from 0); begins those after it."""
        start = time.perf_counter()
        batch = self._coming[step].result() if step in self._coming else self._make(step)
        following = range(step + 1, step + 1 + self.num_workers)
        self._coming = {each: self._coming.get(each) or self._pool.submit(self._make, each) for each in following}
        self.waited += time.perf_counter() - start
        return batch

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _make(self, step: int) -> Batch:
        inputs, targets = self.loader.batch(step, self.rows)
        documents, count = self.loader.dataset.document_ids(inputs), int((targets != IGNORE_INDEX).sum())
        if self.pinned:
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
            documents = None if documents is None else documents.pin_memory()
        return Batch(inputs, targets, count, documents)
