"""The answers of a batch as a dataset."""

from __future__ import annotations

from thinker.data.batches.dataset import Sample, Window
from thinker.features.rewards.prompts import Prompt
from thinker.features.rewards.rollouts import Rollouts, Sampler


class RolloutDataset:
    """The answers that were sampled for the next step. Sample n of the run is row n % n_answers.

    Unlike other datasets it depends on the weights, so batches are not prepared ahead of time.
    """

    n_sources = 1
    is_endless = False

    def __init__(
        self, prompts: list[Prompt], n_answers: int, group_size: int, updates: int
    ) -> None:
        self.prompts = prompts
        self.n_answers = n_answers
        self.group_size = group_size
        self.updates = updates
        self.n_left_out = 0  # prompts that are too long
        self.rollouts: Rollouts | None = None
        self.sampler: Sampler | None = None

    def __len__(self) -> int:
        return len(self.prompts) * self.group_size

    def samples(self, first: int, n: int) -> list[Sample]:
        """See OrderedDataset."""
        return [Sample(number % self.n_answers) for number in range(first, first + n)]

    def window(self, sample: Sample) -> Window:
        """See OrderedDataset."""
        return self.rollouts.window(sample.index)

    def epochs(self, n: int) -> list[float]:
        """How often each prompt was answered by a whole group after n samples."""
        return [n / self.updates / len(self)]

    def start(self, n: int) -> None:
        """Nothing to prepare."""

    def close(self, is_finished: bool) -> None:
        """Nothing to stop."""
