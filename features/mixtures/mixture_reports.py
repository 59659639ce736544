"""Mixtures in reports: their sources before the run, the loss of each source, and comparable means
of the losses."""

from collections import deque
from typing import Any

from thinker.data.batches.batch_loader import BatchLoader
from thinker.data.corpus.corpus import Corpus
from thinker.training.reports.epochs import format_epochs, most_epochs
from thinker.training.settings.settings import Settings

SHOWN_PHASES = 4  # in the description of a mixture
SMOOTHED_LINES = 10

Line = dict[str, Any]  # of metrics.jsonl


def describe_mixture(settings: Settings, corpus: Corpus, loader: BatchLoader) -> list[str]:
    """One line per source of a mixture: its share of the tokens and how often it is read.

    Then advice, if a source is read too often.
    """
    lines = []
    advice = []
    max_steps = settings.train.max_steps
    width = max(len(name) for name in corpus.parts)
    for number, (name, part) in enumerate(corpus.parts.items()):
        shares = _describe_shares(loader, number)
        if loader.dataset.sources[number].is_endless:
            lines.append(f"  {name:{width}}  {shares}; a stream")
            continue
        line = f"  {name:{width}}  {shares}; {part.train.n_tokens:,} tokens"
        if max_steps is not None:
            epochs = loader.epochs(max_steps)[number]
            line += f", {format_epochs(epochs)}"
            if epochs > most_epochs(settings.model.dropout):
                seen = f"the model will see {name} {epochs:,.0f} times and memorize it"
                remedy = "lower its weight, set its max_epochs or add text"
                advice.append(f"advice: {seen}; {remedy}")
        lines.append(line)
    return lines + advice


def _describe_shares(loader: BatchLoader, source: int) -> str:
    """The shares of the tokens that come from a source, with the steps from which they hold."""
    mixture = loader.dataset.mixture
    shares = []
    for number, phase in enumerate(mixture.phases[:SHOWN_PHASES]):
        share = f"{mixture.token_shares(number)[source]:.1%}"
        if number > 0:
            share += f" from step {phase.start // loader.batch_size + 1:,}"
        shares.append(share)
    if len(mixture.phases) > SHOWN_PHASES:
        shares.append("...")
    return ", ".join(shares)


def losses_of_equal_texts(
    corpus: Corpus, loader: BatchLoader, lines: list[Line], best_val_loss: float | None
) -> list[Line]:
    """Lines of metrics.jsonl with comparable losses, or all lines if no source has enough of them.

    A validation loss below the best one is of other sequences, or of weights that were not pruned
    yet. It is left out.
    """
    shares = dict(zip(corpus.parts, loader.dataset.mixture.mean_token_shares().tolist()))
    least = best_val_loss or 0.0
    lines = [line for line in lines if line.get("val_loss", least) >= least]
    return comparable_losses(lines, shares) or lines


def comparable_losses(lines: list[Line], shares: dict[str, float]) -> list[Line]:
    """Lines of metrics.jsonl in which train_loss and val_loss are means over the same sources,
    weighted by `shares`.

    Only sources count that have a validation loss and that occur among the last fifth of the
    training lines. The training loss of a source is the mean of its last SMOOTHED_LINES values.
    Lines before all sources have one are left out.
    """
    train = [line for line in lines if "train_loss" in line]
    recent = train[-max(1, len(train) // 5) :]
    names = []
    for name in shares:
        is_recent = any(f"train_loss/{name}" in line for line in recent)
        if is_recent and any(f"val_loss/{name}" in line for line in lines):
            names.append(name)
    total = sum(shares[name] for name in names)
    if not total:
        return []
    last: dict[str, deque[float]] = {name: deque(maxlen=SMOOTHED_LINES) for name in names}
    result = []
    for line in lines:
        for name in names:
            if f"train_loss/{name}" in line:
                last[name].append(line[f"train_loss/{name}"])
        if "train_loss" in line and all(last.values()):
            weighted = [shares[name] * sum(last[name]) / len(last[name]) for name in names]
            result.append(line | {"train_loss": sum(weighted) / total})
        elif "val_loss" in line:
            weighted = [shares[name] * line[f"val_loss/{name}"] for name in names]
            result.append(line | {"val_loss": sum(weighted) / total})
    return result


def describe_losses(val: Line) -> list[str]:
    """The validation loss of each source of a mixture, as one line; none without a mixture. `val`:
    an evaluation."""
    texts = []
    for key in val:
        if key.startswith("val_loss/"):
            name = key.removeprefix("val_loss/")
            bits_per_byte = val[f"val_bits_per_byte/{name}"]
            texts.append(f"{name} {val[key]:.4f} ({bits_per_byte:.4f})")
    if not texts:
        return []
    return [f"by source, nats per token (bits per byte): {', '.join(texts)}"]
