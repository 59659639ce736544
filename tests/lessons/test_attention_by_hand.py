"""The checks of a lesson take right answers and name typical mistakes."""

import math

import pytest
import torch

from thinker.lessons.checks.attention_by_hand import check_attention, check_divisor, check_row


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
    (check_row, [0.09, 0.665, 0.245], "not divided by √2"),
    (check_row, [0.186, 0.506, 0.307], "divided by 2"),
    (check_row, [1, 4.113, 2.028], "by their sum, 7.141"),
    (check_row, [0, 2 / 3, 1 / 3], "not the scores"),
    (check_row, [0.1, 0.2, 0.3], "sum to 0.600"),
    (check_row, [0.5, 0.5], "shape"),
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
    assert check_row([0.140, 0.576, 0.284])
    assert check_divisor(32.0)
