"""Checks of the lesson "Look inside it"."""

import math
from typing import Any

import torch

from thinker.interpretability import heads
from thinker.lessons.exercise import call, exercise, is_near

ROW = torch.tensor([0.5, 0.0, 0.25, 0.0, 0.25], dtype=torch.float64)  # weights of the fifth token
N = 5  # letters of the text that tests a score


@exercise
def check_score(answer: Any) -> str | None:
    """A function score(weights) for weights (2n, 2n): the mean weight of the earlier copy of the
    same letter."""
    generator = torch.Generator().manual_seed(22)
    weights = torch.rand(2 * N, 2 * N, generator=generator, dtype=torch.float64).tril()
    weights = weights / weights.sum(dim=-1, keepdim=True)
    found = torch.as_tensor(call(answer, weights))
    copies = weights.diagonal(-N)
    right = heads.duplicate_token(weights)
    if found.shape == copies.shape and is_near(found, copies):
        return "Not yet: these are the right weights, one per row. Return their mean."
    if is_near(found, right):
        return None
    if is_near(found, heads.induction(weights)):
        return "Not yet: this is the induction score. The earlier copy itself is one column further to the left."
    if is_near(found, heads.previous_token(weights)):
        return "Not yet: this is the previous-token score. The earlier copy is n columns back, not one."
    if is_near(found, copies.sum()):
        return "Not yet: this is the sum. Divide it by the number of rows in the second half."
    if is_near(found, copies.sum() / (2 * N)):
        return "Not yet: the first half has no earlier copies, so only the second half counts. Divide by its rows."
    if is_near(found, 0.0):
        return "Not yet: your score is 0. Rows are queries, so the earlier copies are below the diagonal."
    if is_near(found, weights.diagonal().mean()) or is_near(found, weights.diagonal()[N:].mean()):
        return "Not yet: this is the weight that each token gives to itself."
    return "Not yet: in row i of the second half, pick the weight of column i - n. Then take the mean of these n weights."


@exercise
def check_row(answer: Any) -> str | None:
    """Entropy in nats and mean distance of ROW."""
    position = torch.arange(len(ROW))
    entropy = float(torch.special.entr(ROW).sum())
    distance = float((ROW * (len(ROW) - 1 - position)).sum())
    is_near(answer, [entropy, distance])  # raises ValueError unless there are two numbers
    first, second = (float(value) for value in answer)
    if is_near(first, -entropy):
        return "Not yet: the sign of your entropy is wrong. ln of a weight below 1 is negative."
    if is_near(first, entropy / math.log(2)):
        return "Not yet: your entropy is in bits. Use the natural logarithm: ln 2 = 0.693, ln 4 = 1.386."
    if is_near(first, entropy / math.log(len(ROW))):
        return "Not yet: you have divided the entropy by ln 5. Leave out the division."
    if is_near(first, entropy / len(ROW)):
        return "Not yet: the entropy of one row is a sum. Do not divide it by the number of keys."
    if not is_near(first, entropy, 6e-3):
        return "Not yet: for the entropy, add up -w · ln w for the weights 0.5, 0.25 and 0.25. A weight of 0 adds nothing."
    if is_near(second, distance):
        return None
    if is_near(second, float((ROW * position).sum())):
        return "Not yet: the entropy is right, but you counted from the start. Count back from the fifth token."
    if is_near(second, distance + 1):
        return "Not yet: the entropy is right. The token itself has distance 0, not 1."
    if is_near(second, 2.0):
        return "Not yet: the entropy is right. For the distance, multiply each distance by its weight before you add."
    if is_near(second, distance / len(ROW)):
        return "Not yet: the entropy is right. The weights sum to 1, so the sum already is the mean distance."
    return "Not yet: the entropy is right. The distances are 4, 3, 2, 1 and 0; multiply each by its weight, then add."


@exercise
def check_heads(answer: Any) -> str | None:
    """The head that does induction, and the one that only looks like it."""
    real, lookalike = (str(head) for head in answer)
    if (real, lookalike) == ("1.1", "1.0"):
        return None
    if (real, lookalike) == ("1.0", "1.1"):
        return "Not yet: it is the other way round. Which of the two does the model miss?"
    if real == lookalike:
        return "Not yet: these are two different heads."
    if real == "0.0":
        return "Not yet: 0.0 costs most, but look at its induction score. It looks at the token before."
    if real == "1.0":
        return "Not yet: 1.0 has the highest induction score, but what does it cost to take it out?"
    if real == "1.1":
        return f"Not yet: 1.1 is right. But {lookalike} does not look like one: compare the induction scores."
    return f"Not yet: taking out {real} changes almost nothing. Look for a high induction score and a high cost."
