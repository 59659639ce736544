"""The loss of each of several sequences."""

import torch
from torch import Tensor

from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX

BATCH_TOKENS = 4096


@torch.no_grad()
def sequence_losses(model: Thinker, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the losses in nats and number of targets of each sequence.

    (N, T) tokens and targets -> (N,) float64 each.
    """
    rows = max(1, BATCH_TOKENS // tokens.shape[1])
    nats = []
    for part, wanted in zip(tokens.split(rows), targets.split(rows)):
        losses = torch.empty(wanted.shape, device=tokens.device)
        model(part, targets=wanted, target_losses=losses)
        nats.append(losses.double().sum(1))
    return torch.cat(nats).cpu(), (targets != IGNORE_INDEX).sum(1).double().cpu()
