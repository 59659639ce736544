"""Advantages and the loss of a policy, against formulas written one number at a time."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinker.features.rewards.advantages import EPSILON, group_advantages, has_signal
from thinker.features.rewards.keys import GRPOConfig
from thinker.features.rewards.policy_loss import policy_losses
from thinker.features.rewards.rollouts import Sampler

REWARD = st.one_of(st.floats(-3, 3, width=32), st.just(math.nan))
GROUPS = st.integers(1, 6).flatmap(
    lambda size: st.lists(st.lists(REWARD, min_size=size, max_size=size), min_size=1, max_size=4)
)


def plain_advantage(rewards, index, baseline, normalize):
    reward = rewards[index]
    if math.isnan(reward):
        return 0.0
    known = [each for each in rewards if not math.isnan(each)]
    if baseline == "mean":
        value = reward - statistics.fmean(known)
    elif len(known) == 1:
        return 0.0
    else:
        others = [
            each for place, each in enumerate(rewards) if place != index and not math.isnan(each)
        ]
        value = reward - statistics.fmean(others)
    if normalize == "group":
        std = statistics.stdev(known) if len(known) > 1 else 0.0
        value /= std + EPSILON
    return value


@given(groups=GROUPS)
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("normalize", ["group", "none"])
def test_advantages(groups, baseline, normalize):
    rewards = torch.tensor(groups, dtype=torch.float64)
    found = group_advantages(rewards, baseline, normalize)
    for row, group in enumerate(groups):
        for column in range(len(group)):
            wanted = plain_advantage(group, column, baseline, normalize)
            assert float(found[row, column]) == pytest.approx(wanted, rel=1e-6, abs=1e-4)
    for row, group in enumerate(groups):
        known = {each for each in group if not math.isnan(each)}
        assert bool(has_signal(rewards)[row]) == (len(known) > 1)


def plain_loss(log_prob, sampled, advantage, clip, weight, reference):
    """Without the factor of the penalty, through which nothing flows back."""
    ratio = math.exp(log_prob - sampled)
    bounded = min(max(ratio, 1 - clip), 1 + clip)
    gain = min(ratio * advantage, bounded * advantage)
    return weight * (log_prob - reference) ** 2 / 2 - gain


def test_losses_and_gradients():
    generator = torch.Generator().manual_seed(0)
    log_probs, sampled, reference = (
        -torch.rand(200, generator=generator).double() for _ in range(3)
    )
    advantages = torch.randn(200, generator=generator).double()
    log_probs.requires_grad_()
    found = policy_losses(log_probs, sampled, advantages, 0.2, 0.1, reference)
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_probs)
    n_clipped = 0
    for index in range(200):
        numbers = [each[index].item() for each in (log_probs, sampled, advantages)]
        rest = (0.2, 0.1 * found.ratio[index].item(), reference[index].item())
        wanted = plain_loss(*numbers, *rest)
        assert found.loss[index].item() == pytest.approx(wanted, rel=1e-9)
        step = 1e-6
        above = plain_loss(numbers[0] + step, *numbers[1:], *rest)
        below = plain_loss(numbers[0] - step, *numbers[1:], *rest)
        assert float(gradient[index]) == pytest.approx((above - below) / (2 * step), abs=1e-5)
        n_clipped += bool(found.is_clipped[index])
        r = math.exp(float(reference[index]) - numbers[0])
        assert found.kl[index].item() == pytest.approx(r - 1 - math.log(r), abs=1e-9)
    assert 20 < n_clipped < 150


def test_the_first_update_is_the_policy_gradient():
    """Where the policy is the one that sampled, ratios are 1, and the gradient is -advantage."""
    log_probs = -torch.rand(50).double().requires_grad_()
    advantages = torch.randn(50).double()
    found = policy_losses(log_probs, log_probs.detach(), advantages, 0.2)
    assert (found.ratio == 1).all()
    assert not found.is_clipped.any()
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_probs)
    torch.testing.assert_close(gradient, -advantages)


def test_rounding_is_no_signal():
    """Rewards that are equal but for the order in which their parts were added teach nothing."""
    a, b = 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1
    assert a != b
    rows = [[a, b], [a, b + 1e-9], [0.0, 1e-30], [a, torch.nan]]
    rewards = torch.tensor(rows, dtype=torch.float64)
    assert has_signal(rewards).tolist() == [False, True, True, False]


def test_the_order_of_parts_does_not_change_a_reward():
    options = GRPOConfig(rewards={"x": 3.0, "y": -2.0})
    sampler = Sampler(options, None, None, seed=0)
    one = {"x": {"a": 0.1, "b": 0.2, "c": 0.3}, "y": {"d": 0.7}}
    other = {"y": {"d": 0.7}, "x": {"c": 0.3, "b": 0.2, "a": 0.1}}
    assert sampler.total(one) == sampler.total(other)
    assert sampler.total(one) == pytest.approx(3 * 0.6 - 2 * 0.7)
