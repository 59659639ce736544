"""What happens to the weights after each optimizer step, and which weights a run evaluates and saves."""

import contextlib

from torch import Tensor

from thinker.data.batches.prefetch import Batch
from thinker.training.weight_average import WeightAverage


class AfterStep:
    """Nothing, or an average of the weights (train.ema_decay). The base class of pruning."""

    is_complete = True  # whether the model has its final form, so that the best weights so far are worth keeping

    def __init__(self, average: WeightAverage | None) -> None:
        self.average = average

    def update(self, step: int, progress: float, batch: Batch) -> None:
        """Follow an optimizer step, counted from 1, on `batch`; the share `progress` of the run is done."""
        if self.average is not None:
            self.average.update(step)

    def in_model(self) -> contextlib.AbstractContextManager[dict[str, Tensor]]:
        """Context in which the model has the weights to evaluate and save. Yields what else a checkpoint needs."""
        return contextlib.nullcontext({}) if self.average is None else self.average.in_model()

    def expected_tensors(self) -> dict[str, Tensor]:
        """New tensors like those that in_model() yields, to load them into."""
        return {} if self.average is None else self.average.expected_tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take from `tensors` what in_model() yielded. The model has just been loaded from the same checkpoint."""
        if self.average is not None:
            self.average.load(tensors)

    def metrics(self) -> dict[str, float]:
        """Metrics for metrics.jsonl."""
        return {}

    @property
    def nbytes(self) -> int:
        """Memory that is held on the device."""
        return (
            0 if self.average is None else sum(average.nbytes for average in self.average.averages)
        )
