"""Exercises that check an answer and say what is wrong with it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

Examine = Callable[[Any], str | None]  # what is wrong with an answer, or None if it is right


class Verdict:
    """Whether an answer is right; a notebook shows nothing for it, because the text has been
    printed."""

    def __init__(self, is_right: bool) -> None:
        self.is_right = is_right

    def __bool__(self) -> bool:
        return self.is_right

    def _ipython_display_(self) -> None:
        pass


def exercise(examine: Examine) -> Callable[[Any], Verdict]:
    """Decorator: the function prints "Right." or what is wrong with an answer, and returns whether
    it is right.

    An answer that is still `...`, or a function that returns `...`, counts as not answered.
    """

    @wraps(examine)
    def check(answer: Any) -> Verdict:
        hint = find_mistake(examine, answer)
        print("Right." if hint is None else hint)
        return Verdict(hint is None)

    return check


def find_mistake(examine: Examine, answer: Any) -> str | None:
    """What is wrong with an answer, as a sentence, or None."""
    if answer is ...:
        return "Not answered yet: replace the dots."
    try:
        return examine(answer)
    except NotAnswered:
        return "Not answered yet: replace the dots."
    except Exception as error:  # of the student's code, whatever it is
        return f"Not yet: your code raised {type(error).__name__}: {error}"


class NotAnswered(Exception):
    """A function of the student still returns `...`."""


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the student's function. Raises NotAnswered if it returns `...` or None."""
    if not callable(function):
        raise TypeError("the answer has to be a function")
    result = function(*arguments, **options)
    if result is ... or result is None:
        raise NotAnswered
    return result


def is_near(answer: Any, right: Any, tolerance: float = 2e-3) -> bool:
    """Whether numbers, lists or tensors agree to three decimals. Raises ValueError for another
    number of values."""
    ours, theirs = (torch.as_tensor(value, dtype=torch.float64) for value in (right, answer))
    if ours.shape != theirs.shape:
        raise ValueError(
            f"the answer has shape {tuple(theirs.shape)}, but it needs {tuple(ours.shape)}"
        )
    return bool(torch.allclose(theirs, ours, rtol=0, atol=tolerance))
