"""Batches made ready in a thread, while the step before is computed."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from data.loader import Loader


class Batch(NamedTuple):
    """What one optimizer step learns from."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, -1 where nothing is to be learned
    count: int  # targets that are counted
    documents: Tensor | None = None  # (B, T) int64, numbered, where they are isolated


class Ahead:
    """A loader whose next batch is always in the making. Batches stay a pure function of the step: nothing is skipped.

    Args:
        pinned: in page-locked memory, from which a GPU reads while the host goes on.
    """

    def __init__(self, loader: Loader, pinned: bool = False) -> None:
        self.loader, self.pinned = loader, pinned
        self.waited = 0.0  # seconds, in all
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[int, Future[Batch]] | None = None

    def batch(self, step: int) -> Batch:
        """The batch of a step (from 0); begins the one after."""
        start = time.perf_counter()
        ready = self._next[1] if self._next is not None and self._next[0] == step else self._begin(step)
        batch = ready.result()
        self._next = (step + 1, self._begin(step + 1))
        self.waited += time.perf_counter() - start
        return batch

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, step: int) -> Future[Batch]:
        return self._pool.submit(self._make, step)

    def _make(self, step: int) -> Batch:
        inputs, targets = self.loader.batch(step)
        documents, count = self.loader.windows.documents(inputs), int((targets >= 0).sum())
        if self.pinned:
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
            documents = None if documents is None else documents.pin_memory()
        return Batch(inputs, targets, count, documents)
