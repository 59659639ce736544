"""Validation loss of a mixture: of each source, and their mean."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from thinker.evaluation.loss import Evaluation, Evaluator
from thinker.model import Thinker


@dataclass
class MixtureEvaluator:
    """Measure the loss on the validation split of each source, and the mean, weighted by `shares` of the tokens."""

    evaluators: Mapping[
        str, Evaluator
    ]  # by the name of the source; sources without a validation split are missing
    shares: Mapping[str, float]

    def __call__(
        self, model: Thinker, stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Compute the loss of `model`; None if stop(), called after each batch, returns True."""
        parts = {}
        for name, evaluator in self.evaluators.items():
            evaluation = evaluator(model, stop)
            if evaluation is None:
                return None
            parts[name] = evaluation
        shares = [float(self.shares[name]) for name in parts]
        return _combine(parts, shares if sum(shares) else [1.0] * len(shares))


def split_limit(limit: int | None, sizes: list[int]) -> list[int | None]:
    """Split a number of windows over sources with these numbers of windows, in proportion, at least one each."""
    return [None if limit is None else max(1, round(limit * size / sum(sizes))) for size in sizes]


def _combine(parts: dict[str, Evaluation], shares: list[float]) -> Evaluation:
    """The weighted mean over the sources. The entropy floor is known if those of all sources are."""

    def mean(values: Iterable[float]) -> float:
        return math.fsum(share * value for share, value in zip(shares, values)) / math.fsum(shares)

    every = parts.values()
    loss = mean(part.loss for part in every)
    bits_per_byte = (
        loss / math.log(2) / max(mean(part.n_bytes / part.n_tokens for part in every), 1e-9)
    )
    floors = [part.entropy_floor for part in every]
    floor = None if None in floors else mean(floors)
    n_tokens, n_bytes = sum(part.n_tokens for part in every), sum(part.n_bytes for part in every)
    return Evaluation(loss, bits_per_byte, floor, n_tokens, n_bytes, parts)
