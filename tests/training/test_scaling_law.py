"""The estimate of what more time, text or parameters would gain."""

import pytest
from conftest import random_model
from hypothesis import given
from hypothesis import strategies as st

from thinker.training.reports.scaling_law import (
    ALPHA,
    BETA,
    GAMMA,
    IRREDUCIBLE_BITS_PER_BYTE,
    count_parameters,
    predict_loss_changes,
)

BITS = st.floats(0.56, 8)
GAPS = st.floats(-1, 4)
COUNTS = st.integers(1, 10**12)
EPOCHS = st.floats(0.01, 100)


@given(BITS, GAPS, COUNTS, COUNTS, EPOCHS)
def test_no_change_is_a_loss_and_all_together_stay_above_the_irreducible_loss(
    bits, gap, n_parameters, n_tokens, epochs
):
    changes = predict_loss_changes(3.0, bits, 3.0 - gap, n_parameters, n_tokens, epochs)
    falls = changes.time, changes.text, changes.parameters
    assert all(fall >= 0 for fall in falls)
    assert sum(falls) < 3.0 * (1 - IRREDUCIBLE_BITS_PER_BYTE / bits)


def test_the_split_at_the_balance():
    """At 20 tokens per parameter, time and size gain the same from a small increase."""
    changes = predict_loss_changes(3.0, 2.0, 2.5, 10**6, 20 * 10**6, 4.0)
    reducible = 3.0 * (1 - IRREDUCIBLE_BITS_PER_BYTE / 2.0)
    assert changes.text == pytest.approx(0.5 * (1 - 2**-BETA))  # the gap is the text's
    time, size = changes.time / (1 - 2**-GAMMA), changes.parameters / (1 - 2**-ALPHA)
    assert time + size + 0.5 == pytest.approx(reducible)
    assert time * GAMMA == pytest.approx(size * ALPHA)


def test_few_tokens_per_parameter_call_for_time_and_many_for_size():
    few, many = (predict_loss_changes(3.0, 2.0, 3.0, 10**6, n * 10**6, 1.0) for n in (1, 400))
    assert few.time > few.parameters
    assert many.time < many.parameters


def test_text_that_was_not_read_gains_nothing_and_a_longer_run_reads_more_of_it():
    half, one, two, many = (
        predict_loss_changes(3.0, 2.0, 2.5, 10**6, 2 * 10**7, epochs) for epochs in (0.5, 1, 2, 9)
    )
    assert half.text == one.text == 0
    assert two.text == many.text > 0
    assert half.time > one.time == two.time == many.time


def test_a_loss_that_is_not_reducible_has_no_estimate():
    assert predict_loss_changes(3.0, IRREDUCIBLE_BITS_PER_BYTE, 2.5, 10**6, 10**7, 1.0) is None


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_embeddings_are_not_counted(tie_embeddings):
    model = random_model(tie_embeddings=tie_embeddings)
    names = [
        name
        for name, _ in model.named_parameters()
        if name not in ("embedding.weight", "lm_head.weight")
    ]
    assert (
        count_parameters(model.config)
        == sum(model.get_parameter(name).numel() for name in names)
        > 0
    )
