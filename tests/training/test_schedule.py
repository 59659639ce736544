"""The learning rate over a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinker.training.schedule import lr_multiplier

COSINE = {"schedule": "cosine", "warmup_steps": 0, "decay_fraction": 0.4, "final": 0.1}
WSD = {"schedule": "wsd", "warmup_steps": 3, "decay_fraction": 0.5, "final": 0.2}


def test_known_values():
    assert [lr_multiplier(9, p, **COSINE) for p in (0, 0.5, 1)] == pytest.approx([1, 0.55, 0.1])
    assert [lr_multiplier(9, p, **WSD) for p in (0, 0.5, 0.75, 1)] == pytest.approx([1, 1, 0.6, 0.2])
    assert [lr_multiplier(s, 0, **WSD) for s in (0, 1, 2, 3, 4)] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert lr_multiplier(9, 1, **{**WSD, "decay_fraction": 0.0}) == 1


@given(step=st.integers(0, 100), a=st.floats(0, 1), b=st.floats(0, 1), schedule=st.sampled_from([COSINE, WSD]))
def test_never_rises_after_warmup_and_stays_in_range(step, a, b, schedule):
    low, high = sorted((a, b))
    later, earlier = lr_multiplier(step + 3, high, **schedule), lr_multiplier(step + 3, low, **schedule)
    assert later <= earlier + 1e-9
    assert schedule["final"] - 1e-9 <= later <= 1


def test_a_decay_that_is_left_out_takes_the_last_six_tenths():
    options = {**WSD, "warmup_steps": 0, "decay_fraction": None, "final": 0.0}
    assert lr_multiplier(9, 0.4, **options) == 1
    assert lr_multiplier(9, 0.7, **options) == pytest.approx(0.5)
