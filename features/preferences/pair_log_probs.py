"""The log-probabilities of the answers in pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.features.preferences.pair_windows import PADDING, PairWindows
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.device import to_device
from thinker.runtime.ranks import SINGLE_PROCESS, DistContext


class PairBatch(NamedTuple):
    """The pairs in some windows, P in all."""

    numbers: list[int]  # of the pairs
    sides: Tensor  # (B, T) int64: 2k for the chosen row of the k-th pair, 2k + 1 for the rejected


def pair_batch(windows: PairWindows, indices: list[int], device: torch.device) -> PairBatch:
    """The pairs in windows, numbered over all of them."""
    numbers: list[int] = []
    rows = []
    for index in indices:
        sides = windows.sides(index)
        rows.append(np.where(sides == PADDING, PADDING, sides + 2 * len(numbers)))
        numbers += windows.pairs(index)
    return PairBatch(numbers, to_device(torch.from_numpy(np.stack(rows)), device))


def pair_log_probs(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    pairs: PairBatch,
    target_losses: Tensor | None = None,
) -> Tensor:
    """ln P of the chosen and of the rejected answer of each pair, given its prompt: (P, 2) fp32, or
    fp64 as the logits.

    inputs and targets (B, T), with IGNORE_INDEX for the tokens of prompts and padding. Each row
    attends only to itself. target_losses: (B, T) fp32; is filled with the loss of each target in
    nats.
    """
    logits = model(inputs, document_ids=pairs.sides)  # (B, T, V)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    losses = F.cross_entropy(
        logits.flatten(0, 1).to(dtype),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )  # (B · T,)
    if target_losses is not None:
        target_losses.copy_(losses.detach().view_as(target_losses))
    # A sum for each side, and one for padding, which has no targets.
    sums = losses.new_zeros(2 * len(pairs.numbers) + 1)
    places = pairs.sides.flatten() % len(sums)  # PADDING is the last
    return -sums.index_add(0, places, losses)[:-1].view(-1, 2)


def count_targets(targets: Tensor, pairs: PairBatch) -> Tensor:
    """The number of tokens of both answers of each pair, (P, 2) fp32."""
    is_target = (targets != IGNORE_INDEX).flatten().float()
    sums = is_target.new_zeros(2 * len(pairs.numbers) + 1)
    places = pairs.sides.flatten() % len(sums)
    return sums.index_add(0, places, is_target)[:-1].view(-1, 2)


@torch.no_grad()
def all_log_probs(
    model: Thinker,
    windows: PairWindows,
    batch_size: int,
    dist: DistContext = SINGLE_PROCESS,
    on_batch: Callable[[int], object] = lambda n_windows: None,
) -> np.ndarray:
    """pair_log_probs() of all pairs, (n_pairs, 2) float64; NaN for those that are in no window.

    Ranks take turns, and all have the same result. on_batch: told how many windows were read.
    """
    was_training = model.training
    model.eval()
    found = np.full((windows.n_pairs, 2), np.nan)
    try:
        for indices, is_own in shared_indices(len(windows), batch_size, dist):
            inputs, targets = windows.batch(indices)
            pairs = pair_batch(windows, indices, model.device)
            log_probs = pair_log_probs(
                model, to_device(inputs, model.device), to_device(targets, model.device), pairs
            )
            if is_own:
                found[pairs.numbers] = log_probs.double().cpu().numpy()
            on_batch(len(indices) * dist.world_size)
    finally:
        model.train(was_training)
    for others in dist.gather_objects(found):
        found = np.where(np.isnan(found), others, found)
    return found


def shared_indices(
    n_windows: int, batch_size: int, dist: DistContext
) -> Iterator[tuple[list[int], bool]]:
    """The windows that this rank reads, batch by batch, and whether they are its own.

    All ranks run the model equally often, so one without windows reads the first.
    """
    for start in range(0, n_windows, batch_size * dist.world_size):
        first = start + dist.rank * batch_size
        indices = list(range(first, min(first + batch_size, n_windows)))
        if indices:
            yield indices, True
        else:
            yield [0], False
