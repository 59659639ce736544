"""Validation loss of a mixture: of each source, and their mean."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.corpus.corpus import Corpus
from thinker.evaluation.loss import Evaluation, Evaluator
from thinker.model import Thinker
from thinker.runtime.ranks import DistContext
from thinker.training.data.training_batches import build_evaluator, pack_validation
from thinker.training.settings.settings import Settings


@dataclass
class MixedEvaluator:
    """Measure the loss on the validation split of each source, and the mean, weighted by `shares`
    of the tokens.

    evaluators: by the name of the source; sources without a validation split are missing.
    """

    evaluators: Mapping[str, Evaluator]
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
        if not sum(shares):  # no source with a validation split is trained on
            shares = [1.0] * len(shares)
        return _combine(parts, shares)


def open_mixed_evaluator(
    settings: Settings, corpus: Corpus, loader: BatchLoader, dist: DistContext
) -> MixedEvaluator:
    """The evaluator of the sources in `data.sources`."""
    parts = {name: part for name, part in corpus.parts.items() if part.val.shards}
    windows = {name: pack_validation(settings, part) for name, part in parts.items()}
    sizes = [len(each) for each in windows.values()]
    limits = split_limit(settings.train.eval_sequences, sizes)
    evaluators = {}
    for (name, part), limit in zip(parts.items(), limits):
        evaluators[name] = build_evaluator(settings, part, windows[name], limit, dist)
    shares = dict(zip(corpus.parts, loader.dataset.mixture.mean_token_shares()))
    return MixedEvaluator(evaluators, shares)


def split_limit(limit: int | None, sizes: list[int]) -> list[int | None]:
    """Split a number of windows over sources with these numbers of windows, in proportion, at least
    one each."""
    if limit is None:
        return [None] * len(sizes)
    return [max(1, round(limit * size / sum(sizes))) for size in sizes]


def _combine(parts: dict[str, Evaluation], shares: list[float]) -> Evaluation:
    """The weighted mean over the sources. The entropy floor is known if those of all sources
    are."""

    def mean(values: Iterable[float]) -> float:
        total = math.fsum(share * value for share, value in zip(shares, values))
        return total / math.fsum(shares)

    every = parts.values()
    loss = mean(part.loss for part in every)
    bytes_per_token = mean(part.n_bytes / part.n_tokens for part in every)
    floors = [part.entropy_floor for part in every]
    metrics = {}
    for name, part in parts.items():
        metrics[f"val_loss/{name}"] = part.loss
        metrics[f"val_bits_per_byte/{name}"] = part.bits_per_byte
    floor = None
    if None not in floors:
        floor = mean(floors)
    return Evaluation(
        loss=loss,
        bits_per_byte=loss / math.log(2) / max(bytes_per_token, 1e-9),
        entropy_floor=floor,
        n_tokens=sum(part.n_tokens for part in every),
        n_bytes=sum(part.n_bytes for part in every),
        metrics=metrics,
    )
