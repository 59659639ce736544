"""The distribution that is drawn from, and the drawing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import UserError
from generation.sampler import SamplingParams, distribution, draw

LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()


def support(**params):
    probs = distribution(LOGITS, SamplingParams(**params))
    assert probs.sum().item() == pytest.approx(1)
    return probs[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"temperature": 0}, [0]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),  # tokens 2 and 3 are tied: the lower id comes first
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.4}, [0]),
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_p": 0.8}, [0, 1, 2]),
        ({"min_p": 0.3}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.0}, [0, 1, 2, 3]),
        ({"top_k": 3, "min_p": 0.3}, [0, 1]),
        ({"top_k": 2, "top_p": 0.99}, [0, 1]),
    ],
)
def test_support(params, kept):
    assert support(**params) == kept


def test_values():
    close = torch.testing.assert_close
    close(distribution(LOGITS, SamplingParams()), LOGITS.exp())
    close(distribution(LOGITS, SamplingParams(top_k=2)), torch.tensor([[2 / 3, 1 / 3, 0, 0]]))
    close(distribution(LOGITS, SamplingParams(temperature=0.5)), (LOGITS.exp() ** 2) / (LOGITS.exp() ** 2).sum())
    seen = torch.tensor([[False, True, False, False]])
    known = torch.tensor([[0.5, 0.25**2, 0.125, 0.125]])  # a negative logit is multiplied by the penalty
    close(distribution(LOGITS, SamplingParams(repetition_penalty=2.0), seen), known / known.sum())
    positive = distribution(LOGITS + 3, SamplingParams(repetition_penalty=2.0), seen)  # a positive one is divided
    close(positive, (LOGITS + 3).where(~seen, (LOGITS + 3) / 2).softmax(-1))


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=30),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 50.0]),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.none() | st.floats(0.001, 1),
    min_p=st.none() | st.floats(0, 1),
)
@settings(max_examples=200, deadline=None)
def test_a_filter_never_removes_everything_nor_the_likeliest(logits, temperature, top_k, top_p, min_p):
    logits = torch.tensor([logits])
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = distribution(logits, params)
    assert probs.sum().item() == pytest.approx(1, abs=1e-5)
    assert probs[0, logits[0].argmax()] > 0
    assert (probs > 0).sum() <= (top_k or math.inf)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-20])
def test_a_tiny_temperature_is_nearly_greedy(temperature):
    probs = distribution(torch.tensor([[1.0, 3.0, 2.0, -1e30]]), SamplingParams(temperature=temperature, top_p=0.9))
    assert probs.tolist() == [[0, 1, 0, 0]]


def test_top_p_counts_exactly():
    wide = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(1))
    assert (distribution(wide, SamplingParams(top_p=1.0)) > 0).all()
    equal = torch.zeros(1, 16)
    for n in (1, 4, 8, 12):  # a sum that reaches top_p exactly is enough
        assert (distribution(equal, SamplingParams(top_p=n / 16)) > 0).sum() == n
    assert (distribution(torch.zeros(1, 10), SamplingParams(top_p=0.6)) > 0).sum() == 6  # 7 by sums in fp32


def test_draws_follow_the_distribution():
    probs = torch.tensor([0.5, 0.2, 0.0, 0.25, 0.05])
    n = 100_000
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = draw(probs.expand(n, -1), uniforms).bincount(minlength=5)
    assert counts[2] == 0
    expected = n * probs
    chi2 = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi2 < 21.1  # the 0.9997 quantile with 3 degrees of freedom


def test_draw_at_the_borders():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    last = 1 - 2**-53
    assert [draw(probs, torch.tensor([u], dtype=torch.float64)).item() for u in (0.0, 0.49, 0.5, last)] == [1, 1, 3, 3]
    thirds = torch.full((1, 3), 1 / 3)
    assert draw(thirds, torch.tensor([last], dtype=torch.float64)).item() == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
        {"stop": ("",)},
        {"seed": -1},
    ],
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        SamplingParams(**wrong)
