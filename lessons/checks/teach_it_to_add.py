"""Checks of the lesson "Teach it to add"."""

from typing import Any

import torch

from thinker.features.rewards.advantages import group_advantages
from thinker.lessons.exercise import call, exercise, is_near

REWARDS = torch.tensor([0.0, 1.0, 0.25, 1.0, 0.0])
SUMS = [  # prompts, answers and their rewards
    ("47+85=", "132", 1.0),
    ("10+10=", "20", 1.0),
    ("47+85=", "122", 0.5),
    ("99+99=", "8", 0.5),
    ("47+85=", "131", 0.0),
    ("47+85=", "13 2", 0.0),
    ("47+85=", "", 0.0),
    ("47+85=", "+2", 0.0),
]


@exercise
def check_advantages(answer: Any) -> str | None:
    """A function of a group's rewards (n,): each less the mean of the others."""
    found = call(answer, REWARDS.clone())
    right = group_advantages(REWARDS[None], "leave_one_out", "none")[0]
    if is_near(found, right):
        return None
    if is_near(found, REWARDS - REWARDS.mean()):
        return "Not yet: this baseline is the mean of all answers. Leave each answer out of its own baseline."
    if is_near(found, group_advantages(REWARDS[None], "mean", "group")[0]):
        return "Not yet: these are GRPO's, divided by the standard deviation and with the mean of all as the baseline."
    if is_near(found, right / right.std()) or is_near(found, right / REWARDS.std()):
        return "Not yet: leave out the standard deviation."
    others = (REWARDS.sum() - REWARDS) / len(REWARDS)
    if is_near(found, REWARDS - others):
        return "Not yet: the others are one fewer than the group. Divide by that number."
    if is_near(found, -right):
        return "Not yet: better answers have positive advantages. Subtract the baseline from the reward."
    return "Not yet: of the rewards 0, 1 and 0.5, the first has the baseline 0.75 and the advantage -0.75."


@exercise
def check_pass_at_2(answer: Any) -> str | None:
    """The probability that two of eight answers, of which two are right, include a right one."""
    if is_near(answer, 1 - 15 / 28):
        return None
    if is_near(answer, 15 / 28):
        return "Not yet: that is the probability that both are wrong."
    if is_near(answer, 1 - (6 / 8) ** 2):
        return "Not yet: the same answer cannot be drawn twice. After a wrong one, 5 of the other 7 are wrong."
    if is_near(answer, 1 / 2):
        return "Not yet: 2/8 + 2/8 counts the case that both are right twice."
    if is_near(answer, 2 / 8):
        return "Not yet: that is pass@1."
    return "Not yet: first compute the probability that both answers are wrong."


@exercise
def check_verifier(answer: Any) -> str | None:
    """A function of prompt and answer: 1 for the right sum, 0.5 for its last digit, else 0."""
    for prompt, text, reward in SUMS:
        try:
            found = call(answer, prompt, text)
        except (ValueError, IndexError) as error:
            return (
                f"Not yet: the answer {text!r} raises {type(error).__name__}. A model writes anything; "
                "give 0 to what is no number."
            )
        if not is_near(found, reward):
            return (
                f"Not yet: {text!r} to {prompt} gets {float(found):g}, but should get {reward:g}."
            )
    return None
