"""Checks of the lesson "Positions"."""

import math
from typing import Any

import torch
from torch import Tensor

from thinker.lessons.exercise import call, exercise, is_near
from thinker.model.positions import Rope, alibi_slopes, apply_rotary_emb

NAMES = ("rope", "alibi", "learned", "none")
RIGHT = {"A": "learned", "B": "alibi", "C": "none", "D": "rope"}
WHY = {
    "A": "its diagonals are not constant, so the score depends on the two positions, not on their distance alone",
    "B": "each step to the left costs the same",
    "C": "all scores are equal, so nothing tells the tokens apart",
    "D": "it falls with the distance, but then rises again",
}


def rotate(x: Tensor, position: int) -> Tensor:
    """What Thinker computes for a vector x (D,) at a position, with theta = 10,000."""
    rope = Rope(len(x), theta=10_000.0)(torch.tensor([position]), position + 1, torch.float64)
    return apply_rotary_emb(x[None].double(), rope)[0]


def turn(first: Tensor, second: Tensor, radians: float) -> tuple[Tensor, Tensor]:
    """The pair (first, second), turned counterclockwise."""
    cos, sin = math.cos(radians), math.sin(radians)
    return first * cos - second * sin, second * cos + first * sin


@exercise
def check_rotate(answer: Any) -> str | None:
    """A function rotate(x, position) for x of shape (4,), with theta = 10,000."""
    x, position = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), 7
    a, b, c, d = x
    found = call(answer, x.clone(), position)
    if is_near(found, rotate(x, position)):
        return None
    (p, r), (q, s) = turn(a, b, position), turn(c, d, position / 100)
    if is_near(found, torch.stack((p, r, q, s))):
        return "Not yet: your pairs are neighbors. Thinker pairs each number with the one D/2 = 2 places further."
    (p, r), (q, s) = turn(a, c, position), turn(b, d, position)
    if is_near(found, torch.stack((p, q, r, s))):
        return "Not yet: both pairs turn at the same speed, but the second should turn by 0.01 per position."
    if is_near(found, rotate(x, 1)):
        return "Not yet: the angle does not grow with the position. Multiply it by the position."
    (p, r), (q, s) = turn(a, c, -position), turn(b, d, -position / 100)
    if is_near(found, torch.stack((p, q, r, s))):
        return "Not yet: your hands turn clockwise. Look at the signs of the two sines."
    (p, r), (q, s) = turn(a, c, math.radians(position)), turn(b, d, math.radians(position / 100))
    if is_near(found, torch.stack((p, q, r, s))):
        return "Not yet: your angles are in degrees, but the speeds are 1 and 0.01 radians per position."
    lengths = [float(y.norm()) for y in (x, torch.as_tensor(found, dtype=torch.float64))]
    if abs(lengths[0] - lengths[1]) > 1e-3:
        return f"Not yet: turning keeps the length. Yours changed it from {lengths[0]:.3f} to {lengths[1]:.3f}."
    return "Not yet: try x = (1, 0, 0, 0) at position 1, and compare with the numbers above."


@exercise
def check_score(answer: Any) -> str | None:
    """The score of the query (2, 0) at 1002 and the key (0, 1) at 1000, for 30° per position."""
    if is_near(answer, math.sqrt(3), 6e-3):
        return None
    if is_near(answer, -math.sqrt(3), 6e-3):
        return "Not yet: the query has turned 60° further than the key, toward it, because the key started at 90°."
    if is_near(answer, math.sqrt(3) / 2, 6e-3):
        return "Not yet: that is the cosine. A dot product is the product of both lengths times the cosine."
    if is_near(answer, 1.0, 6e-3):
        return "Not yet: that is 2 · cos 60°. But before any turning, the key is already 90° ahead of the query."
    if is_near(answer, 0.0, 6e-3):
        return "Not yet: that is the score without positions. The query turns 1002 times, the key 1000 times."
    return "Not yet: both turn 1000 times, which does not matter. What is the angle between them after that?"


def mystery_scores() -> dict[str, Tensor]:
    """Scores between five tokens with equal queries and equal keys, (5, 5) each, by letter."""
    T = 5
    places = torch.arange(T)
    table = torch.randn(T, 4, generator=torch.Generator().manual_seed(5))  # learned positions
    x = torch.ones(T, 4)
    turned = apply_rotary_emb(x, Rope(4, theta=10_000.0)(places, T, torch.float32))
    distance = (places[:, None] - places).abs()
    scores = {
        "A": (x + table) @ (x + table).T / 2,
        "B": x @ x.T / 2 - alibi_slopes(4)[0] * distance,
        "C": x @ x.T / 2,
        "D": turned @ turned.T / 2,
    }
    later = torch.ones(T, T).triu(1).bool()
    return {letter: matrix.masked_fill(later, -torch.inf) for letter, matrix in scores.items()}


@exercise
def check_encodings(answer: Any) -> str | None:
    """The encoding of each matrix of mystery_scores(), as a dict from letter to name."""
    if not isinstance(answer, dict) or set(answer) != set(RIGHT):
        return "Not yet: the answer needs one name for each of the letters A, B, C and D."
    unanswered = [letter for letter, name in answer.items() if name is ...]
    if unanswered:
        return "Not answered yet: replace the dots."
    for name in answer.values():
        if name not in NAMES:
            return f"Not yet: {name!r} is not one of {', '.join(NAMES)}."
    for letter, name in RIGHT.items():
        if answer[letter] != name:
            return f"Not yet: {letter} is not {answer[letter]}. Look at it again: {WHY[letter]}."
    return None
