"""Training batches, as a pure function of the step."""

import numpy as np
import torch
from torch import Tensor

from thinker.data.batches.dataset import OrderedDataset, Sample
from thinker.data.batches.windows import number_documents


class BatchLoader:
    """Training batches as pure functions of the step: the next `batch_size` samples of a dataset in
    each step.

    bos_id: the BOS token, to number the documents of each window, so that the model can mask across
    them. None: do not number them.
    """

    def __init__(self, dataset: OrderedDataset, batch_size: int, bos_id: int | None = None) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.bos_id = bos_id
        self.reads_corpus = True  # False: the dataset has other text than the corpus of the config

    def samples(self, step: int) -> list[Sample]:
        """The samples in the batch of a step (from 0)."""
        return self.dataset.samples(step * self.batch_size, self.batch_size)

    def sample_ids(self, step: int) -> list[int]:
        """The indices of the windows in the batch of a step."""
        return [sample.index for sample in self.samples(step)]

    def batch(self, step: int, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of a step, each (batch_size, T) int64; `rows` selects the rows of a
        rank."""
        windows = [self.dataset.window(sample) for sample in self.samples(step)[rows]]
        inputs = np.stack([window[0] for window in windows])
        targets = np.stack([window[1] for window in windows])
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def document_ids(self, inputs: Tensor) -> Tensor | None:
        """The number of each token's document in its window, (B, T) int64; None if the model does
        not mask."""
        return None if self.bos_id is None else number_documents(inputs, self.bos_id)

    def epochs(self, steps: int) -> list[float]:
        """How often each source of the dataset has been read after so many steps."""
        return self.dataset.epochs(steps * self.batch_size)

    def start(self, step: int) -> None:
        """Prepare the dataset, in the main process, for training that begins at a step."""
        self.dataset.start(step * self.batch_size)

    def close(self, is_finished: bool = False) -> None:
        """Stop the dataset. is_finished: the run has ended."""
        self.dataset.close(is_finished)
