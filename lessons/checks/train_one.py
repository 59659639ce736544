"""Checks of the lesson "Train one"."""

import math
from typing import Any

import torch

from thinker.generation.sampler import SamplingParams, distribution
from thinker.lessons.exercise import call, exercise, is_near

PROBABILITIES = torch.tensor(
    [0.1, 0.45, 0.15, 0.25, 0.05]
)  # not sorted; fp32, as torch.zeros(5) is
NATS, BYTES_PER_TOKEN = 1.2, 4.0
RUNS = {"A": "overfitting", "B": "learning rate", "C": "done"}
EVIDENCE = {
    ("A", "done"): "A: a validation loss of 1.62 is far above the floor, and it was lower before.",
    (
        "A",
        "learning rate",
    ): "A: the training loss falls all the time, so the steps are not too large.",
    ("B", "done"): "B: 6.9 is hardly better than knowing only how often each token occurs.",
    (
        "B",
        "overfitting",
    ): "B: a model that memorizes has a low training loss. Here it is as high as the other.",
    (
        "C",
        "overfitting",
    ): "C: training and validation loss are equal, so the model has not memorized its text.",
    (
        "C",
        "learning rate",
    ): "C: the loss neither jumps nor stays high. How far is it from the floor?",
}


def top_p(probabilities: torch.Tensor, p: float) -> torch.Tensor:
    """What Thinker's sampler makes of probabilities (V,)."""
    return distribution(probabilities.log()[None], SamplingParams(top_p=p))[0]


@exercise
def check_top_p(answer: Any) -> str | None:
    """A function my_top_p(probabilities, p) that returns probabilities in the same order."""
    given = PROBABILITIES
    found = torch.as_tensor(call(answer, given.clone(), 0.8), dtype=torch.float64)
    ordered, order = given.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    if is_near(found, top_p(given, 0.8)):
        tiny = torch.as_tensor(call(answer, given.clone(), 0.3), dtype=torch.float64)
        if is_near(tiny, top_p(given, 0.3)):
            return None
        return "Not yet: 0.8 is right, but not 0.3. The likeliest token has 0.45, so it alone has to be left."
    if is_near(found, torch.where(top_p(given, 0.8) > 0, given, 0)):
        return "Not yet: the right tokens are left, but their probabilities do not sum to 1. Divide by the sum."
    kept = torch.where(before + ordered <= 0.8, ordered, 0)
    unsorted = torch.zeros_like(given).scatter(0, order, kept)
    if is_near(found, unsorted) or is_near(found, unsorted / unsorted.sum()):
        return "Not yet: the tokens left have only 0.7 together. The one that crosses p has to stay, too."
    if is_near(found, top_p(given, 0.8)[order]):
        return "Not yet: these are sorted. Each token needs its own probability at its own place."
    in_place = torch.where(given.cumsum(0) - given < 0.8, given, 0)
    if is_near(found, in_place) or is_near(found, in_place / in_place.sum()):
        return "Not yet: the sum runs through the tokens as they come. Sort them first, the likeliest at the start."
    relative = torch.where(given >= 0.8 * given.max(), given, 0)
    if is_near(found, relative) or is_near(found, relative / relative.sum()):
        return "Not yet: this is min-p. For top-p, add up probabilities until they reach p."
    return "Not yet: try p = 0.8 on 0.1, 0.45, 0.15, 0.25, 0.05. The tokens with 0.45, 0.25 and 0.15 are left."


@exercise
def check_bits_per_byte(answer: Any) -> str | None:
    """Bits per byte of a loss of 1.2 nats per token, at 4 bytes per token."""
    if is_near(answer, NATS / math.log(2) / BYTES_PER_TOKEN):
        return None
    if is_near(answer, NATS / BYTES_PER_TOKEN):
        return "Not yet: these are nats per byte. A bit is ln 2 = 0.693 nats."
    if is_near(answer, NATS / math.log(2)):
        return "Not yet: these are bits per token. How many bytes is a token?"
    if is_near(answer, NATS * math.log(2) / BYTES_PER_TOKEN):
        return (
            "Not yet: a bit is smaller than a nat, so the number of bits is larger. Divide by ln 2."
        )
    if is_near(answer, NATS / math.log(2) * BYTES_PER_TOKEN, 5e-3):
        return "Not yet: one byte is less than one token, so it costs less, not more."
    if is_near(answer, math.exp(NATS), 5e-3):
        return "Not yet: this is the perplexity. Bits per byte need no exponential."
    return "Not yet: turn nats into bits first, then share them among the bytes of a token."


@exercise
def check_diagnoses(answer: Any) -> str | None:
    """What is the matter with the runs A, B and C, as a list of three."""
    if isinstance(answer, str) or len(answer) != len(RUNS):
        return "Not yet: give a list of three, one for each run."
    known = list(RUNS.values())
    for (run, right), given in zip(RUNS.items(), answer):
        if given not in known:
            return f"Not yet: {given!r} for run {run}; choose from {', '.join(map(repr, known))}."
        if given != right:
            return f"Not yet. {EVIDENCE[run, given]}"
    return None
