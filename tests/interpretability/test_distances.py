"""Attention by distance: the fit finds any head that knows only distances, and periods are found
where they are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinker.interpretability import distances, head_reports

pytestmark = pytest.mark.usefixtures("one_thread")


def distance_head(w, first):
    """A head (T, T) with weight `first` (T,) on the first token, and w(i − j) on the others in
    proportion."""
    T = len(first)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    weights = torch.where((distance >= 0) & (torch.arange(T) > 0), w[distance.clamp_min(0)], 0.0)
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-30) * (1 - first)[:, None]
    weights[:, 0] = 1 - weights.sum(dim=-1)
    return weights


@given(st.integers(2, 30), st.integers(0, 10**6), st.sampled_from(["smooth", "sparse", "uniform"]))
def test_the_fit_of_a_head_that_knows_only_distances_is_that_head(T, seed, kind):
    torch.manual_seed(seed)
    w = torch.rand(T).double() + 0.1 if kind == "smooth" else torch.ones(T).double()
    if kind == "sparse":
        w = (torch.rand(T) < 0.3).double()
        w[0] = 1.0  # so that every row has a key
    head = distance_head(w, torch.rand(T).double() * 0.9)
    by_distance, by_query = distances.sum_by_distance(head)
    torch.testing.assert_close(by_query, head[:, 1:].sum(dim=-1))
    assert by_distance.sum() == pytest.approx(by_query.sum())
    for distance in range(T):
        known = sum(head[i, i - distance] for i in range(distance + 1, T))
        assert by_distance[distance] == pytest.approx(float(known))
    fitted = distances.fit_distances(by_distance, by_query)
    expected = distances.expected_weights(fitted, by_query)
    torch.testing.assert_close(expected[:, 1:], head[:, 1:], atol=1e-6, rtol=0)
    assert expected[:, 0].abs().max() == 0


def test_the_fit_keeps_sums_of_any_heads():
    """It is the head of maximum likelihood, so its sums by distance and by query are those that it
    was given."""
    torch.manual_seed(0)
    weights = (
        (3 * torch.randn(2, 3, 20, 20))
        .masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
        .softmax(-1)
    )
    sums = distances.sum_by_distance(weights)
    expected = distances.expected_weights(distances.fit_distances(*sums), sums[1])
    again = distances.sum_by_distance(expected)
    torch.testing.assert_close(again[0].float(), sums[0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(again[1].float(), sums[1], atol=1e-5, rtol=1e-5)


def test_a_head_that_attends_only_to_the_first_token():
    weights = torch.zeros(9, 9)
    weights[:, 0] = 1
    sums = distances.sum_by_distance(weights)
    w = distances.fit_distances(*sums)
    assert not w.any()
    assert not distances.expected_weights(w, sums[1]).any()
    assert [x.item() for x in distances.periodicity(w)] == [0, 0]


@given(st.integers(2, 12), st.floats(0.01, 0.5), st.integers(0, 99))
def test_periods_are_found_and_nothing_else_is_one(period, noise, seed):
    torch.manual_seed(seed)
    distance = torch.arange(100)
    spikes = (distance % period == 0) * torch.exp(-distance / 50)
    strength, found = distances.periodicity(
        torch.stack([spikes, spikes + noise * 0.1 * torch.rand(100)])
    )
    assert strength[0] > 0.9
    assert strength[1] > 0.6
    assert found.tolist() == [period, period]
    falling = torch.stack(
        [torch.exp(-distance * noise), 1 / (1.0 + distance), torch.ones(100), torch.zeros(100)]
    )
    single = torch.zeros(100)
    single[period] = 1
    strength, _ = distances.periodicity(torch.cat([falling, single[None]]))
    assert strength.max() < 1e-3


@pytest.mark.parametrize("D", [1, 2, 7, 8])
def test_few_distances_have_no_period_or_a_short_one(D):
    strength, period = distances.periodicity((torch.arange(D) % 2).double())
    assert (strength.item(), period.item()) == ((0, 0) if D < 8 else (pytest.approx(1), 2))


def test_heads_of_a_strided_pattern_are_periodic(random_model):
    model = random_model(
        attention="heads(strided(5), dilated(40, 4), window(6), full)", max_seq_len=64
    )
    scores = head_reports.score_heads(model, *[head_reports.random_repeats(model)] * 2)
    found = scores["periodic"]  # (2, 4)
    assert found.shape == (2, 4)
    assert found[:, :2].min() > 0.6
    assert found[:, 2:].max() < 0.4
