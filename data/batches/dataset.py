"""Training data: windows of tokens, and the order in which a run takes them.

A dataset has `len()` and `window(index)`. In training it becomes an *ordered* dataset, which says which window each
sample of a run is. A sample is one row of a batch; samples are numbered from 0 over the whole run.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from thinker.data.batches.permutation import permute
from thinker.runtime.errors import UserError

Window = tuple[np.ndarray, np.ndarray]
"""Inputs and targets, each (T,) int64. Targets without a loss are IGNORE_INDEX."""


class Sample(NamedTuple):
    """What one sample of a run is."""

    index: int  # of its window, as in reports
    epoch: int = 0  # how often its source was read before
    source: int = 0  # the number of its source, in a dataset that has several


@runtime_checkable
class Dataset(Protocol):
    """Windows without an order of their own. Training shuffles them in each epoch."""

    def __len__(self) -> int:
        """The number of windows."""
        ...

    def window(self, index: int) -> Window:
        """Window `index`, from 0 to len() - 1."""
        ...


@runtime_checkable
class OrderedDataset(Protocol):
    """Windows in the order in which a run takes them.

    What a sample is depends on its number alone, not on what was read before: so runs resume, and ranks and threads
    read ahead, without an effect on the batches. Methods are called from several threads.
    """

    n_sources: int
    is_endless: bool  # nobody knows how many windows an epoch has

    def samples(self, first: int, n: int) -> list[Sample]:
        """The samples first, ..., first + n - 1 of the run. May wait for them."""
        ...

    def window(self, sample: Sample) -> Window:
        """The window of a sample. May wait for it. Raises WindowRemoved if it was removed after use."""
        ...

    def epochs(self, n: int) -> list[float]:
        """How often each source has been read after n samples."""
        ...

    def start(self, n: int) -> None:
        """Prepare to read from sample n on. Only the main process is told, and the others wait meanwhile."""
        ...

    def close(self, is_finished: bool) -> None:
        """Stop. is_finished: the run has ended, and needs no files of the dataset any more."""
        ...


class WindowRemoved(Exception):
    """Error for a window that training has left behind, and that is no longer kept."""


class ShuffledDataset:
    """Every window of a dataset once per epoch, each epoch in a new order.

    Args:
        shift_windows: from the second epoch on, cut the windows of a PackedDataset at other positions in each epoch.
        source: the number of the dataset among several; they have different orders.
    """

    n_sources = 1
    is_endless = False

    def __init__(
        self, dataset: Dataset, seed: int, shift_windows: bool = False, source: int = 0
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.shift_windows = shift_windows
        self.source = source

    def __len__(self) -> int:
        return len(self.dataset)

    def samples(self, first: int, n: int) -> list[Sample]:
        """See OrderedDataset."""
        size = len(self.dataset)
        epochs, places = np.divmod(np.arange(first, first + n), size)
        indices = np.empty(n, np.int64)
        for epoch in np.unique(epochs).tolist():
            is_in_epoch = epochs == epoch
            key = (self.seed, epoch) if self.source == 0 else (self.seed, epoch, self.source)
            indices[is_in_epoch] = permute(places[is_in_epoch], size, key)
        pairs = zip(indices.tolist(), epochs.tolist())
        return [Sample(index, epoch, self.source) for index, epoch in pairs]

    def window(self, sample: Sample) -> Window:
        """See OrderedDataset."""
        if not self.shift_windows:
            return self.dataset.window(sample.index)
        return self.dataset.window(sample.index, self.shift(sample.epoch))

    def shift(self, epoch: int) -> int:
        """How many tokens later than in the first epoch windows start in an epoch.

        From 0 to seq_len - 1: another one in each of seq_len epochs, and 0 in the first.
        """
        seq_len = self.dataset.seq_len
        places = np.array([0, epoch % seq_len])
        first, now = permute(places, seq_len, (self.seed, epoch // seq_len)).tolist()
        return (now - first) % seq_len

    def epochs(self, n: int) -> list[float]:
        """See OrderedDataset."""
        return [n / len(self.dataset)]

    def start(self, n: int) -> None:
        """Nothing to prepare."""

    def close(self, is_finished: bool) -> None:
        """Nothing to stop."""


class IterableDataset:
    """The windows of an iterable, in its order, and again from the start when it ends.

    A run that resumes reads the iterable from the start up to where the run was. All ranks read all of it.

    Args:
        windows: each iteration over it yields the same windows.
        n_kept: the last windows that are kept for threads that are behind the others, and for reports.
    """

    n_sources = 1
    is_endless = True

    def __init__(self, windows: Iterable[Window], n_kept: int) -> None:
        self.windows = windows
        self.n_kept = n_kept
        self._kept: OrderedDict[int, Window] = OrderedDict()  # by the number of the sample
        self._lock = threading.Lock()
        self._reader = self._read()
        self._n_read = 0
        self._size: int | None = None  # the number of windows, as soon as an epoch has ended

    def _read(self) -> Iterator[Window]:
        while True:
            n_before = self._n_read
            yield from self.windows
            if self._size is None:
                self._size = self._n_read
            if self._n_read == n_before:
                raise UserError(
                    "the dataset has no windows; an iterable dataset must yield windows each time"
                    " it is iterated over, so pass a list or an object with __iter__, no generator"
                )

    def samples(self, first: int, n: int) -> list[Sample]:
        """See OrderedDataset."""
        return [Sample(number) for number in range(first, first + n)]

    def window(self, sample: Sample) -> Window:
        """See OrderedDataset. Reads the iterable up to the window."""
        with self._lock:
            while self._n_read <= sample.index:
                window = next(self._reader)
                self._kept[self._n_read] = window
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


def order_dataset(
    dataset: Dataset | OrderedDataset | Iterable[Window], seed: int, n_kept: int
) -> OrderedDataset:
    """Give a user's dataset an order: shuffled in each epoch if it has len() and window(), else its own.

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
