"""The loss of a policy: answers with an advantage become more probable."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLosses(NamedTuple):
    """Per token of answers, (B, T) each."""

    loss: Tensor
    is_clipped: Tensor  # bool: the ratio is out of bounds, so nothing flows back
    kl: Tensor  # KL(policy | reference) in nats, an estimate that is never negative; 0 without one
    ratio: Tensor  # of the probabilities now and when the answers were sampled


def policy_losses(
    log_probs: Tensor,
    sampled: Tensor,
    advantages: Tensor,
    clip: float,
    kl_weight: float = 0.0,
    reference: Tensor | None = None,
) -> PolicyLosses:
    """The clipped loss of PPO (Schulman et al. 2017, arXiv:1707.06347) and a divergence from a
    reference.

    log_probs, sampled, reference: ln P of each token now, when it was sampled, and by the
    reference, (B, T). advantages: of each answer, (B, 1). clip: how far the ratio of
    probabilities may be from 1.

    With d = ln P - ln P_reference, the divergence KL(policy | reference) has the gradient E[d ·
    grad ln P], so d²/2 is added to the loss. What is reported is exp(-d) - 1 + d, whose mean is the
    divergence (Schulman, joschu.net/blog/kl-approx.html). GRPO's paper adds that to the loss, but
    its gradient is that of KL(reference | policy).
    """
    ratio = (log_probs - sampled).exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    gains = torch.minimum(ratio * advantages, bounded * advantages)
    is_clipped = ratio * advantages > bounded * advantages
    if reference is None:
        return PolicyLosses(-gains, is_clipped, torch.zeros_like(log_probs), ratio)
    difference = log_probs - reference
    # Of tokens that an earlier policy sampled, each counts as often as this one samples it.
    penalty = ratio.detach() * difference.square() / 2
    kl = (-difference).exp() - 1 + difference
    return PolicyLosses(kl_weight * penalty - gains, is_clipped, kl, ratio)
