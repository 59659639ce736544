"""Checks of the lesson "Attention by hand"."""

import math
from typing import Any

import torch

from thinker.lessons.exercise import call, exercise, is_near
from thinker.model.attention_dispatch import AttentionMask, attend

UNIT = math.sqrt(2) * math.log(2)  # 0.98: after scaling, it doubles an exponential
QUERIES = UNIT * torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
KEYS = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
VALUES = torch.tensor([[15.0, 0.0], [0.0, 15.0]], dtype=torch.float64)
ROUNDING = 0.05  # of numbers on paper


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = True
) -> torch.Tensor:
    """What Thinker computes for a single head: q, k, v (T, D) -> (T, D)."""
    heads = (x[None, None] for x in (q, k, v))  # (1, 1, T, D)
    return attend(*heads, AttentionMask(is_causal=causal), scale)[0, 0]


@exercise
def check_attention(answer: Any) -> str | None:
    """A function attend(q, k, v) for q, k, v of shape (T, D), causal and scaled."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    found = call(answer, q, k, v)
    if is_near(found, attention(q, k, v, 1 / math.sqrt(4))):
        return None
    if is_near(found, attention(q, k, v, 1.0)):
        return "Not yet: the scores are not divided by √D. Here D is 4."
    if is_near(found, attention(q, k, v, 1 / 4)):
        return "Not yet: the scores are divided by D instead of √D."
    if is_near(found, attention(q, k, v, 1 / math.sqrt(4), causal=False)):
        return "Not yet: each token sees later tokens. Set their scores to -inf before the softmax."
    scores = q @ k.T / math.sqrt(4)
    if is_near(found, scores.softmax(dim=-1).tril() @ v):
        return "Not yet: the mask comes after the softmax, so the rows no longer sum to 1. Mask the scores."
    hidden = torch.ones_like(scores).triu(1).bool()
    if is_near(found, scores.masked_fill(hidden, -math.inf).softmax(dim=0) @ v):
        return "Not yet: the softmax runs over the queries. Each row (dim=-1) has to sum to 1."
    if is_near(found, scores.masked_fill(hidden, 0.0).softmax(dim=-1) @ v):
        return (
            "Not yet: a masked score of 0 still gets a weight, because e to the 0 is 1. Use -inf."
        )
    return "Not yet: compare scores, masked scores and weights with the tables above, one after the other."


@exercise
def check_two_words(answer: Any) -> str | None:
    """The outputs (2, 2) of the two words above, scaled, no mask."""
    raw = QUERIES @ KEYS.T
    scores = raw / math.sqrt(2)
    weights = scores.softmax(dim=-1)
    if is_near(answer, weights @ VALUES, ROUNDING):
        return None
    if is_near(answer, weights, 2e-3):
        return "Not yet: these are the weights. Now multiply the values by them, and add."
    mistakes = [
        (raw.softmax(dim=-1), "the scores were not divided by √2."),
        ((raw / 2).softmax(dim=-1), "the scores were divided by 2, but √D is √2 = 1.414."),
        (scores.exp(), "these are sums with the exponentials. Divide each row by 10, and by 3."),
        (raw / raw.sum(dim=-1, keepdim=True), "divide the exponentials by their sum, not the scores."),
        (scores.softmax(dim=0), "the weights of each query have to sum to 1, not those of each key."),
        (scores.T.softmax(dim=-1), "queries and keys are swapped."),
        (torch.eye(2, dtype=torch.float64) * weights, "each word uses only its own value."),
    ]  # fmt: skip
    for wrong, reason in mistakes:
        if is_near(answer, wrong @ VALUES, ROUNDING):
            return f"Not yet: {reason}"
    if is_near(answer, attention(QUERIES, KEYS, VALUES, 1 / math.sqrt(2)), ROUNDING):
        return "Not yet: the first word does not see the second. Here is no mask."
    return (
        "Not yet: the scores are 0.98 and 2.94, then 0.98 and 0. Each 0.98 doubles an exponential."
    )


@exercise
def check_divisor(answer: Any) -> str | None:
    """The divisor that gives scores a standard deviation of 1, for entries of standard deviation 2
    and D = 64."""
    if is_near(answer, 32.0, 0.1):
        return None
    if is_near(answer, 8.0, 0.1):
        return "Not yet: √64 = 8 is right for entries with a standard deviation of 1. Here each product has 2 · 2."
    if is_near(answer, 64.0, 0.1):
        return "Not yet: the variance grows with D, so the standard deviation grows with √D."
    if is_near(answer, 16.0, 0.1):
        return "Not yet: both the query and the key have a standard deviation of 2, so their product has 4."
    return "Not yet: first find the standard deviation of one product q·k of two entries, then that of the sum of 64."
