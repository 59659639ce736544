"""pass@k: the probability that at least one of k answers is right."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinker.evaluation.wilson import wilson_interval


@dataclass(frozen=True)
class PassAtK:
    """An estimate over prompts, with its confidence interval."""

    k: int
    share: float
    low: float
    high: float


def pass_at_k(n_right: int, n_answers: int, k: int) -> float:
    """The probability that k of these answers, chosen at random, include a right one.

    Without bias, unlike 1 - (1 - n_right / n_answers)^k (Chen et al. 2021, arXiv:2107.03374).
    """
    n_wrong = n_answers - n_right
    return 1 - math.comb(n_wrong, k) / math.comb(n_answers, k)


def estimate(n_right: Sequence[int], n_answers: int, k: int, confidence: float = 0.95) -> PassAtK:
    """The mean of pass@k over prompts, from the number of right answers to each.

    The interval is Wilson's for as many independent answers as there are prompts. As each prompt
    has several answers, it is not too narrow.
    """
    shares = [pass_at_k(n, n_answers, k) for n in n_right]
    share = float(np.mean(shares))
    low, high = wilson_interval(share, len(shares), confidence)
    return PassAtK(k, share, low, high)


def ks(n_answers: int) -> list[int]:
    """1, 2, 4, ... and the number of answers itself."""
    powers = [2**n for n in range(n_answers.bit_length()) if 2**n < n_answers]
    return [*powers, n_answers]
