"""The beginning that two lists share."""

import random

from thinker.data.tokenizers.common_prefix import common_prefix


def test_common_prefix():
    numbers = random.Random(1)
    for _ in range(2000):
        a, b = ([numbers.randrange(2) for _ in range(numbers.randrange(9))] for _ in range(2))
        known = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        assert common_prefix(a, b) == known
    assert common_prefix([], []) == 0
    assert common_prefix([1] * 10**6, [1] * (10**6 - 1)) == 10**6 - 1
