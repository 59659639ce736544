"""Datasets of the user: any object with windows by index, or any iterable of windows."""

import threading
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from thinker.data.batches.dataset import (
    Dataset,
    OrderedDataset,
    Sample,
    ShuffledDataset,
    Window,
    WindowRemoved,
)
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError


def order_dataset(
    dataset: Dataset | OrderedDataset | Iterable[Window], seed: int, n_kept: int
) -> OrderedDataset:
    """Give a user's dataset an order: shuffled in each epoch if it has len() and window(), else its
    own.

    n_kept: see IterableDataset.

    Raises UserError for anything that is no dataset.
    """
    if isinstance(dataset, OrderedDataset):
        return dataset
    if isinstance(dataset, Dataset):
        if len(dataset) == 0:
            raise UserError("the dataset has no windows; give it at least one")
        return ShuffledDataset(dataset, seed)
    if isinstance(dataset, Iterable):
        return IterableDataset(dataset, n_kept)
    needs = "len() and window(index), or iteration over windows"
    raise UserError(f"the dataset is a {type(dataset).__name__}, but a dataset needs {needs}")


def check_window(window: Window, seq_len: int, vocab_size: int) -> None:
    """Raise UserError unless the first window of a user's dataset has the right shape, type and
    token ids."""
    needs = f"a window is (inputs, targets), two integer arrays of shape ({seq_len},)"
    if not isinstance(window, tuple) or len(window) != 2:
        raise UserError(f"the dataset yields {type(window).__name__}, but {needs}")
    for name, array in zip(("inputs", "targets"), window):
        if not isinstance(array, np.ndarray) or array.dtype != np.int64:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise UserError(f"{name} of the dataset are {kind}, not numpy arrays of int64; {needs}")
        if array.shape != (seq_len,):
            raise UserError(f"{name} of the dataset have the shape {array.shape}; {needs}")
        ids = array[array != IGNORE_INDEX] if name == "targets" else array
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise UserError(
                f"{name} of the dataset have ids outside the vocabulary of {vocab_size} tokens"
            )


class IterableDataset:
    """The windows of an iterable, in its order, and again from the start when it ends.

    A run that resumes reads the iterable from the start up to where the run was, so it must yield
    the same windows each time. All ranks read all of it.

    Args:
        windows: each iteration over it yields the same windows.
        n_kept: the last windows that are kept for threads that are behind the others, and for
            reports.
    """

    n_sources = 1
    is_endless = True

    def __init__(self, windows: Iterable[Window], n_kept: int) -> None:
        self.windows = windows
        self.n_kept = n_kept
        self._kept: OrderedDict[int, Window] = OrderedDict()  # by the number of the sample
        self._lock = threading.Lock()
        self._iterator = iter(windows)
        self._n_read = 0
        self._size: int | None = None  # the number of windows, as soon as an epoch has ended

    def _read(self) -> Window:
        """The next window, if necessary of another iteration."""
        for _ in range(2):
            for window in self._iterator:
                return window
            if self._size is None:
                self._size = self._n_read
            self._iterator = iter(self.windows)
        raise UserError(
            "the dataset has no more windows; an iterable dataset must yield windows each "
            "time it is iterated over, so "
            "pass a list or an object with __iter__, no generator"
        )

    def samples(self, first: int, n: int) -> list[Sample]:
        """See OrderedDataset."""
        return [Sample(number) for number in range(first, first + n)]

    def window(self, sample: Sample) -> Window:
        """See OrderedDataset. Reads the iterable up to the window."""
        with self._lock:
            while self._n_read <= sample.index:
                self._kept[self._n_read] = self._read()
                self._n_read += 1
                if len(self._kept) > self.n_kept:
                    self._kept.popitem(last=False)
            if sample.index not in self._kept:
                raise WindowRemoved
            return self._kept[sample.index]

    def epochs(self, n: int) -> list[float]:
        """See OrderedDataset. 0 as long as the first epoch has not ended."""
        return [n / self._size if self._size else 0.0]

    def start(self, n: int) -> None:
        """Nothing to prepare."""

    def close(self, is_finished: bool) -> None:
        """Nothing to stop."""
