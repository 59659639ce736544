"""The checks of the lesson on sparse attention take right answers and name typical mistakes."""

import pytest
import torch

from thinker.lessons.checks.sparse_attention import check_cheapest, check_count, check_pattern
from thinker.lessons.materials.recall import make_recall_in_parts

WRONG = [
    (check_pattern, lambda q, k: (k <= q) & (q - k < 9), "the whole window"),
    (check_pattern, lambda q, k: (q - k < 9) & ((q - k) % 3 == 0), "see later keys"),
    (check_pattern, lambda q, k: (k <= q) & (q - k <= 9) & ((q - k) % 3 == 0), "one too many"),
    (check_pattern, lambda q, k: (k <= q) & ((q - k) % 3 == 0), "nothing ends the window"),
    (check_pattern, lambda q, k: (k <= q) & (q - k < 9) & (k % 3 == 0), "k itself"),
    (check_pattern, lambda q, k: (k < q) & (q - k < 9) & ((q - k) % 3 == 0), "its own key"),
    (check_pattern, lambda q, k: (k <= q) & (q - k < 6) & ((q - k) % 3 == 0), "it sees [17, 20]"),
    (check_pattern, lambda q, k: k <= q and q - k < 9, "instead of `and`"),
    (check_pattern, lambda q, k: k <= q & q - k < 9, "parentheses"),
    (check_pattern, lambda q, k: q - k, "True and False"),
    (check_pattern, lambda q, k: k <= 5, "True and False"),
    (check_pattern, lambda q, k: ..., "Not answered"),
    (check_count, [8, 88], "14 and 15"),
    (check_count, [2, 88], "the block before"),
    (check_count, [5, 88], "counted from 0"),
    (check_count, [14, 136], "tokens 12 to 15"),
    (check_count, [6, 104], "no block before it"),
    (check_count, [6, 96], "same number of keys"),
    (check_count, [6, 40], "own block"),
    (check_count, [6, 128], "add up the four queries"),
    (check_count, 6, "raised"),
    (check_cheapest, "full", "256.5 keys per query"),
    (check_cheapest, "window(64) | global(8)", "are enough"),
    (check_cheapest, "strided(51) | global(8)", "are enough"),
    (check_cheapest, "window(50) | global(8)", "just outside"),
    (check_cheapest, "window(51)", "do not see the first 8"),
    (check_cheapest, "window(51) & global(8)", "& keeps only"),
    (check_cheapest, "window(51) | global(4)", "token 511 needs token 7"),
    (check_cheapest, "linear(64)", "only sums"),
    (check_cheapest, "retrieve(8, 7)", "positions alone"),
    (check_cheapest, "bigbird(51, 8, 8, 1)", "positions alone"),
    (check_cheapest, "prefix(8) & window(51)", "Not yet"),
    (check_cheapest, "prefix(8)", "see later ones"),
    (check_cheapest, "windows(51)", "does not know"),
    (check_cheapest, 51, "in quotes"),
]


@pytest.mark.parametrize(("check", "answer", "hint"), WRONG)
def test_a_mistake_gets_its_hint(check, answer, hint, capsys):
    assert not check(answer)
    assert hint in capsys.readouterr().out


def test_right_answers_are_right():
    assert check_pattern(lambda q, k: (q >= k) & (q - k <= 8) & ((q - k) % 3 == 0))
    assert check_count((6, 88))
    assert check_cheapest("global(8) | window(51)")


def test_the_recall_task_asks_for_numbers_that_it_has_shown():
    tokens, targets = make_recall_in_parts(torch.Generator().manual_seed(0), B=3)
    assert tokens.shape == targets.shape == (3, 96)
    for row, wanted in zip(tokens.tolist(), targets.tolist()):
        for start in range(0, 96, 24):
            part = row[start : start + 24]
            number_of = dict(zip(part[0:8:2], part[1:8:2]))
            assert len(number_of) == 4
            for place, target in enumerate(wanted[start : start + 24]):
                assert target == (number_of[part[place]] if place in (16, 18, 20, 22) else -1)
