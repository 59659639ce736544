"""Training batches, whose order is a pure function of (seed, step)."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from thinker.data.batches.batches import PackedDataset
from thinker.data.batches.permutation import permute
from thinker.features.mixtures.mixture import Mixture, MixtureSource
from thinker.features.streams.token_stream import TokenStream
from thinker.runtime.errors import UserError


class BatchLoader:
    """Training batches as pure functions of (seed, step): every window once per epoch, each epoch in a new order.

    In a mixture, every source has its own epochs.

    Args:
        shift_windows: from the second epoch on, cut contiguous windows at other positions in each epoch.
        mixture: the order of the sources. None: there is one source.
        bounds: (S + 1,) the first window of each source in the dataset, and the end of the last one.
        streams: the sources whose windows come from a stream instead of the dataset, by number.
    """

    def __init__(
        self, dataset: PackedDataset, batch_size: int, seed: int, shift_windows: bool = False,
        mixture: Mixture | None = None, bounds: Sequence[int] | None = None,
        streams: Mapping[int, TokenStream] | None = None,
    ) -> None:  # fmt: skip
        n_tokens, seq_len = dataset.tokens.n_tokens, dataset.seq_len
        if n_tokens <= seq_len:
            needs = f"data.seq_len={seq_len} needs {seq_len + 1}; lower data.seq_len or add text"
            raise UserError(f"the training split has {n_tokens} tokens, but {needs}")
        self.dataset, self.batch_size, self.seed, self.shift_windows = (
            dataset,
            batch_size,
            seed,
            shift_windows,
        )
        self.mixture = mixture or Mixture([MixtureSource({0: 1.0})])
        self.bounds = np.array([0, len(dataset)] if bounds is None else bounds)
        self.streams = streams or {}

    def write_streams(self, step: int) -> None:
        """Begin to write streams in this process, for training that begins at a step (from 0)."""
        taken = self.mixture.taken(step * self.batch_size).tolist()
        for source, stream in self.streams.items():
            stream.write_from(taken[source])

    def close(self, is_finished: bool = False) -> None:
        """End the threads of streams. is_finished: the run has ended, and needs their files no longer."""
        for stream in self.streams.values():
            stream.close(is_finished)

    def sample_ids(self, step: int) -> list[int]:
        """The indices of the windows in the batch of a step (from 0), in the dataset or in a stream."""
        sources, numbers = self._samples(step)
        epochs, numbers_in_epoch = self._epochs(sources, numbers)
        ids = np.empty(self.batch_size, np.int64)
        for source, stream in self.streams.items():
            part = sources == source
            ids[part] = stream.order(numbers[part], (self.seed, source))
        for source, epoch in sorted(set(zip(sources.tolist(), epochs.tolist()))):
            if source in self.streams:
                continue
            part = (sources == source) & (epochs == epoch)
            first, end = self.bounds[source : source + 2].tolist()
            key = (self.seed, epoch) if source == 0 else (self.seed, epoch, source)
            ids[part] = first + permute(numbers_in_epoch[part], end - first, key)
        return ids.tolist()

    def sources(self, step: int) -> list[int]:
        """The source of each window in the batch of a step."""
        return self._samples(step)[0].tolist()

    def batch(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of a step, each (batch_size, T) int64; `rows` selects the rows of a rank."""
        ids, shifts = self.sample_ids(step)[rows], self.shifts(step)[rows]
        if not self.streams:
            return self.dataset.batch(ids, shifts)
        windows = [
            self.streams[source].window(index)
            if source in self.streams
            else self.dataset.window(index, shift)
            for source, index, shift in zip(self.sources(step)[rows], ids, shifts)
        ]
        inputs, targets = (torch.from_numpy(np.stack(rows)) for rows in zip(*windows))
        return inputs, targets

    def shifts(self, step: int) -> list[int]:
        """How many tokens later than in the first epoch each window in the batch of a step starts."""
        if not self.shift_windows:
            return [0] * self.batch_size
        epochs, _ = self._epochs(*self._samples(step))
        return [self._shift(epoch) for epoch in epochs.tolist()]

    def epochs(self, steps: int) -> list[float]:
        """How often each source has been read after so many steps."""
        taken = self.mixture.taken(steps * self.batch_size)
        epochs = (taken / np.diff(self.bounds)).tolist()
        return [
            self.streams[source].epochs(int(n)) if source in self.streams else n_epochs
            for source, (n, n_epochs) in enumerate(zip(taken, epochs))
        ]

    def _samples(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Source of each sample of a step, and its number within the source, each (batch_size,) int64."""
        return self.mixture.samples(step * self.batch_size, self.batch_size)

    def _epochs(self, sources: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epoch, and number within the epoch, of samples of sources in the dataset, each (n,) int64."""
        return np.divmod(numbers, np.diff(self.bounds)[sources])

    def _shift(self, epoch: int) -> int:
        """From 0 to seq_len - 1: another one in each of seq_len epochs, and 0 in the first."""
        seq_len = self.dataset.seq_len
        first, now = permute(
            np.array([0, epoch % seq_len]), seq_len, (self.seed, epoch // seq_len)
        ).tolist()
        return (now - first) % seq_len
