"""The checks of the lesson on masks take right answers and name typical mistakes."""

import math

import pytest
import torch

from thinker.lessons.checks.masks import check_cheat, check_weights, check_window


def mask(
    low=0,
    more=0,
    both=False,
    is_late_hidden=True,
    is_hidden=False,
    is_exchanged=False,
    is_bounded=True,
):
    """An answer to the first exercise, with a mistake."""

    def my_mask(T, w):
        distance = torch.arange(T)[:, None] - torch.arange(T)
        distance = distance.abs() if both else distance
        table = (distance < w + more) if is_bounded else distance == distance
        table = table & (distance >= low) if is_late_hidden else table
        table = ~table if is_hidden else table
        return table.T if is_exchanged else table

    return my_mask


def scores(T, w):
    return torch.zeros(T, T).masked_fill(~mask()(T, w), -math.inf)


WRONG = [
    (check_window, mask(is_hidden=True), "Your True means hidden"),
    (check_window, mask(is_late_hidden=False), "later tokens are visible"),
    (check_window, mask(both=True), "to both sides"),
    (check_window, mask(is_exchanged=True), "exchanged"),
    (check_window, mask(is_bounded=False), "this is the causal mask"),
    (check_window, mask(more=1), "one key too many"),
    (check_window, mask(more=-1), "one key too few"),
    (check_window, mask(low=1), "does not see itself"),
    (check_window, mask(low=1, more=1), "does not see itself"),
    (check_window, scores, "these are scores"),
    (check_window, lambda T, w: mask()(T, 3), "not for all T and w"),
    (check_window, lambda T, w: torch.ones(T, T), "row 0 only key 0"),
    (check_window, lambda T, w: torch.ones(T), "shape"),
    (check_weights, [0, 0, 0.032, 0.087, 0.644, 0.237], "token 5 comes after"),
    (check_weights, [0.314, 0.314, 0.016, 0.042, 0.314, 0], "the other text"),
    (check_weights, [0.281, 0.281, 0.014, 0.038, 0.281, 0.104], "without a mask"),
    (check_weights, [0, 0, 0.269, 0.731, 0, 0], "Count from 0"),
    (check_weights, [0, 0, 1, 2.718, 20.086, 0], "their sum, 23.804"),
    (check_weights, [0.037, 0.037, 0.037, 0.101, 0.749, 0.037], "Leave them out"),
    (check_weights, [0, 0, 0.037, 0.101, 0.749, 0], "Leave them out"),
    (check_weights, [0, 0, 0.014, 0.038, 0.281, 0], "sum to 0.333"),
    (check_weights, [0.042, 0.114, 0.844], "shape"),
    (check_weights, [0, 0, 0.2, 0.4, 0.4, 0], "neither later"),
    (check_cheat, "a", "ln 2"),
    (check_cheat, "B", "six equally likely"),
    (check_cheat, "D", "what is random"),
    (check_cheat, 3.9, "one letter"),
]


@pytest.mark.parametrize(("check", "answer", "hint"), WRONG)
def test_a_mistake_gets_its_hint(check, answer, hint, capsys):
    assert not check(answer)
    assert hint in capsys.readouterr().out


def test_right_answers_are_right():
    assert check_window(mask())
    assert check_window(lambda T, w: torch.ones(T, T).tril() - torch.ones(T, T).tril(-w))
    assert check_weights([0, 0, 0.042, 0.114, 0.844, 0])
    assert check_cheat("C")
    assert check_cheat(" c")
