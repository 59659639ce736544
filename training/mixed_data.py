"""Mixtures in training: the order of their sources, the loss of each source, and a description before the run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinker.data.batch_loader import BatchLoader
from thinker.data.batches import PackedDataset
from thinker.data.corpus import Corpus
from thinker.data.mixture import Mixture, MixtureSource
from thinker.runtime.constants import IGNORE_INDEX
from thinker.training.advice import most_epochs
from thinker.training.config import Settings
from thinker.training.fit import format_epochs
from thinker.training.source_config import MixedSource


def make_loader(settings: Settings, corpus: Corpus, dataset: PackedDataset) -> BatchLoader:
    """The training batches of a corpus, whose windows are those of `dataset`.

    Raises UserError if the sources of a mixture are used up before the end of the run.
    """
    train, options = settings.train, (settings.train.batch_size, settings.run.seed, settings.data.shift_windows)
    if not corpus.parts:
        return BatchLoader(dataset, *options)
    splits = [part.train for part in corpus.parts.values()]
    bounds = [dataset.first_window(n) for n in np.cumsum([0, *(len(split.shards) for split in splits)])]
    sources = []
    for source, split, n_windows in zip(settings.data.sources, splits, np.diff(bounds).tolist()):
        tokens_per_window = split.n_tokens / n_windows
        limits = [source.max_epochs and source.max_epochs * n_windows]
        limits.append(source.max_tokens and source.max_tokens / tokens_per_window)
        limit = min((max(1, round(limit)) for limit in limits if limit is not None), default=None)
        sources.append(MixtureSource(source.weights, tokens_per_window, limit))
    n_samples = None if train.max_steps is None else train.max_steps * train.batch_size
    return BatchLoader(dataset, *options, Mixture(sources, n_samples), bounds)


def describe_mixture(settings: Settings, corpus: Corpus, loader: BatchLoader) -> list[str]:
    """One line per source of a mixture: its share of the tokens and how often it is read; none without a mixture.

    Then advice, if a source is read too often.
    """
    lines, advice, max_steps = [], [], settings.train.max_steps
    width = max(map(len, corpus.parts), default=0)
    for i, (name, part) in enumerate(corpus.parts.items()):
        weights = settings.data.sources[i].weights
        shares = []
        for start in sorted(weights):
            total = sum(_weight_at(source.weights, start) for source in settings.data.sources)
            shares.append(f"{weights[start] / total:.1%}" + (f" from {start:.0%} of the run" if start else ""))
        line = f"  {name:{width}}  {', '.join(shares)}; {part.train.n_tokens:,} tokens"
        if max_steps is not None:
            epochs = loader.epochs(max_steps)[i]
            line += f", {format_epochs(epochs)}"
            if epochs > most_epochs(settings.model.dropout):
                remedy = "lower its weight, set its max_epochs or add text"
                advice.append(f"advice: the model will see {name} {epochs:,.0f} times and memorize it; {remedy}")
        lines.append(line)
    return lines + advice


def token_shares(sources: Sequence[MixedSource]) -> dict[str, float]:
    """The share of each source of the tokens of a whole run, by its name. Budgets are not considered."""
    starts = sorted({start for source in sources for start in source.weights})
    shares = dict.fromkeys((source.label for source in sources), 0.0)
    for start, end in zip(starts, [*starts[1:], 1.0]):
        weights = {source.label: _weight_at(source.weights, start) for source in sources}
        for name, weight in weights.items():
            shares[name] += (end - start) * weight / (sum(weights.values()) or 1.0)
    return shares


def with_mean_losses(lines: list[dict[str, Any]], shares: dict[str, float]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl in which train_loss is the mean over the sources, weighted as in val_loss.

    Sources without a validation loss do not count.
    """
    names = [name for name in shares if any(f"val_loss/{name}" in line for line in lines)]
    weighted = []
    for line in lines:
        losses = [(shares[name], line[f"train_loss/{name}"]) for name in names if f"train_loss/{name}" in line]
        if losses:
            total = sum(share for share, _ in losses)
            line = line | {"train_loss": sum(share * loss for share, loss in losses) / total}
        weighted.append(line)
    return weighted


def describe_losses(val: dict[str, Any]) -> list[str]:
    """The validation loss of each source of a mixture, as one line; none without a mixture. `val`: an evaluation."""
    names = [key.partition("/")[2] for key in val if key.startswith("val_loss/")]
    texts = [f"{name} {val[f'val_loss/{name}']:.4f} ({val[f'val_bits_per_byte/{name}']:.4f})" for name in names]
    return [f"by source, nats per token (bits per byte): {', '.join(texts)}"] if texts else []


def _weight_at(weights: dict[float, float], share: float) -> float:
    return weights[max(start for start in weights if start <= share)]


def sum_by_source(sources: Tensor, n_sources: int, target_losses: Tensor, targets: Tensor) -> Tensor:
    """(S, 2) fp32: the sum of the losses and the number of targets of each source.

    sources (B,) int64; target_losses (B, T) fp32; targets (B, T) int64.
    """
    by_sequence = torch.stack((target_losses.sum(1), (targets != IGNORE_INDEX).sum(1)), dim=1)  # (B, 2)
    is_of = sources == torch.arange(n_sources, device=sources.device)[:, None]  # (S, B)
    return torch.where(is_of[..., None], by_sequence, 0.0).sum(1)


def source_losses(corpus: Corpus, sums: list[float]) -> dict[str, float]:
    """Metrics of a mixture: the mean training loss of each source that had targets, from flattened sums (S, 2)."""
    return {f"train_loss/{name}": nats / n for name, nats, n in zip(corpus.parts, sums[::2], sums[1::2]) if n}
