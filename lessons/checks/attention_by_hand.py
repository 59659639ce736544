"""Checks of the lesson "Attention by hand"."""

import math
from typing import Any

import torch

from thinker.lessons.exercise import call, exercise, is_near
from thinker.model.attention_dispatch import AttentionMask, attend

SCORES = torch.tensor(
    [0.0, 2.0, 1.0], dtype=torch.float64
)  # of the query (1, 1) with the keys (0, 0), (0, 2), (1, 0)


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
def check_row(answer: Any) -> str | None:
    """The weights of the query (1, 1) for the keys (0, 0), (0, 2), (1, 0), scaled, no mask."""
    right = (SCORES / math.sqrt(2)).softmax(dim=0)
    if is_near(answer, right):
        return None
    if is_near(answer, SCORES.softmax(dim=0)):
        return "Not yet: these weights come from scores that were not divided by √2."
    if is_near(answer, (SCORES / 2).softmax(dim=0)):
        return "Not yet: the scores were divided by 2, but √D is √2 = 1.414."
    exponentials = (SCORES / math.sqrt(2)).exp()
    if is_near(answer, exponentials):
        return f"Not yet: these are the exponentials. Divide each by their sum, {exponentials.sum():.3f}."
    if is_near(answer, SCORES / SCORES.sum()):
        return "Not yet: divide exponentials by their sum, not the scores themselves."
    total = float(torch.as_tensor(answer, dtype=torch.float64).sum())
    if abs(total - 1) > 0.01:
        return f"Not yet: weights sum to 1, and yours sum to {total:.3f}."
    return "Not yet: the scores are 0, 2 and 1. Divide them by √2, then compare your exponentials with 1, 4.113, 2.028."


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
