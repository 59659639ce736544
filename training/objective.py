"""What a training step minimizes."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from thinker.data.batches.prefetch import Batch
from thinker.data.corpus.corpus import Corpus
from thinker.model import ThinkerConfig
from thinker.runtime.registry import offers
from thinker.training.callback import Callback
from thinker.training.config.config import Config


class Loss(NamedTuple):
    """The loss of a micro-batch. All tensors are on the device."""

    sum: Tensor
    """The sum over the targets, which the step minimizes."""
    n_targets: Tensor
    """The number of targets in the micro-batch."""
    parts: Mapping[str, tuple[Tensor, Tensor]] = {}
    """More losses for metrics.jsonl, by key: a sum and a number of targets. The log has their
    quotient.

    Every call returns the same keys. Nothing flows back through these tensors.
    """
    cross_entropy: Tensor | None = None
    """The sum that `train_loss` in metrics.jsonl reports, in nats. None: `sum`."""


class Objective(Protocol):
    """What a step minimizes. An objective that needs more than the batch is a Callback, too."""

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """Run the model on a micro-batch, whose tokens are on the device.

        `model` is called as a Thinker; it may be wrapped for several ranks. If
        `batch.target_losses` is there, it must be filled with the loss of each target in nats. The
        step divides the sum by the targets of the whole batch.
        """
        ...


def next_token_loss(model: nn.Module, batch: Batch) -> Loss:
    """The cross-entropy with the text."""
    total, n_targets = model(
        batch.inputs,
        targets=batch.targets,
        document_ids=batch.document_ids,
        target_losses=batch.target_losses,
    )
    return Loss(total, n_targets)


def build_objective(
    config: Config,
    model_config: ThinkerConfig,
    corpus: Corpus,
    device: torch.device,
    objective: Objective | None = None,
) -> tuple[Objective, list[Callback]]:
    """What a step minimizes: `objective`, or the cross-entropy with the text, as the features
    change it.

    Also returns those of the objectives that are callbacks.
    """
    objectives = [objective or next_token_loss]
    for offer in offers("objective"):
        changed = offer(config, model_config, corpus, device, objectives[-1])
        if changed is not objectives[-1]:
            objectives.append(changed)
    return objectives[-1], [each for each in objectives if isinstance(each, Callback)]
