"""The training loss of each source of a mixture, beside any objective."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinker.data.batches.prefetch import Batch
from thinker.runtime.constants import IGNORE_INDEX
from thinker.training.objective import Loss, Objective


class SourceLosses:
    """An objective that also measures the loss of each source, `train_loss/NAME` in
    metrics.jsonl."""

    def __init__(self, objective: Objective, names: Sequence[str]) -> None:
        self.objective = objective
        self.keys = [f"train_loss/{name}" for name in names]

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """Let the objective fill in the loss of each target, and sum them by source."""
        if batch.sources is None:  # there is only one
            return self.objective(model, batch)
        target_losses = torch.empty(batch.targets.shape, device=batch.targets.device)
        loss = self.objective(model, batch._replace(target_losses=target_losses))
        sources = batch.sources.to(batch.targets.device)
        sums = sum_by_source(sources, len(self.keys), target_losses, batch.targets)  # (S, 2)
        by_source = {key: tuple(row.unbind()) for key, row in zip(self.keys, sums)}
        return loss._replace(parts={**loss.parts, **by_source})


def sum_by_source(
    sources: Tensor, n_sources: int, target_losses: Tensor, targets: Tensor
) -> Tensor:
    """(S, 2) fp32: the sum of the losses and the number of targets of each source.

    sources (B,) int64; target_losses (B, T) fp32; targets (B, T) int64.
    """
    n_targets = (targets != IGNORE_INDEX).sum(1)  # (B,)
    by_sequence = torch.stack((target_losses.sum(1), n_targets), dim=1)  # (B, 2)
    is_of = sources == torch.arange(n_sources, device=sources.device)[:, None]  # (S, B)
    return torch.where(is_of[..., None], by_sequence, 0.0).sum(1)
