"""The checks of a lesson take right answers and name typical mistakes."""

import math

import pytest
import torch

from thinker.lessons.checks.attention_by_hand import check_attention, check_divisor, check_two_words


def attention(divisor=2.0, fill=-math.inf, is_causal=True, dim=-1, is_late=False):
    """An answer to the first exercise, for D = 4, with a mistake."""

    def attend(q, k, v):
        scores = q @ k.T / divisor
        hidden = torch.ones_like(scores).triu(1).bool()
        if is_causal and not is_late:
            scores = scores.masked_fill(hidden, fill)
        weights = scores.softmax(dim=dim)
        return (weights.tril() if is_late else weights) @ v

    return attend


WRONG = [
    (check_attention, attention(divisor=1.0), "not divided by √D"),
    (check_attention, attention(divisor=4.0), "by D instead of √D"),
    (check_attention, attention(is_causal=False), "sees later tokens"),
    (check_attention, attention(is_late=True), "after the softmax"),
    (check_attention, attention(dim=0), "over the queries"),
    (check_attention, attention(fill=0.0), "Use -inf"),
    (check_attention, lambda q, k, v: q[0], "shape"),
    (check_two_words, [[1.85, 13.15], [10.91, 4.09]], "not divided by √2"),
    (check_two_words, [[4.09, 10.91], [9.3, 5.7]], "divided by 2"),
    (check_two_words, [[30, 120], [30, 15]], "Divide each row by 10"),
    (check_two_words, [[3.75, 11.25], [15, 0]], "not the scores"),
    (check_two_words, [[7.5, 13.33], [7.5, 1.67]], "not those of each key"),
    (check_two_words, [[7.5, 7.5], [13.33, 1.67]], "swapped"),
    (check_two_words, [[3, 0], [0, 5]], "only its own value"),
    (check_two_words, [[15, 0], [10, 5]], "no mask"),
    (check_two_words, [[0.2, 0.8], [0.667, 0.333]], "these are the weights"),
    (check_two_words, [[10, 5], [3, 12]], "0.98 and 2.94"),
    (check_two_words, [3, 12], "shape"),
    (check_divisor, 8, "standard deviation of 1"),
    (check_divisor, 64, "grows with √D"),
    (check_divisor, 16, "product has 4"),
]


@pytest.mark.parametrize(("check", "answer", "hint"), WRONG)
def test_a_mistake_gets_its_hint(check, answer, hint, capsys):
    assert not check(answer)
    assert hint in capsys.readouterr().out


def test_right_answers_are_right():
    assert check_attention(attention())
    assert check_two_words([[3, 12], [10.0, 5]])
    assert check_divisor(32.0)
