"""Attention by distance: the weights of heads that know nothing but distances, and periods.

Weights are (..., T, T), rows are queries. The first token is left out as a key, because many heads
use it as a place to put weight that they do not need (Xiao et al. 2023, arXiv:2309.17453). A
distance is the position of the query minus that of the key, so key 1 has distance i − 1 from query
i.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

ITERATIONS = 50
# Share of the highest strength from which a shorter period counts: its multiples are about as
# strong.
SHORTEST = 0.5
EPSILON = 1e-30  # instead of a denominator of 0, where the numerator is 0, too


def sum_by_distance(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_i A[i, i − d] by distance d and Σ_j A[i, j] by query i, over keys 1 ≤ j ≤ i.

    (..., T, T) -> (..., T) each.
    """
    kept = weights[..., 1:].tril(-1)  # (..., T, T − 1), column j is key j + 1
    sums = []
    for distance in range(weights.shape[-1] - 1):
        diagonal = kept.diagonal(-1 - distance, -2, -1)
        sums.append(diagonal.sum(dim=-1))
    # Only the first token is T − 1 before a query.
    by_distance = F.pad(torch.stack(sums, dim=-1), (0, 1))
    return by_distance, kept.sum(dim=-1)


def fit_distances(by_distance: Tensor, by_query: Tensor) -> Tensor:
    """Weights w(d) of the closest head that depends only on distance, with mean 1.

    (..., T) each -> (..., T). This head attends from i to 1 ≤ j ≤ i with
    by_query[i] · w(i − j) / Σ_{d < i} w(d). The fit has maximum likelihood given the sums of
    sum_by_distance(), and it is exact for such a head (Hunter 2004, doi:10.1214/aos/1079120141).
    """
    observed = by_distance.double()
    mass = by_query.double()
    w = torch.ones_like(observed)
    for _ in range(ITERATIONS):
        per_query = mass / _sum_before(w).clamp_min(EPSILON)  # (..., T)
        later = per_query.sum(dim=-1, keepdim=True) - per_query.cumsum(dim=-1)  # queries i > d
        w = torch.where(observed > 0, observed / later.clamp_min(EPSILON), 0.0)
        # Only ratios of weights count, so the scale is free.
        w = w / w.mean(dim=-1, keepdim=True).clamp_min(EPSILON)
    return w


def _sum_before(w: Tensor) -> Tensor:
    """Σ_{d < i} w(d) for each i: (..., T) -> (..., T)."""
    return F.pad(w.cumsum(dim=-1), (1, 0))[..., :-1]


def expected_weights(w: Tensor, by_query: Tensor) -> Tensor:
    """Weights of the head of fit_distances(); key 0 has 0.

    w (..., D), by_query (..., T), T ≤ D -> (..., T, T).
    """
    T = by_query.shape[-1]
    position = torch.arange(T)
    distance = position[:, None] - position  # (T, T)
    rows = by_query.double() / _sum_before(w)[..., :T].clamp_min(EPSILON)  # (..., T)
    weights = rows[..., None] * w[..., distance.clamp_min(0)]
    visible = (distance >= 0) & (position > 0)
    return torch.where(visible, weights, 0.0)


def periodicity(w: Tensor) -> tuple[Tensor, Tensor]:
    """Strength (...) of the period in weights by distance (..., D), and the period (...).

    The strength is from 0 to 1, the period 0 for none.
    r(p): correlation of w(d) and w(d + p) over d ≥ 1. The strength of a period p ≤ D/4 is
    min(r(p), r(2p)) minus the lowest r between them, or minus 0 if that is negative. Weights that
    only fall with distance have strength 0, and so has a head with a single peak. Weights that
    repeat exactly have strength 1.
    """
    x = w[..., 1:].double()
    longest = w.shape[-1] // 4
    if longest < 2:
        none = torch.zeros(x.shape[:-1])
        return none, none.long()
    correlations = []
    for lag in range(1, 2 * longest + 1):
        correlations.append(_correlation(x[..., :-lag], x[..., lag:]))
    r = torch.stack(correlations, dim=-1)  # (..., lags), r[..., 0] is of lag 1
    strengths = []
    for period in range(2, longest + 1):
        peaks = torch.minimum(r[..., period - 1], r[..., 2 * period - 1])
        valley = r[..., period : 2 * period - 1].amin(dim=-1).clamp_min(0)
        strengths.append((peaks - valley).clamp_min(0))
    strength = torch.stack(strengths, dim=-1)  # (..., periods), from a period of 2
    best = strength.amax(dim=-1)
    # The period is the first peak that is high enough: multiples of it are peaks, too.
    before = F.pad(strength, (1, 0))[..., :-1]
    after = F.pad(strength, (0, 1))[..., 1:]
    is_peak = strength >= torch.maximum(before, after)
    is_high = strength >= SHORTEST * best[..., None]
    first = (is_peak & is_high).int().argmax(dim=-1)
    return best, torch.where(best > 1e-6, first + 2, 0)


def periodic(weights: Tensor) -> Tensor:
    """Strength of the period of each head, from its attention over a batch.

    (B, H, T, T) -> (1, H).
    """
    by_distance, by_query = sum_by_distance(weights.float())
    w = fit_distances(
        by_distance.sum(dim=0, keepdim=True).cpu(), by_query.sum(dim=0, keepdim=True).cpu()
    )
    strength, _ = periodicity(w)
    return strength.float()


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson correlation over the last dimension.

    0 if either is constant, up to rounding errors.
    """
    size = a.norm(dim=-1) * b.norm(dim=-1)
    a = a - a.mean(dim=-1, keepdim=True)
    b = b - b.mean(dim=-1, keepdim=True)
    scale = a.norm(dim=-1) * b.norm(dim=-1)
    correlation = (a * b).sum(dim=-1) / scale.clamp_min(EPSILON)
    return torch.where(scale > 1e-6 * size, correlation, 0.0)
