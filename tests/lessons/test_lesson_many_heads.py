"""The checks of the lesson take right answers and name typical mistakes."""

import math

import pytest
import torch

from thinker.lessons.checks.many_heads import check_cache, check_grouped, check_layout


def interleave(x, n):
    return x.repeat_interleave(n, dim=0)


def tile(x, n):
    return x.repeat(n, 1, 1)


def first_only(x, n):
    return x[:1]


def merge(y):
    return y.transpose(0, 1).flatten(1)


def grouped(keys=interleave, values=interleave, divisor=2.0, is_causal=True, finish=merge):
    """An answer to the first exercise, for D = 4, with a mistake."""

    def attend(q, k, v):
        n = len(q) // len(k)
        scores = q @ keys(k, n).transpose(1, 2) / divisor
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        return finish(scores.softmax(dim=-1) @ values(v, n))

    return attend


WRONG = [
    (check_grouped, grouped(tile, tile), "0, 0, 0, 1, 1, 1"),
    (check_grouped, grouped(tile, interleave), "different orders"),
    (check_grouped, grouped(interleave, tile), "different orders"),
    (check_grouped, grouped(first_only, first_only), "KV head 0"),
    (check_grouped, grouped(is_causal=False), "later tokens"),
    (check_grouped, grouped(divisor=1.0), "not divided by √D"),
    (check_grouped, grouped(divisor=math.sqrt(24)), "width of one head"),
    (check_grouped, grouped(finish=lambda y: y), "Merge the heads"),
    (check_grouped, grouped(finish=lambda y: y.reshape(y.shape[1], -1)), "without a transpose"),
    (check_grouped, grouped(finish=lambda y: y.permute(1, 2, 0).flatten(1)), "stay together"),
    (check_grouped, grouped(finish=lambda y: y.mean(dim=0)), "shape"),
    (check_grouped, grouped(divisor=4.0), "step"),
    (check_grouped, lambda q, k, v: q @ k.transpose(1, 2), "RuntimeError"),
    (check_cache, 96 * 2**20, "these are bytes"),
    (check_cache, 100.66, "not a million"),
    (check_cache, 384, "Query heads do not count"),
    (check_cache, 48, "also a value"),
    (check_cache, 192, "bf16 has 2 bytes"),
    (check_cache, 4, "one layer"),
    (check_cache, 24, "one KV head"),
    (check_cache, 1.5, "D numbers"),
    (check_cache, 24576, "single token"),
    (check_cache, 0.0234, "single token"),
    (check_cache, 10, "first multiply"),
    (check_layout, ("A", 4.0), "do not fit"),
    (check_layout, ("B", 8), "do not fit"),
    (check_layout, ("C", 16), "query heads"),
    (check_layout, ("C", 1.0), "both a key and a value"),
    (check_layout, ("C", 4), "bf16 has 2 bytes"),
    (check_layout, ("C", 2.5), "but not the size"),
    (check_layout, ("A", 3.0), "heads can be wide"),
    (check_layout, ("D", 2.0), "A, B or C"),
    (check_layout, "C", "the letter and the number"),
    (check_layout, ("C", ...), "Not yet"),
]


@pytest.mark.parametrize(("check", "answer", "hint"), WRONG)
def test_a_mistake_gets_its_hint(check, answer, hint, capsys):
    assert not check(answer)
    assert hint in capsys.readouterr().out


def test_right_answers_are_right():
    assert check_grouped(grouped())
    assert check_cache(96)
    assert check_layout(("C", 2))
