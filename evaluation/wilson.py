"""The confidence interval of a share."""

import math
from statistics import NormalDist


def wilson_interval(share: float, n_items: int, confidence: float) -> tuple[float, float]:
    """The confidence interval of a share (Wilson 1927), which stays between 0 and 1."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    center = share + z * z / (2 * n_items)
    spread = z * math.sqrt(share * (1 - share) / n_items + z * z / (4 * n_items**2))
    scale = 1 + z * z / n_items
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)
