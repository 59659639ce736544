"""Checks of the lesson "Masks"."""

import math
from typing import Any

import torch
from torch import Tensor

from thinker.lessons.exercise import call, exercise, is_near
from thinker.model.patterns.pattern import TokenInfo
from thinker.model.patterns.pattern_parser import parse_pattern

SCORES = torch.tensor([3.0, 3.0, 0.0, 1.0, 3.0, 2.0], dtype=torch.float64)  # of token 4
ENTROPIES = {"A": math.log(2), "B": math.log(6), "C": math.log(64), "D": 0.0}


def visible(pattern: str, T: int) -> Tensor:
    """What Thinker's pattern lets each query (row) see, (T, T)."""
    position = torch.arange(T)
    return parse_pattern(pattern)(
        torch.tensor(0), TokenInfo(position[:, None]), TokenInfo(position)
    )


@exercise
def check_window(answer: Any) -> str | None:
    """A function mask(T, w): True where a key is one of the w newest, including the query's own."""
    T, w = 7, 3
    found = torch.as_tensor(call(answer, T, w))
    if not found.isfinite().all():
        return "Not yet: these are scores. Return True for visible keys and False for hidden ones."
    right, distance = visible(f"window({w})", T), torch.arange(T)[:, None] - torch.arange(T)
    if is_near(found, right):
        if all(
            is_near(call(answer, *size), visible(f"window({size[1]})", size[0]))
            for size in ((5, 1), (4, 9))
        ):
            return None
        return "Not yet: it is right for T = 7 and w = 3, but not for all T and w. Try T = 5, w = 1 and T = 4, w = 9."
    if is_near(found, ~right):
        return "Not yet: True has to mean visible. Your True means hidden."
    if is_near(found, distance < w):
        return "Not yet: later tokens are visible. Their distance, query minus key, is negative."
    if is_near(found, distance.abs() < w):
        return (
            "Not yet: your window reaches to both sides. Hide the keys that come after the query."
        )
    if is_near(found, right.T):
        return (
            "Not yet: rows and columns are exchanged. Row 6 has to see keys 4, 5 and 6 if w is 3."
        )
    if is_near(found, visible("full", T)):
        return "Not yet: this is the causal mask. Old keys have to disappear as well: count those in the last row."
    if is_near(found, visible(f"window({w + 1})", T)):
        return "Not yet: each token sees one key too many. Its own counts as one of the w."
    if is_near(found, visible(f"window({w - 1})", T)):
        return "Not yet: each token sees one key too few. With w = 3 it sees itself and the two before it."
    if is_near(found, (distance > 0) & (distance <= w)) or is_near(
        found, (distance > 0) & (distance < w)
    ):
        return "Not yet: a token does not see itself. Its own key has the distance 0."
    return "Not yet: print my_mask(7, 3). Row 6 has to see keys 4, 5 and 6, and row 0 only key 0."


@exercise
def check_weights(answer: Any) -> str | None:
    """The weights of token 4, if tokens 0-1 and 2-5 are two documents and the mask is causal."""
    key = torch.arange(6)
    causal, document = key <= 4, key >= 2
    right = _weights(causal & document)
    if is_near(answer, right):
        return None
    if is_near(answer, _weights(document)):
        return "Not yet: token 5 comes after token 4, so token 4 must not see it."
    if is_near(answer, _weights(causal)):
        return "Not yet: tokens 0 and 1 belong to the other text. Their high scores must not count."
    if is_near(answer, _weights(causal | document)):
        return (
            "Not yet: these are the weights without a mask. First decide which keys token 4 sees."
        )
    if is_near(answer, _weights(document & (key <= 3))):
        return "Not yet: this is a row for token 3, or token 4 does not see itself. Count from 0, and include token 4."
    exponentials = SCORES.exp() * (causal & document)
    if is_near(answer, exponentials):
        return f"Not yet: these are the exponentials. Divide each by their sum, {exponentials.sum():.3f}."
    hidden_as_0 = SCORES.masked_fill(~(causal & document), 0.0)
    if any(
        is_near(answer, x)
        for x in (hidden_as_0.softmax(dim=0), exponentials / (exponentials.sum() + 3))
    ):
        return "Not yet: hidden keys still count as e to the power of 0 = 1 in the sum. Leave them out."
    total = float(torch.as_tensor(answer, dtype=torch.float64).sum())
    if abs(total - 1) > 0.01:
        return f"Not yet: weights sum to 1, and yours sum to {total:.3f}. Mask first, then take the softmax."
    return "Not yet: list the keys that are neither later than token 4 nor in the other text, and take their softmax."


def _weights(allowed: Tensor) -> Tensor:
    return SCORES.masked_fill(~allowed, -math.inf).softmax(dim=0)


@exercise
def check_cheat(answer: Any) -> str | None:
    """The model whose loss is below the entropy of its source."""
    letter = str(answer).strip().upper()
    if letter not in ENTROPIES:
        return 'Not yet: answer with one letter, such as "A".'
    if letter == "A":
        return "Not yet: the entropy of the coin walk is ln 2 = 0.693. Is 0.70 below it?"
    if letter == "B":
        return "Not yet: a fair die has six equally likely results. What loss does an honest guess have?"
    if letter == "D":
        return "Not yet: the loss is the lowest, but what is random in this source? Compare each loss with its entropy."
    return None
