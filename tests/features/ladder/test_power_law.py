"""The power law and its prediction intervals, on losses that follow a known law."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from thinker.features.ladder.power_law import PowerLaw, PowerLawFit
from thinker.runtime.errors import UserError

TARGET = 3e13  # FLOPs
COMPUTE = TARGET / 8 / 2.0 ** np.arange(6)
LAWS = [PowerLaw(0.9, 0.5 * TARGET**0.2, 0.2), PowerLaw(1.2, 0.3 * TARGET**0.35, 0.35)]
BENT = PowerLaw(0.0, 1.5 * TARGET**0.1, 0.1)  # its floor is at the edge of what may be fitted


@pytest.mark.parametrize("law", [*LAWS, BENT], ids=["shallow", "steep", "no floor"])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_fit_to_exact_losses_finds_the_law(law, is_known):
    floor = law.floor if is_known else None
    fit = PowerLawFit(COMPUTE, law(COMPUTE), floor)
    assert fit.law.exponent == pytest.approx(law.exponent, rel=0.01)
    assert fit.law.floor == pytest.approx(law.floor, abs=0.01)
    found = fit.predict(TARGET)
    assert found.loss == pytest.approx(law(TARGET), rel=5e-4)
    assert found.low <= found.loss <= found.high
    assert found.high - found.low < 0.01


@pytest.mark.parametrize("is_known", [True, False])
def test_the_fit_equals_that_of_scipy(is_known):
    law = LAWS[0]
    losses = law(COMPUTE) + 0.01 * np.random.default_rng(1).normal(size=6)
    floor = law.floor if is_known else None
    fit = PowerLawFit(COMPUTE, losses, floor)
    x = COMPUTE / TARGET

    if is_known:

        def curve(x, scale, exponent):
            return law.floor + scale * x**-exponent

        start, bounds = (0.5, 0.3), ((0, 0), (9, 2))
    else:

        def curve(x, scale, exponent, floor):
            return floor + scale * x**-exponent

        start, bounds = (0.5, 0.3, 0.5), ((0, 0, 0), (9, 2, 3))
    found, _ = scipy.optimize.curve_fit(curve, x, losses, start, bounds=bounds)
    assert fit.law.exponent == pytest.approx(found[1], rel=0.01)
    assert fit.law(TARGET) == pytest.approx(curve(1.0, *found), rel=1e-3)
    squares = np.square(losses - curve(x, *found)).sum()
    assert fit.noise == pytest.approx(math.sqrt(squares / (6 - len(found))), rel=1e-3)


def coverage(law, noise, n_draws, is_known, compute=COMPUTE):
    """The share of intervals that hold the loss of a new run."""
    random = np.random.default_rng(0)
    n_inside = 0
    for _ in range(n_draws):
        losses = law(compute) + noise * random.normal(size=len(compute))
        found = PowerLawFit(compute, losses, law.floor if is_known else None).predict(TARGET)
        new = law(TARGET) + noise * random.normal()
        n_inside += found.low <= new <= found.high
    return n_inside / n_draws


@pytest.mark.parametrize("is_known", [True, False])
def test_intervals_hold_a_new_run_in_95_percent_of_draws(is_known, stress):
    n_draws = 2000 if stress else 500
    for law in LAWS:
        share = coverage(law, 0.004, n_draws, is_known)
        assert abs(share - 0.95) < 3.3 * math.sqrt(0.95 * 0.05 / n_draws)


def test_intervals_are_not_too_narrow_where_the_floor_is_zero():
    assert coverage(BENT, 0.004, 300, False) > 0.92


def test_intervals_of_two_seeds_are_narrower():
    assert abs(coverage(LAWS[0], 0.004, 300, False, np.tile(COMPUTE, 2)) - 0.95) < 0.045
    losses = LAWS[0](COMPUTE) + 0.004 * np.tile([1, -1], 3)
    one = PowerLawFit(COMPUTE, losses).predict(TARGET)
    two = PowerLawFit(np.tile(COMPUTE, 2), np.tile(losses, 2)).predict(TARGET)
    assert two.loss == pytest.approx(one.loss)
    assert two.high - two.low < 0.7 * (one.high - one.low)


def test_mistakes():
    with pytest.raises(UserError, match="3 sizes are too few to fit a power law; use at least 4"):
        PowerLawFit([1e9, 2e9, 4e9, 4e9], [3.0, 2.5, 2.2, 2.2])
    with pytest.raises(UserError, match="a loss of 2.0000 is below the floor of 2.1000"):
        PowerLawFit([1e9, 2e9, 4e9, 8e9], [3.0, 2.5, 2.2, 2.0], 2.1)
    with pytest.raises(UserError, match="the loss does not fall with size"):
        PowerLawFit([1e9, 2e9, 4e9, 8e9], [2.0, 2.2, 2.5, 3.0])
