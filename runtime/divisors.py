"""The divisors of a number."""

import math


def divisors(n: int) -> list[int]:
    """Divisors of n in increasing order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
