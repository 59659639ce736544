"""How much better an answer is than the others to its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from thinker.features.rewards.keys import Baseline, Normalize

EPSILON = 1e-6  # of a standard deviation
ROUNDING = 1e-12  # a share of the rewards by which equal ones may differ


def group_advantages(rewards: Tensor, baseline: Baseline, normalize: Normalize) -> Tensor:
    """The advantages of K answers to each of G prompts, (G, K) -> (G, K).

    An answer without a reward is NaN: it counts for no other, and its advantage is 0.

    baseline: what is subtracted from a reward. "mean": the mean of the group (GRPO, Shao et al.
    2024, arXiv:2402.03300). "leave_one_out": that of the other answers (RLOO, Ahmadian et al. 2024,
    arXiv:2402.14740).
    normalize: "group": divide by the standard deviation of the group, as GRPO does. "none": do not,
    as a group whose answers are nearly alike counts too much (Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783).
    """
    is_known = ~rewards.isnan()
    n_known = is_known.sum(1, keepdim=True)  # (G, 1)
    known = rewards.nan_to_num(0.0)
    total = known.sum(1, keepdim=True)
    mean = total / n_known.clamp(min=1)
    advantages = known - mean
    if baseline == "leave_one_out":
        others = (total - known) / (n_known - 1).clamp(min=1)
        advantages = (known - others) * (n_known > 1)
    if normalize == "group":
        squares = (known - mean).square() * is_known
        std = (squares.sum(1, keepdim=True) / (n_known - 1).clamp(min=1)).sqrt()
        advantages = advantages / (std + EPSILON)
    return advantages * is_known


def has_signal(rewards: Tensor) -> Tensor:
    """Whether the known rewards of a group differ, (G, K) -> (G,) bool. Otherwise nothing can be
    learned from it."""
    high = rewards.nan_to_num(-torch.inf).amax(1)
    low = rewards.nan_to_num(torch.inf).amin(1)
    largest = torch.maximum(high.abs(), low.abs())
    return high - low > ROUNDING * largest
