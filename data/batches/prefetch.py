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
    sources: Tensor | None = None  # (B,) int64, of a dataset with several sources only
    windows: Tensor | None = None  # (B,) int64, the index of each sequence in the dataset
    target_losses: Tensor | None = None  # (B, T) fp32, which an objective fills if it is there

    def rows(self, rows: slice, device: torch.device) -> "Batch":
        """Some rows, with the tokens on a device. n_targets stays that of the whole batch."""
        document_ids = self.document_ids
        if document_ids is not None:
            document_ids = document_ids[rows].to(device, non_blocking=True)
        sources, windows = self.sources, self.windows
        if sources is not None:
            sources = sources[rows]
        if windows is not None:
            windows = windows[rows]
        return self._replace(
            inputs=self.inputs[rows].to(device, non_blocking=True),
            targets=self.targets[rows].to(device, non_blocking=True),
            document_ids=document_ids,
            sources=sources,
            windows=windows,
        )


class Prefetcher:
    """Prepare the next batches of a loader ahead of time; each batch remains a pure function of its
    step.

    pinned: use page-locked memory, which a GPU reads while the host continues. rows: the rows of
    this rank. num_workers: number of threads, one batch each; with 0 a batch is prepared when it is
    requested.
    """

    def __init__(
        self,
        loader: BatchLoader,
        pinned: bool = False,
        rows: slice = slice(None),
        num_workers: int = 1,
    ) -> None:
        self.loader = loader
        self.pinned = pinned
        self.rows = rows
        self.num_workers = num_workers
        self.waited = 0.0  # seconds in total
        self._pool = ThreadPoolExecutor(max(1, num_workers), thread_name_prefix="batches")
        self._pending: dict[int, Future[Batch]] = {}

    def batch(self, step: int, is_interrupted: Callable[[], bool] = lambda: False) -> Batch | None:
        """Return the batch of a step (from 0) and start to prepare the following batches.

        is_interrupted: asked while the batch is not there. If true, returns None instead of waiting
        for it.
        """
        start = time.perf_counter()
        pending = self._pending
        self._pending = {}
        for wanted in range(step, step + 1 + self.num_workers):
            if wanted in pending:
                self._pending[wanted] = pending[wanted]
            else:
                self._pending[wanted] = self._pool.submit(self._make, wanted)
        future = self._pending[step]
        while not future.done():
            if is_interrupted():
                return None
            wait([future], timeout=POLL_SECONDS)
        del self._pending[step]
        self.waited += time.perf_counter() - start
        return future.result()

    def close(self, is_finished: bool = False) -> None:
        """Stop the threads. is_finished: the run has ended, and needs no files of its dataset any
        more."""
        self.loader.close(is_finished)
        self._pool.shutdown(cancel_futures=True)

    def _make(self, step: int) -> Batch:
        inputs, targets = self.loader.batch(step, self.rows)
        document_ids = self.loader.document_ids(inputs)
        if self.pinned:
            inputs = inputs.pin_memory()
            targets = targets.pin_memory()
            if document_ids is not None:
                document_ids = document_ids.pin_memory()
        n_targets = int((targets != IGNORE_INDEX).sum())
        samples = self.loader.samples(step)[self.rows]
        windows = torch.tensor([sample.index for sample in samples])
        sources = None
        if self.loader.dataset.n_sources > 1:
            sources = torch.tensor([sample.source for sample in samples])
        return Batch(inputs, targets, n_targets, document_ids, sources, windows)
