"""Training of small models within a lesson."""

import os
from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import trange

from thinker.model import Thinker, ThinkerConfig


def is_fast() -> bool:
    """Whether the lessons are tested: train little, and do not expect good models."""
    return os.environ.get("THINKER_LESSONS_FAST") == "1"


def train_on_task(
    config: ThinkerConfig, make_batch: Callable[[torch.Generator], tuple[Tensor, Tensor]], n_steps: int,
    lr: float = 3e-3, seed: int = 0,
) -> tuple[Thinker, list[float]]:  # fmt: skip
    """Train a new model on batches made on the fly; returns it and the loss of each step (nats per counted target).

    Args:
        make_batch: from a random generator to tokens and targets, (B, T) each; targets of -1 are not counted.
        n_steps: one tenth of them with THINKER_LESSONS_FAST=1.
        lr: the learning rate of AdamW, which falls linearly to 0.
    """
    torch.manual_seed(seed)
    model, generator = Thinker(config), torch.Generator().manual_seed(seed)
    n_steps = max(2, n_steps // 10) if is_fast() else n_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses = []
    for step in trange(n_steps, desc="training", disable=is_fast()):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / n_steps)
        tokens, targets = make_batch(generator)
        total, count = model(tokens, targets=targets)
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), losses
