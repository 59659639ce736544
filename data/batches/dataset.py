"""Training data: windows of tokens, and the order in which a run takes them.

A dataset has `len()` and `window(index)`. In training it becomes an *ordered* dataset, which says
which window each sample of a run is. A sample is one row of a batch; samples are numbered from 0
over the whole run.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from thinker.data.batches.permutation import permute

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

    What a sample is depends on its number alone, not on what was read before: so runs resume, and
    ranks and threads read ahead, without an effect on the batches. Methods are called from several
    threads.
    """

    n_sources: int
    is_endless: bool  # nobody knows how many windows an epoch has

    def samples(self, first: int, n: int) -> list[Sample]:
        """The samples first, ..., first + n - 1 of the run. May wait for them."""
        ...

    def window(self, sample: Sample) -> Window:
        """The window of a sample. May wait for it. Raises WindowRemoved if it was removed after
        use."""
        ...

    def epochs(self, n: int) -> list[float]:
        """How often each source has been read after n samples."""
        ...

    def start(self, n: int) -> None:
        """Prepare to read from sample n on. Only the main process is told, and the others wait
        meanwhile."""
        ...

    def close(self, is_finished: bool) -> None:
        """Stop. is_finished: the run has ended, and needs no files of the dataset any more."""
        ...


AnyDataset = Dataset | OrderedDataset | Iterable[Window]
"""What train() takes as a dataset."""


class WindowRemoved(Exception):
    """Error for a window that training has left behind, and that is no longer kept."""


class ShuffledDataset:
    """Every window of a dataset once per epoch, each epoch in a new order.

    Args:
        shift_windows: from the second epoch on, cut the windows of a PackedDataset at other
            positions in each epoch.
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
            key = (self.seed, epoch)
            if self.source > 0:
                key += (self.source,)
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
