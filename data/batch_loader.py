"""Training batches, whose order is a pure function of (seed, step)."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from thinker.data.batches import PackedDataset
from thinker.data.mixture import Mixture, MixtureSource
from thinker.data.permutation import permute
from thinker.runtime.errors import UserError


class BatchLoader:
    """Training batches as pure functions of (seed, step): every window once per epoch, each epoch in a new order.

    In a mixture, every source has its own epochs.

    Args:
        shift_windows: from the second epoch on, cut contiguous windows at other positions in each epoch.
        mixture: the order of the sources. None: there is one source.
        bounds: (S + 1,) the first window of each source in the dataset, and the end of the last one.
    """

    def __init__(
        self, dataset: PackedDataset, batch_size: int, seed: int, shift_windows: bool = False,
        mixture: Mixture | None = None, bounds: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        n_tokens, seq_len = dataset.tokens.n_tokens, dataset.seq_len
        if n_tokens <= seq_len:
            needs = f"data.seq_len={seq_len} needs {seq_len + 1}; lower data.seq_len or add text"
            raise UserError(f"the training split has {n_tokens} tokens, but {needs}")
        self.dataset, self.batch_size, self.seed, self.shift_windows = dataset, batch_size, seed, shift_windows
        self.mixture = mixture or Mixture([MixtureSource({0: 1.0})])
        self.bounds = np.array([0, len(dataset)] if bounds is None else bounds)

    def sample_ids(self, step: int) -> list[int]:
        """The indices of the windows in the batch of a step (from 0)."""
        sources, epochs, numbers = self._samples(step)
        ids = np.empty(self.batch_size, np.int64)
        for source, epoch in sorted(set(zip(sources.tolist(), epochs.tolist()))):
            part = (sources == source) & (epochs == epoch)
            first, end = self.bounds[source : source + 2].tolist()
            key = (self.seed, epoch) if source == 0 else (self.seed, epoch, source)
            ids[part] = first + permute(numbers[part], end - first, key)
        return ids.tolist()

    def sources(self, step: int) -> list[int]:
        """The source of each window in the batch of a step."""
        return self._samples(step)[0].tolist()

    def batch(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of a step, each (batch_size, T) int64; `rows` selects the rows of a rank."""
        return self.dataset.batch(self.sample_ids(step)[rows], self.shifts(step)[rows])

    def shifts(self, step: int) -> list[int]:
        """How many tokens later than in the first epoch each window in the batch of a step starts."""
        if not self.shift_windows:
            return [0] * self.batch_size
        return [self._shift(epoch) for epoch in self._samples(step)[1].tolist()]

    def epochs(self, steps: int) -> list[float]:
        """How often each source has been read after so many steps."""
        return (self.mixture.taken(steps * self.batch_size) / np.diff(self.bounds)).tolist()

    def _samples(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Source, epoch and number within the epoch of each sample of a step, each (batch_size,) int64."""
        sources, numbers = self.mixture.samples(step * self.batch_size, self.batch_size)
        return sources, *np.divmod(numbers, np.diff(self.bounds)[sources])

    def _shift(self, epoch: int) -> int:
        """From 0 to seq_len - 1: another one in each of seq_len epochs, and 0 in the first."""
        seq_len = self.dataset.seq_len
        first, now = permute(np.array([0, epoch % seq_len]), seq_len, (self.seed, epoch // seq_len)).tolist()
        return (now - first) % seq_len
