"""The report of `inspect_model.py content`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.perplexity import Estimate
from thinker.interpretability import content_heads, heads
from thinker.interpretability.content_heads import LOCAL, RELATIONS, ContentScores
from thinker.interpretability.heads import Importance
from thinker.interpretability.reports import (
    Panel,
    Report,
    existing_heads,
    head_labels,
    head_names,
    to_json,
)
from thinker.model import Thinker
from thinker.runtime.errors import UserError
from thinker.training.data.open_run import load_run_config

Head = tuple[int, int]  # layer and head in it
N_PAIRS = 5  # of the most similar heads, listed
BY_DEPTH = ("entropy", "distance", "local", "next fact", "this fact", "subject")


def check_run(tokenizer: Tokenizer | None, folder: Path) -> str:
    """Say what the model in a folder was trained on.

    Raises UserError if not on tales, or if it reads no text.
    """
    if tokenizer is None:
        problem = f"{folder} has no tokenizer, so it cannot read text"
        raise UserError(f"{problem}; use a model saved with one")
    config = load_run_config(folder)
    if config is None:  # an exported model, for example
        return "outside a run directory: what the model was trained on is unknown"
    if all(source.source != "tales" for source in config.data.text_sources()):
        text = config.data.describe_text()
        problem = f"content needs a model trained on tales, and {folder} was trained on {text}"
        raise UserError(f"{problem}; see heads")
    return "trained on tales"


def report_content(model: Thinker, tokenizer: Tokenizer | None, folder: Path, n: int) -> Report:
    """Report what each head attends to in n stories.

    Raises UserError if the model does not know tales.
    """
    trained_on = check_run(tokenizer, folder)
    stories = content_heads.make_stories(model, tokenizer, n)

    def attention(tokens: Tensor) -> Tensor:
        return model.attention_weights(tokens.to(model.device))

    content = content_heads.score_content(attention, stories)
    inputs, targets = content_heads.fact_targets(stories)
    cost = heads.importance_by_ablation(
        model, inputs.to(model.device), targets=targets.to(model.device)
    )
    pairs = existing_heads(cost.value)
    header = {
        "stories": f"{n} of tales ({trained_on})",
        "cells": "weight (chance: of a head that ignores content)",
        **RELATIONS,
        "local": f"weight of the token itself and the {LOCAL - 1} before it",
        "cost": "loss increase on facts that return (nats per fact) when the head's output is zero",
    }
    columns = ["head", "distance", "local", *RELATIONS, "cost", "periodic", "period"]
    rows = []
    for pair in pairs:
        rows.append(_row(content, cost.value, pair))
    by_layer = _means_by_layer(content)
    similar = _most_similar(content.divergence, pairs, cost.value.shape[1])
    footer = [
        *_describe_strongest(content, cost.value, pairs),
        _describe_depth(by_layer),
        _describe_similar(similar),
    ]
    data = _data(content, cost, by_layer)
    data["most_similar"] = similar
    panels = _panels(content, cost.value, by_layer, pairs)
    return Report(header, columns, rows, data, panels, "\n".join(footer), panels_per_row=2)


def _row(content: ContentScores, cost: Tensor, pair: Head) -> list[str]:
    """The cells of one head."""
    layer, head = pair
    cells = [f"{layer}.{head}"]
    for name in ("distance", "local"):
        cells.append(f"{content.measures[name][pair]:.3f}")
    for found in content.relations.values():
        cells.append(f"{found.score[pair]:.3f} ({found.chance[pair]:.3f})")
    cells.append(f"{cost[pair]:+.3f}")
    cells.append(f"{content.strength[pair]:.2f}")
    period = content.period[pair].item()
    if period == 0:
        period = "none"
    cells.append(str(period))
    return cells


def _means_by_layer(content: ContentScores) -> dict[str, Tensor]:
    """The means over the heads of each layer, (layers,) each."""
    means = {}
    for name in BY_DEPTH:
        if name in content.relations:
            values = content.relations[name].score
        else:
            values = content.measures[name]
        means[name] = values.nanmean(dim=1)
    return means


def _data(content: ContentScores, cost: Importance, by_layer: dict[str, Tensor]) -> dict[str, Any]:
    """All values for JSON."""
    data: dict[str, Any] = {}
    for name, values in content.measures.items():
        data[name] = to_json(values)
    data["periodic"] = to_json(content.strength)
    data["by_distance"] = to_json(content.by_distance)
    data["period"] = content.period.tolist()
    groups: dict[str, dict[str, Tensor]] = {}
    for name, found in content.relations.items():
        groups[name] = vars(found)
    groups["cost"] = vars(cost)
    groups["by_layer"] = by_layer
    for name, group in groups.items():
        data[name] = {key: to_json(values) for key, values in group.items()}
    return data


def _describe_strongest(content: ContentScores, cost: Tensor, pairs: list[Head]) -> list[str]:
    """For each relation, the head that exceeds chance most.

    None if the 95% interval of the excess is not above zero.
    """
    lines = []
    for name, found in content.relations.items():
        best = max(pairs, key=lambda pair: found.excess[pair])
        if not found.excess_low[best] > 0:  # or it is nan
            lines.append(f"{name}: no head exceeds chance")
            continue
        score = Estimate(found.score[best].item(), found.low[best].item(), found.high[best].item())
        line = f"{name}: head {best[0]}.{best[1]} most, {score.format(3)}"
        if found.chance[best] > 0:
            line += f", {found.score[best] / found.chance[best]:.1f} times chance"
        lines.append(line)
    best = max(pairs, key=lambda pair: cost[pair])
    lines.append(f"cost: head {best[0]}.{best[1]} most, {cost[best]:+.3f} nats per fact")
    return lines


def _describe_depth(by_layer: dict[str, Tensor]) -> str:
    """Describe how the means over the heads of a layer change with depth."""
    trends = []
    for name, values in by_layer.items():
        steps = values.diff()  # from each layer to the next
        if len(steps) == 0:
            return "by depth: the model has one layer"
        verb = "goes up and down"
        if (steps > 0).all():
            verb = "grows"
        elif (steps < 0).all():
            verb = "falls"
        trends.append(f"{name} {verb} from {values[0]:.3g} to {values[-1]:.3g}")
    return "by depth, first to last layer: " + ", ".join(trends)


def _most_similar(
    divergence: Tensor, pairs: list[Head], n_heads: int
) -> list[tuple[str, str, float]]:
    """The pairs of heads with the lowest divergence, of the same or of different layers."""
    found = []
    for number, (layer, head) in enumerate(pairs):
        for other_layer, other_head in pairs[:number]:
            row = layer * n_heads + head
            column = other_layer * n_heads + other_head
            value = divergence[row, column].item()
            found.append((f"{other_layer}.{other_head}", f"{layer}.{head}", value))
    return sorted(found, key=lambda pair: pair[2])[:N_PAIRS]


def _describe_similar(similar: list[tuple[str, str, float]]) -> str:
    pairs = []
    for one, other, value in similar:
        pairs.append(f"{one} and {other} ({value:.3f})")
    return "most similar (JS divergence): " + ", ".join(pairs)


def _panels(
    content: ContentScores, cost: Tensor, by_layer: dict[str, Tensor], pairs: list[Head]
) -> list[Panel]:
    """A panel per score, of all heads; the means by layer; the divergence of all pairs of heads."""
    labels = head_labels(cost)
    # One scale for all relations, so that their colors can be compared.
    top = 0.0
    for found in content.relations.values():
        top = max(top, found.excess.nan_to_num().abs().max().item())
    panels = []
    for name, found in content.relations.items():
        title = f"{name}: weight minus chance"
        panels.append(Panel(title, found.excess, *labels, signed=True, vmax=top))
    title = "cost of zero ablation on facts that return (nats)"
    panels.append(Panel(title, cost, *labels, signed=True))
    panels.append(Panel("strength of the period", content.strength, *labels, vmax=1.0))
    panels.append(_depth_panel(by_layer, labels[0]))

    # Rows of the divergence are numbered as if all layers had all their heads.
    n_heads = cost.shape[1]
    numbers = [layer * n_heads + head for layer, head in pairs]
    names = head_names(pairs)
    divergence = content.divergence[numbers][:, numbers]
    panels.append(Panel("JS divergence of heads (nats)", divergence, names, names))
    return panels


def _depth_panel(by_layer: dict[str, Tensor], layers: list[str]) -> Panel:
    """A table of the means by layer."""
    values = torch.stack(list(by_layer.values()), dim=1)  # (layers, measures)
    cells = []
    for row in values.tolist():
        cells.append([f"{value:.3g}" for value in row])
    # The measures have different units, so that one scale would show only the largest.
    relative = values / values.amax(dim=0).clamp_min(1e-9)
    title = "means by layer (colors relative to the column)"
    return Panel(title, relative, layers, [*by_layer], style="table", cells=cells, vmax=1.0)
