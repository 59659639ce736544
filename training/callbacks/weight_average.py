"""An exponential moving average (EMA) of the weights, which is evaluated and saved in place of the
weights."""

import torch
from torch import Tensor

from thinker.runtime.ranks import local_tensor
from thinker.training.callback import Callback, StepInfo, TrainingParts


class WeightAverage(Callback):
    """average = decay · average + (1 - decay) · weights after each step, in fp32, for the trained
    parameters.

    Early in a run the decay is at most (1 + step) / (10 + step), so that the initial weights soon
    matter little. A checkpoint has the average as the model, and the weights among the tensors that
    only resuming needs.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.kept: list[Tensor] = []  # the weights, while the model has the average

    def setup(self, parts: TrainingParts) -> None:
        """Start with the initial weights."""
        self.names: list[str] = []
        self.weights: list[Tensor] = []
        for name, parameter in parts.model.named_parameters():
            if parameter.requires_grad:
                self.names.append(name)
                self.weights.append(parameter.detach())
        self.averages = [weight.clone() for weight in self.weights]

    def after_step(self, info: StepInfo) -> None:
        """Update the average with the weights after a step."""
        decay = min(self.decay, (1 + info.step) / (10 + info.step))
        averages = [local_tensor(average) for average in self.averages]
        weights = [local_tensor(weight) for weight in self.weights]
        torch._foreach_lerp_(averages, weights, 1 - decay)

    def before_eval(self) -> None:
        """Put the average into the model."""
        self.kept = [weight.clone() for weight in self.weights]
        _copy(self.averages, self.weights)

    def after_eval(self) -> None:
        """Put the weights back."""
        _copy(self.kept, self.weights)
        self.kept = []

    def tensors(self) -> dict[str, Tensor]:
        """The current weights."""
        weights = self.kept or self.weights
        return {f"optimizer.{name}.weight": weight for name, weight in zip(self.names, weights)}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the average from the model, whose checkpoint has just been loaded, and put the
        weights into it."""
        _copy(self.weights, self.averages)
        _copy(list(tensors.values()), self.weights)


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets):
        local_tensor(target).copy_(local_tensor(source))
