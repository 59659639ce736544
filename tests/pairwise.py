"""A small set of combinations in which every pair of values of two options occurs (greedy pairwise covering)."""

from __future__ import annotations

import itertools
import random
from typing import Any


def pairwise(options: dict[str, list[Any]], seed: int = 0, candidates: int = 60) -> list[dict[str, Any]]:
    """Combinations, each a dict with a value for every option; the same seed gives the same ones.

    Each combination starts from a pair that is still missing; of `candidates` random ways to fill it up, the one with
    the most other missing pairs is taken.
    """
    rng, names = random.Random(seed), list(options)

    def pairs_of(row: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(one, row[one], other, row[other]) for one, other in itertools.combinations(names, 2)}

    missing = {
        (one, i, other, j)
        for one, other in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(options[one])), range(len(options[other])))
    }
    rows = []
    while missing:
        one, i, other, j = min(missing)
        tries = [
            {name: rng.randrange(len(options[name])) for name in names} | {one: i, other: j} for _ in range(candidates)
        ]
        rows.append(max(tries, key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(rows[-1])
    return [{name: options[name][index] for name, index in row.items()} for row in rows]
