"""Training batches, whose order is a pure function of (seed, step)."""

import numpy as np
from torch import Tensor

from thinker.data.batches import PackedDataset
from thinker.data.permutation import permute
from thinker.runtime.errors import UserError


class BatchLoader:
    """Training batches as pure functions of (seed, step): every window once per epoch, each epoch in a new order.

    shift_windows: from the second epoch on, cut contiguous windows at other positions in each epoch.
    """

    def __init__(self, dataset: PackedDataset, batch_size: int, seed: int, shift_windows: bool = False) -> None:
        n_tokens, seq_len = dataset.tokens.n_tokens, dataset.seq_len
        if n_tokens <= seq_len:
            needs = f"data.seq_len={seq_len} needs {seq_len + 1}; lower data.seq_len or add text"
            raise UserError(f"the training split has {n_tokens} tokens, but {needs}")
        self.dataset, self.batch_size, self.seed, self.shift_windows = dataset, batch_size, seed, shift_windows

    def sample_ids(self, step: int) -> list[int]:
        """The indices of the windows in the batch of a step (from 0)."""
        size = len(self.dataset)
        epochs, indices = np.divmod(step * self.batch_size + np.arange(self.batch_size), size)
        ids = np.empty(self.batch_size, np.int64)
        for epoch in np.unique(epochs):
            ids[epochs == epoch] = permute(indices[epochs == epoch], size, (self.seed, int(epoch)))
        return ids.tolist()

    def batch(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of a step, each (batch_size, T) int64; `rows` selects the rows of a rank."""
        return self.dataset.batch(self.sample_ids(step)[rows], self.shifts(step)[rows])

    def shifts(self, step: int) -> list[int]:
        """How many tokens later than in the first epoch each window in the batch of a step starts."""
        if not self.shift_windows:
            return [0] * self.batch_size
        epochs = (step * self.batch_size + np.arange(self.batch_size)) // len(self.dataset)
        return [self._shift(int(epoch)) for epoch in epochs]

    def _shift(self, epoch: int) -> int:
        """From 0 to seq_len - 1: another one in each of seq_len epochs, and 0 in the first."""
        seq_len = self.dataset.seq_len
        first, now = permute(np.array([0, epoch % seq_len]), seq_len, (self.seed, epoch // seq_len)).tolist()
        return (now - first) % seq_len
