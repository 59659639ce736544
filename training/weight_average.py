"""An exponential moving average (EMA) of the weights, which is evaluated and saved in place of the weights."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from thinker.model import Thinker
from thinker.runtime.process_group import local_tensor


class WeightAverage:
    """average = decay · average + (1 - decay) · weights after each step, in fp32, for the trained parameters.

    Early in a run the decay is at most (1 + step) / (10 + step), so that the initial weights soon matter little.
    """

    def __init__(self, model: Thinker, decay: float) -> None:
        trained = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        self.names, self.weights = (
            [name for name, _ in trained],
            [parameter.detach() for _, parameter in trained],
        )
        self.averages, self.decay = [weight.clone() for weight in self.weights], decay

    def update(self, step: int) -> None:
        """Update the average with the weights after a step, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(
            *(list(map(local_tensor, each)) for each in (self.averages, self.weights)), 1 - decay
        )

    @contextlib.contextmanager
    def in_model(self) -> Iterator[dict[str, Tensor]]:
        """Context manager: the model holds the average. Yields the current weights, named as load() expects them."""
        weights = [weight.clone() for weight in self.weights]
        self._copy(self.averages, self.weights)
        try:
            yield {f"optimizer.{name}.weight": weight for name, weight in zip(self.names, weights)}
        finally:
            self._copy(weights, self.weights)

    def expected_tensors(self) -> dict[str, Tensor]:
        """New tensors like those that in_model() yields, to load them into."""
        return {
            f"optimizer.{name}.weight": torch.empty_like(w)
            for name, w in zip(self.names, self.weights)
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take the average from the model, whose checkpoint has just been loaded, and put `tensors` into the model."""
        self._copy(self.weights, self.averages)
        self._copy([tensors.pop(name) for name in self.expected_tensors()], self.weights)

    @staticmethod
    def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
        for source, target in zip(sources, targets):
            local_tensor(target).copy_(local_tensor(source))
