"""The checks of the lesson on heads take right answers and name typical mistakes."""

import pytest

from thinker.interpretability import heads
from thinker.lessons.checks.look_inside import check_heads, check_row, check_score


def half(weights):
    return len(weights) // 2


WRONG = [
    (check_score, heads.induction, "the induction score"),
    (check_score, heads.previous_token, "previous-token score"),
    (check_score, lambda w: w.diagonal(-half(w)), "Return their mean"),
    (check_score, lambda w: w.diagonal(-half(w)).sum(), "this is the sum"),
    (check_score, lambda w: w.diagonal(-half(w)).sum() / len(w), "only the second half counts"),
    (check_score, lambda w: w.diagonal(half(w)).mean(), "below the diagonal"),
    (check_score, lambda w: w.diagonal().mean(), "to itself"),
    (check_score, lambda w: w[half(w) :].mean(), "column i - n"),
    (check_score, lambda w: w, "shape"),
    (check_score, lambda w: ..., "Not answered"),
    (check_row, [-1.040, 2.5], "sign"),
    (check_row, [1.5, 2.5], "in bits"),
    (check_row, [0.646, 2.5], "ln 5"),
    (check_row, [0.208, 2.5], "number of keys"),
    (check_row, [0.69, 2.5], "0.5, 0.25 and 0.25"),
    (check_row, [1.040, 1.5], "from the start"),
    (check_row, [1.040, 3.5], "distance 0, not 1"),
    (check_row, [1.040, 2.0], "by its weight before"),
    (check_row, [1.040, 0.5], "already is the mean"),
    (check_row, [1.040, 9.0], "4, 3, 2, 1 and 0"),
    (check_row, 1.040, "shape"),
    (check_heads, ["1.0", "1.1"], "other way round"),
    (check_heads, ["1.1", "1.1"], "two different heads"),
    (check_heads, ["0.0", "1.0"], "token before"),
    (check_heads, ["1.0", "0.1"], "take it out"),
    (check_heads, ["1.1", "0.1"], "1.1 is right"),
    (check_heads, ["0.1", "1.0"], "almost nothing"),
    (check_heads, ["1.1"], "ValueError"),
]


@pytest.mark.parametrize(("check", "answer", "hint"), WRONG)
def test_a_mistake_gets_its_hint(check, answer, hint, capsys):
    assert not check(answer)
    assert hint in capsys.readouterr().out


def test_right_answers_are_right():
    assert check_score(heads.duplicate_token)
    assert check_row([1.04, 2.5])
    assert check_row((1.0397, 2.5))
    assert check_heads(("1.1", "1.0"))
    assert check_heads([1.1, 1.0])
