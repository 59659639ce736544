"""Verifiers: functions that say how good an answer is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thinker.runtime.registry import Registry


@dataclass(frozen=True)
class Answer:
    """What a verifier judges: the text of an answer and of its prompt, and the row of the data with
    the prompt."""

    prompt: str
    text: str
    row: Mapping[str, Any] = field(default_factory=dict)
    is_complete: bool = True  # it has an end; False: it was cut at the longest length


Verifier = Callable[[Answer], float | Mapping[str, float]]
"""Returns a reward, or several by name, which are added up."""

LARGEST = 1e15  # so that squares of sums of rewards are finite

VERIFIERS: Registry[Verifier] = Registry("verifier")
"""Those that come with Thinker. Others are FILE.py:FUNCTION."""


def checked_parts(value: Any) -> dict[str, float]:
    """The rewards that a verifier returned, by name; a single one is called "reward".

    Raises ValueError unless they are finite numbers up to LARGEST.
    """
    parts = value
    if not isinstance(value, Mapping):
        parts = {"reward": value}
    checked = {}
    for name, reward in parts.items():
        if hasattr(reward, "item"):  # a number of NumPy or torch
            reward = reward.item()
        if not isinstance(reward, (int, float)):
            raise ValueError(f"{name} is {type(reward).__name__}, not a number")
        if not math.isfinite(reward):
            raise ValueError(f"{name} is {reward}")
        if abs(reward) > LARGEST:
            raise ValueError(f"{name} is {reward:g}, beyond {LARGEST:g}")
        text = " ".join(str(name).split())
        if text in checked:
            raise ValueError(f"two rewards have the name {text}")
        checked[text] = float(reward)
    if not checked:
        raise ValueError("no reward")
    return checked
