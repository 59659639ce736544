"""The checks of the lesson "Positions" take right answers and name typical mistakes."""

import math

import pytest
import torch

from thinker.lessons.checks.positions import (
    RIGHT,
    check_encodings,
    check_rotate,
    check_score,
    mystery_scores,
)


def rotate(pairs=((0, 2), (1, 3)), speeds=(1.0, 0.01), grows=True):
    """An answer to the first exercise, with a mistake."""

    def turn(x, position):
        y = x.clone()
        for (first, second), speed in zip(pairs, speeds):
            angle = speed * (position if grows else 1)
            y[first] = x[first] * math.cos(angle) - x[second] * math.sin(angle)
            y[second] = x[second] * math.cos(angle) + x[first] * math.sin(angle)
        return y

    return turn


def swap(first, second):
    """The right names, with two of them exchanged."""
    return RIGHT | {first: RIGHT[second], second: RIGHT[first]}


WRONG = [
    (check_rotate, rotate(pairs=((0, 1), (2, 3))), "pairs are neighbors"),
    (check_rotate, rotate(speeds=(1.0, 1.0)), "same speed"),
    (check_rotate, rotate(grows=False), "does not grow"),
    (check_rotate, rotate(speeds=(-1.0, -0.01)), "clockwise"),
    (check_rotate, rotate(speeds=(math.radians(1), math.radians(0.01))), "in degrees"),
    (check_rotate, lambda x, position: 2 * x, "from 5.477 to 10.954"),
    (check_rotate, lambda x, position: x, "x = (1, 0, 0, 0)"),
    (check_rotate, lambda x, position: x[:2], "shape"),
    (check_rotate, lambda x, position: ..., "Not answered yet"),
    (check_score, -1.732, "toward it"),
    (check_score, 0.866, "product of both lengths"),
    (check_score, 1.0, "2 · cos 60°"),
    (check_score, 0, "without positions"),
    (check_score, 2, "angle between them"),
    (check_encodings, swap("A", "D"), "A is not rope. Look at it again: its diagonals"),
    (check_encodings, swap("B", "D"), "B is not rope. Look at it again: each step"),
    (check_encodings, swap("B", "C"), "B is not none"),
    (check_encodings, RIGHT | {"D": "alibi"}, "D is not alibi. Look at it again: it falls"),
    (check_encodings, RIGHT | {"D": "RoPE"}, "'RoPE' is not one of"),
    (check_encodings, RIGHT | {"C": ...}, "Not answered yet"),
    (check_encodings, ["rope", "alibi"], "one name for each"),
]


@pytest.mark.parametrize(("check", "answer", "hint"), WRONG)
def test_a_mistake_gets_its_hint(check, answer, hint, capsys):
    assert not check(answer)
    assert hint in capsys.readouterr().out


def test_right_answers_are_right():
    assert check_rotate(rotate())
    assert check_score(1.73)
    assert check_score(math.sqrt(3))
    assert check_encodings(RIGHT)


def test_the_matrices_are_as_the_hints_say():
    scores = mystery_scores()
    diagonals = {
        letter: [matrix.diagonal(-d) for d in range(5)] for letter, matrix in scores.items()
    }
    is_constant = {
        letter: all(float(d.max() - d.min()) < 1e-5 for d in lines)
        for letter, lines in diagonals.items()
    }
    assert is_constant == {"A": False, "B": True, "C": True, "D": True}
    by_distance = {
        letter: torch.stack([d[0] for d in lines]) for letter, lines in diagonals.items()
    }
    assert torch.allclose(by_distance["B"].diff(), torch.tensor(-0.25))
    assert by_distance["C"].std() == 0
    assert by_distance["D"][4] > by_distance["D"][3] < by_distance["D"][2]
