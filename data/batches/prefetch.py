"""Prefetching of batches in threads."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from torch import Tensor

from thinker.data.batches.batch_loader import BatchLoader
from thinker.runtime.constants import IGNORE_INDEX

POLL_SECONDS = 0.2  # between looks for an interruption


class Batch(NamedTuple):
    """The batch of one optimizer step."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, IGNORE_INDEX for no target
    n_targets: int  # targets other than IGNORE_INDEX
    document_ids: Tensor | None = None  # (B, T) int64, with document_masking only
    sources: Tensor | None = None  # (B,) int64, the source of each sequence, in a mixture only
    windows: Tensor | None = None  # (B,) int64, the index of each sequence in its dataset or stream
    target_losses: Tensor | None = None  # (B, T) fp32, which an objective fills if it is there

    def rows(self, rows: slice, device: torch.device) -> "Batch":
        """Some rows, with the tokens on a device. n_targets stays that of the whole batch."""
        document_ids = self.document_ids
        if document_ids is not None:
            document_ids = document_ids[rows].to(device, non_blocking=True)
        return self._replace(
            inputs=self.inputs[rows].to(device, non_blocking=True),
            targets=self.targets[rows].to(device, non_blocking=True),
            document_ids=document_ids,
            sources=None if self.sources is None else self.sources[rows],
            windows=None if self.windows is None else self.windows[rows],
        )


class Prefetcher:
    """Prepare the next batches of a loader ahead of time; each batch remains a pure function of its step.

    pinned: use page-locked memory, which a GPU reads while the host continues. rows: the rows of this rank.
    num_workers: number of threads, one batch each; with 0 a batch is prepared when it is requested.
    """

    def __init__(
        self,
        loader: BatchLoader,
        pinned: bool = False,
        rows: slice = slice(None),
        num_workers: int = 1,
    ) -> None:
        self.loader, self.pinned, self.rows, self.num_workers = loader, pinned, rows, num_workers
        self.waited = 0.0  # seconds in total
        self._pool = ThreadPoolExecutor(max(1, num_workers), thread_name_prefix="batches")
        self._pending: dict[int, Future[Batch]] = {}

    def batch(self, step: int, is_interrupted: Callable[[], bool] = lambda: False) -> Batch | None:
        """Return the batch of a step (from 0) and start to prepare the following batches.

        is_interrupted: asked while the batch is not there. If true, returns None instead of waiting for it.
        """
        start = time.perf_counter()
        steps = range(step, step + 1 + self.num_workers)
        self._pending = {s: self._pending.get(s) or self._pool.submit(self._make, s) for s in steps}
        future = self._pending[step]
        while not future.done():
            if is_interrupted():
                return None
            wait([future], timeout=POLL_SECONDS)
        del self._pending[step]
        self.waited += time.perf_counter() - start
        return future.result()

    def close(self, is_finished: bool = False) -> None:
        """Stop the threads. is_finished: the run has ended, and needs the files of streams no longer."""
        self.loader.close(is_finished)
        self._pool.shutdown(cancel_futures=True)

    def _make(self, step: int) -> Batch:
        inputs, targets = self.loader.batch(step, self.rows)
        document_ids = self.loader.dataset.document_ids(inputs)
        if self.pinned:
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
            document_ids = None if document_ids is None else document_ids.pin_memory()
        is_mixture = len(self.loader.bounds) > 2
        sources = torch.tensor(self.loader.sources(step)[self.rows]) if is_mixture else None
        windows = torch.tensor(self.loader.sample_ids(step)[self.rows])
        return Batch(
            inputs, targets, int((targets != IGNORE_INDEX).sum()), document_ids, sources, windows
        )
