"""The coordinate check: default steps change activations by about as much at every width."""

import math

import pytest

from thinker.benchmarks.losses.coordinates import QUANTITIES, growth, measure

pytestmark = pytest.mark.usefixtures("one_thread")
MOST_OF_WIDTH = 0.25  # slope on log axes; an AdamW rate that ignores the width has about 1
MOST_OF_LAYERS = 0.5


def slopes(rows, axis, step):
    return {row["activation"]: row["change_slope"] for row in growth(rows, axis, step)}


@pytest.fixture(scope="module")
def by_width():
    return [row for width in (64, 128, 256) for row in measure(width, 2, 4)]


@pytest.mark.more
@pytest.mark.parametrize("step", [2, 4])
def test_updates_do_not_grow_with_width(by_width, step):
    for name, slope in slopes(by_width, "width", step).items():
        assert abs(slope) < MOST_OF_WIDTH, name


@pytest.mark.more
def test_the_first_step_moves_only_the_head(by_width):
    """The head's weights are zero, so no gradient reaches what is below it."""
    first = [row for row in by_width if row["step"] == 1]
    changes = {name: [r["change"] for r in first if r["activation"] == name] for name in QUANTITIES}
    assert max(changes["logits"]) < 1.2 * min(changes["logits"])
    del changes["logits"]
    assert all(change == [0, 0, 0] for change in changes.values())


@pytest.mark.more
def test_activations_do_not_grow_with_width(by_width):
    for row in growth(by_width, "width", 4):
        assert abs(row["rms_slope"]) < MOST_OF_WIDTH, row["activation"]


def test_updates_of_up_to_eight_layers_grow_slower_than_their_root():
    """From 8 to 24 layers, the residual stream grows faster (docs/explanations/learning-rates.md)."""
    rows = [row for n_layers in (2, 4, 8) for row in measure(64, n_layers, 8)]
    for name, slope in slopes(rows, "layers", 8).items():
        assert slope < MOST_OF_LAYERS, name


@pytest.mark.more
def test_logits_grow_where_the_width_exceeds_the_vocabulary():
    """A known limit: Muon does not scale an update of a matrix with fewer rows than columns down, so
    the head moves as √(width / vocabulary)."""
    rows = [row for width in (256, 512) for row in measure(width, 2, 1)]
    changes = [row["change"] for row in rows if (row["activation"], row["step"]) == ("logits", 1)]
    assert changes[1] / changes[0] == pytest.approx(2**0.5, rel=0.1)


def test_a_rate_that_ignores_the_width_is_seen():
    """AdamW at one rate for all widths, which the check must find."""
    options = ("optimizer.name=adamw", "optimizer.lr=0.01")
    rows = [row for width in (64, 256) for row in measure(width, 2, 4, *options)]
    assert slopes(rows, "width", 4)["logits"] > 0.4


def test_activations_at_the_start():
    rows = {row["activation"]: row for row in measure(64, 2, 0)}
    assert set(rows) == set(QUANTITIES)
    assert all(row["change"] == 0 for row in rows.values())
    assert rows["embedding"]["rms"] == pytest.approx(1, abs=0.05)
    # Blocks write nothing yet, and the head's weights are zero.
    assert rows["residual stream"]["rms"] == rows["embedding"]["rms"]
    assert rows["logits"]["rms"] == 0
    assert math.isclose(rows["attention logits"]["rms"], 1, rel_tol=0.5)
