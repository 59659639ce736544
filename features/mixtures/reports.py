"""Mixtures in training: the order of their sources, the loss of each source, and a description before the run."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.batches.batches import PackedDataset
from thinker.data.corpus.corpus import Corpus
from thinker.features.mixtures.mixture import Mixture, MixtureSource
from thinker.features.streams.token_stream import TokenStream
from thinker.training.reports.advice import most_epochs
from thinker.training.reports.fit import format_epochs
from thinker.training.settings.settings import Settings

SHOWN_PHASES = 4  # in the description of a mixture
SMOOTHED_LINES = 10


def make_loader(
    settings: Settings,
    corpus: Corpus,
    dataset: PackedDataset,
    streams: Mapping[int, TokenStream] | None = None,
) -> BatchLoader:
    """The training batches of a corpus, whose windows are those of `dataset`, except of sources with a stream.

    Raises UserError if the sources of a mixture are used up before the end of the run.
    """
    train, options = (
        settings.train,
        (settings.train.batch_size, settings.run.seed, settings.data.shift_windows),
    )
    if not corpus.parts:
        return BatchLoader(dataset, *options, streams=streams)
    splits = [part.train for part in corpus.parts.values()]
    bounds = [
        dataset.first_window(n) for n in np.cumsum([0, *(len(split.shards) for split in splits)])
    ]
    sources = []
    for source, split, n_windows in zip(settings.data.sources, splits, np.diff(bounds).tolist()):
        tokens_per_window = split.n_tokens / n_windows
        limits = [source.max_epochs and source.max_epochs * n_windows]
        limits.append(source.max_tokens and source.max_tokens / tokens_per_window)
        limit = min((max(1, round(limit)) for limit in limits if limit is not None), default=None)
        sources.append(MixtureSource(source.weights, tokens_per_window, limit))
    n_samples = None if train.max_steps is None else train.max_steps * train.batch_size
    return BatchLoader(dataset, *options, Mixture(sources, n_samples), bounds, streams)


def describe_mixture(settings: Settings, corpus: Corpus, loader: BatchLoader) -> list[str]:
    """One line per source of a mixture: its share of the tokens and how often it is read; none without a mixture.

    Then advice, if a source is read too often.
    """
    lines, advice, max_steps = [], [], settings.train.max_steps
    width, mixture = max(map(len, corpus.parts), default=0), loader.mixture
    for i, (name, part) in enumerate(corpus.parts.items()):
        shares = []
        for number, phase in enumerate(mixture.phases[:SHOWN_PHASES]):
            start = f" from step {phase.start // loader.batch_size + 1:,}" if number else ""
            shares.append(f"{mixture.token_shares(number)[i]:.1%}{start}")
        more = ", ..." if len(mixture.phases) > SHOWN_PHASES else ""
        line = f"  {name:{width}}  {', '.join(shares)}{more}; "
        line += "a stream" if i in loader.streams else f"{part.train.n_tokens:,} tokens"
        if max_steps is not None and i not in loader.streams:
            epochs = loader.epochs(max_steps)[i]
            line += f", {format_epochs(epochs)}"
            if epochs > most_epochs(settings.model.dropout):
                remedy = "lower its weight, set its max_epochs or add text"
                advice.append(
                    f"advice: the model will see {name} {epochs:,.0f} times and memorize it; {remedy}"
                )
        lines.append(line)
    return lines + advice


def comparable_losses(
    lines: list[dict[str, Any]], shares: dict[str, float]
) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl in which train_loss and val_loss are means over the same sources, weighted by `shares`.

    Only sources count that have a validation loss and that occur among the last fifth of the training lines. The
    training loss of a source is the mean of its last SMOOTHED_LINES values. Lines before all sources have one are left
    out.
    """
    train = [line for line in lines if "train_loss" in line]
    recent = train[-max(1, len(train) // 5) :]
    names = [
        name for name in shares
        if any(f"train_loss/{name}" in line for line in recent) and any(f"val_loss/{name}" in line for line in lines)
    ]  # fmt: skip
    total = sum(shares[name] for name in names)
    last: dict[str, deque[float]] = {name: deque(maxlen=SMOOTHED_LINES) for name in names}
    result = []
    for line in lines if total else ():
        for name in names:
            last[name].extend([line[f"train_loss/{name}"]] if f"train_loss/{name}" in line else [])
        if "train_loss" in line and all(last.values()):
            mean = sum(shares[name] * sum(last[name]) / len(last[name]) for name in names) / total
            result.append(line | {"train_loss": mean})
        elif "val_loss" in line:
            mean = sum(shares[name] * line[f"val_loss/{name}"] for name in names) / total
            result.append(line | {"val_loss": mean})
    return result


def describe_losses(val: dict[str, Any]) -> list[str]:
    """The validation loss of each source of a mixture, as one line; none without a mixture. `val`: an evaluation."""
    names = [key.partition("/")[2] for key in val if key.startswith("val_loss/")]
    texts = [
        f"{name} {val[f'val_loss/{name}']:.4f} ({val[f'val_bits_per_byte/{name}']:.4f})"
        for name in names
    ]
    return [f"by source, nats per token (bits per byte): {', '.join(texts)}"] if texts else []
