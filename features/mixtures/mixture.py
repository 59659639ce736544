"""Mixtures of sources: which source each training sample comes from, as a pure function of the
sample's number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from thinker.runtime.errors import UserError

UNIT = 1 << 20  # weights become integers with about this sum, which keeps the arithmetic exact


@dataclass(frozen=True)
class MixtureSource:
    """A source of a mixture. A sample is a window of tokens."""

    # {0: weight}, relative to the other sources, or several weights, each by the share of the run
    # where it starts.
    weights: Mapping[float, float]
    tokens_per_sample: float = 1.0  # mean; weights are shares of tokens
    # The budget; when it is used up, the other sources share the weight.
    max_samples: int | None = None


@dataclass(frozen=True)
class _Phase:
    """A part of the run with constant weights."""

    start: int  # its first sample
    weights: np.ndarray  # (S,) int64, shares of the samples
    used: np.ndarray  # (S,) int64, samples of each source before `start`


class Mixture:
    """The order of the sources in a run.

    In a phase, the weights are constant. If w is a source's share of the samples, its sample j is
    due at time (j + 1/2) / w. Samples are in the order of these times, rounded up; at equal times,
    in the order of the sources. So in any part of a phase, the number of samples of a source
    differs from its share by less than the number of sources, and any sample can be found without
    the ones before it.

    n_samples: the length of the run; weights that change need it. None: unknown.

    Raises UserError if all sources are used up before the end of the run.
    """

    def __init__(self, sources: Sequence[MixtureSource], n_samples: int | None = None) -> None:
        self.phases: list[_Phase] = []
        self.n_samples = n_samples
        self.tokens_per_sample = np.array([source.tokens_per_sample for source in sources])
        shares = sorted({share for source in sources for share in source.weights})
        changes = {0 if share == 0 else round(share * n_samples): share for share in shares}
        limits = [source.max_samples for source in sources]
        start, used = 0, np.zeros(len(sources), np.int64)
        while n_samples is None or start < n_samples or start == 0:
            share = changes[max(change for change in changes if change <= start)]
            is_left = [
                limit is None or count < limit for limit, count in zip(limits, used.tolist())
            ]
            weights = _integer_weights(sources, share, is_left)
            if not weights.any():
                raise UserError(
                    f"data.sources: no source with a weight above 0 is left after {start:,} "
                    f"sequences; raise a weight, "
                    "max_epochs or max_tokens, or end the run before that with train.max_steps"
                )
            self.phases.append(_Phase(start, weights, used))
            ends = [change - start for change in changes if change > start]
            for source, (limit, count) in enumerate(zip(limits, used.tolist())):
                if limit is not None and weights[source]:
                    ends.append(_position(weights, source, limit - count - 1) + 1)
            if not ends:
                break
            used = used + _taken(weights, min(ends))
            start += min(ends)

    def token_shares(self, phase: int) -> np.ndarray:
        """The shares of the tokens in a phase, (S,) float64 with the sum 1."""
        tokens = self.phases[phase].weights * self.tokens_per_sample
        return tokens / tokens.sum()

    def mean_token_shares(self) -> np.ndarray:
        """The shares of the tokens of the whole run, (S,) float64; of its first phase if its length
        is unknown."""
        if self.n_samples is None:
            return self.token_shares(0)
        ends = [
            *(phase.start for phase in self.phases[1:]),
            max(self.n_samples, self.phases[-1].start + 1),
        ]
        lengths = np.array([end - phase.start for phase, end in zip(self.phases, ends)])
        return lengths @ [self.token_shares(i) for i in range(len(lengths))] / lengths.sum()

    def taken(self, n: int) -> np.ndarray:
        """How many of the first n samples come from each source, (S,) int64."""
        phase = next(phase for phase in reversed(self.phases) if phase.start <= n)
        return phase.used + _taken(phase.weights, n - phase.start)

    def samples(self, first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The sources of the samples first, ..., first + n - 1, and their numbers within them, each
        (n,) int64."""
        parts = []
        for phase, following in zip(self.phases, [*self.phases[1:], None]):
            start = max(first, phase.start)
            end = first + n if following is None else min(first + n, following.start)
            if start < end:
                sources, numbers = _merge(phase.weights, start - phase.start, end - phase.start)
                parts.append((sources, numbers + phase.used[sources]))
        sources, numbers = zip(*parts)
        return np.concatenate(sources), np.concatenate(numbers)


def _integer_weights(
    sources: Sequence[MixtureSource], share: float, is_left: Sequence[bool]
) -> np.ndarray:
    """Shares of the samples at a share of the run, (S,) int64 with a sum of about UNIT; all 0 if no
    source is left."""
    latest = []  # the weight of each source since its last change
    for source in sources:
        begun = max(start for start in source.weights if start <= share)
        latest.append(source.weights[begun])
    weights = np.array(latest)
    weights = weights / [source.tokens_per_sample for source in sources] * is_left
    total = weights.sum()
    if not total:
        return np.zeros(len(sources), np.int64)
    return np.ceil(weights / total * UNIT).astype(np.int64)


def _counts(weights: np.ndarray, times: np.ndarray) -> np.ndarray:
    """How many samples of each source are due by each time, (n_times, S) int64; times (n_times,)
    int64."""
    total = weights.sum()
    return (2 * weights * times[:, None] + total) // (2 * total)


def _due(weights: np.ndarray, start: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The samples of a phase in order, from `start` or a little before to `end` or a little after.

    Returns the number of samples of each source before them, (S,); their sources and numbers within
    them, (n,).
    """
    slack = len(weights)  # by time t, between t - slack and t + slack samples are due
    counts = _counts(weights, np.arange(max(0, start - slack), end + slack + 1))
    time, sources = np.diff(
        counts, axis=0
    ).nonzero()  # at most one sample of each source is due per unit of time
    return counts[0], sources, counts[time, sources]


def _merge(weights: np.ndarray, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples start to end - 1 of a phase: their sources, and their numbers within them, each (end
    - start,) int64."""
    before, sources, numbers = _due(weights, start, end)
    part = slice(start - int(before.sum()), end - int(before.sum()))
    return sources[part], numbers[part]


def _taken(weights: np.ndarray, n: int) -> np.ndarray:
    """How many of the first n samples of a phase come from each source, (S,) int64."""
    before, sources, _ = _due(weights, n, n)
    return before + np.bincount(sources[: n - int(before.sum())], minlength=len(weights))


def _position(weights: np.ndarray, source: int, number: int) -> int:
    """Where in a phase the sample `number` of a source is."""
    total, weight = int(weights.sum()), int(weights[source])
    time = -(-total * (2 * number + 1) // (2 * weight)) - 1  # the last time by which it is not due
    before, after = _counts(weights, np.array([time, time + 1]))
    return int(before.sum() + (after - before)[:source].sum())
