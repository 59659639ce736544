"""The learning rate over a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinker.training.config.sections import TrainConfig
from thinker.training.optim.schedule import lr_multiplier, momentum_at

COSINE = TrainConfig(schedule="cosine", warmup_steps=0, min_lr_ratio=0.1)
WSD = TrainConfig(schedule="wsd", warmup_steps=3, decay_fraction=0.5, min_lr_ratio=0.2)


def test_known_values():
    assert [lr_multiplier(COSINE, 9, p) for p in (0, 0.5, 1)] == pytest.approx([1, 0.55, 0.1])
    assert [lr_multiplier(WSD, 9, p) for p in (0, 0.5, 0.75, 1)] == pytest.approx([1, 1, 0.6, 0.2])
    assert [lr_multiplier(WSD, s, 0) for s in (0, 1, 2, 3, 4)] == pytest.approx(
        [0.25, 0.5, 0.75, 1, 1]
    )
    assert lr_multiplier(WSD.model_copy(update={"decay_fraction": 0.0}), 9, 1) == 1


@given(
    step=st.integers(0, 100),
    a=st.floats(0, 1),
    b=st.floats(0, 1),
    schedule=st.sampled_from([COSINE, WSD]),
)
def test_never_rises_after_warmup_and_stays_in_range(step, a, b, schedule):
    low, high = sorted((a, b))
    later, earlier = lr_multiplier(schedule, step + 3, high), lr_multiplier(schedule, step + 3, low)
    assert later <= earlier + 1e-9
    assert schedule.min_lr_ratio - 1e-9 <= later <= 1


def test_a_decay_that_is_left_out_takes_the_last_six_tenths():
    train = TrainConfig(schedule="wsd", warmup_steps=0)
    assert lr_multiplier(train, 9, 0.4) == 1
    assert lr_multiplier(train, 9, 0.7) == pytest.approx(0.5)


def test_momentum_rises_to_its_value_and_stays():
    found = [momentum_at(step, 1.0, 100) for step in (0, 50, 99, 100, 5000)]
    assert found == pytest.approx([0.9, 0.95, 0.999, 1, 1])
    assert [momentum_at(step, 0.95, 0) for step in (0, 1)] == [0.95, 0.95]
    assert [momentum_at(step, 0.6, 100) for step in (0, 50, 100)] == [0.6] * 3
