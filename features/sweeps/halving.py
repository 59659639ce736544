"""Successive halving (Jamieson & Talwalkar 2016, arXiv:1502.07943): how many trials train for how
long."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinker.runtime.errors import UserError


@dataclass(frozen=True)
class Rung:
    """A rung: the number of trials, and the number of training sequences of each."""

    n_trials: int
    n_sequences: int


@dataclass(frozen=True)
class Cost:
    """Cost of a trial in seconds: fixed (start, evaluation, save) and per sequence, with `jobs` in
    parallel."""

    start_s: float
    sequence_s: float
    jobs: int

    def seconds(self, rungs: Sequence[Rung]) -> float:
        """Seconds of all rungs, one after the other."""
        return sum(
            math.ceil(rung.n_trials / self.jobs)
            * (self.start_s + rung.n_sequences * self.sequence_s)
            for rung in rungs
        )


def plan_rungs(
    n_trials: int,
    batch_sizes: Sequence[int],
    min_steps: int,
    cost: Cost,
    seconds: float,
    max_sequences: float,
) -> list[Rung]:
    """Divide the seconds among rungs. Each has half as many trials as the one before, with twice
    the sequences.

    The number of sequences is a multiple of every batch size, so that all trials of a rung see the
    same number. The last rung, of one or two trials, has at most `max_sequences`, unless that is
    less than `min_steps` steps of the largest batch in the first rung. Raises UserError if the
    seconds do not suffice for these.
    """
    sizes = [n_trials]
    while sizes[-1] > 2:
        sizes.append(math.ceil(sizes[-1] / 2))
    unit = math.lcm(*batch_sizes)

    def rungs(units: int) -> list[Rung]:
        return [Rung(size, units * unit * 2**index) for index, size in enumerate(sizes)]

    least = math.ceil(min_steps * max(batch_sizes) / unit)
    needed = cost.seconds(rungs(least))
    if needed > seconds:
        minutes, more = (math.ceil(value / 6) / 10 for value in (needed, needed - seconds))
        raise UserError(
            f"{n_trials} runs of at least {min_steps} steps need {minutes:.1f} minutes; raise "
            f"--minutes by {more:.1f}, or set fewer --multipliers or --batch-sizes"
        )
    start = cost.seconds(rungs(0))
    in_time = int((seconds - start) / (cost.seconds(rungs(1)) - start))
    in_length = (
        int(max_sequences // (unit * 2 ** (len(sizes) - 1)))
        if math.isfinite(max_sequences)
        else in_time
    )
    return rungs(max(least, min(in_time, in_length)))


def better_half(losses: Sequence[float]) -> list[int]:
    """Indices of the lower half (rounded up) of the losses, lowest first, without those that are
    not finite."""
    order = sorted(
        range(len(losses)), key=lambda i: losses[i] if math.isfinite(losses[i]) else math.inf
    )
    return [i for i in order[: math.ceil(len(losses) / 2)] if math.isfinite(losses[i])]
