"""Means over seeds, their intervals, and tests of their differences."""

import math
import statistics
from collections.abc import Sequence

SIGNIFICANT = 0.05  # two means differ if a difference by chance is less likely than this


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval (Student's t); 0 for a single value or equal
    ones."""
    if len(values) < 2:
        return values[0], 0.0
    from scipy.stats import t  # slow to import

    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(t.ppf(0.975, len(values) - 1)) * error


def welch_p(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p-value of Welch's t-test, which allows for different variances.

    None if a group has fewer than two values, or no value differs from the others of its group.
    """
    if len(a) < 2 or len(b) < 2:
        return None
    summaries = []
    for values in (a, b):
        summaries += [statistics.fmean(values), statistics.stdev(values), len(values)]
    if summaries[1] == summaries[4] == 0:
        return None
    from scipy.stats import ttest_ind_from_stats

    return float(ttest_ind_from_stats(*summaries, equal_var=False).pvalue)
