"""The report of `inspect_model.py content`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.evaluation.perplexity import Estimate
from thinker.interpretability import content_heads, heads
from thinker.interpretability.content_heads import LOCAL, RELATIONS, ContentScores
from thinker.interpretability.reports import Panel, Report, existing_heads, head_labels, to_json
from thinker.model import Thinker
from thinker.runtime.errors import UserError
from thinker.training.open_run import load_run_config

N_PAIRS = 5  # of the most similar heads, listed
BY_DEPTH = ("entropy", "distance", "local", "next fact", "this fact", "subject")


def check_run(tokenizer: Tokenizer | None, folder: Path) -> str:
    """Say what the model in a folder was trained on. Raises UserError if not on tales, or if it reads no text."""
    if tokenizer is None:
        raise UserError(
            f"{folder} has no tokenizer, so it cannot read text; use a model saved with one"
        )
    config = load_run_config(folder)
    if config is None:
        return "outside a run directory: what the model was trained on is unknown"
    if all(source.source != "tales" for source in config.data.text_sources()):
        text = config.data.describe_text()
        raise UserError(
            f"content needs a model trained on tales, and {folder} was trained on {text}; see heads"
        )
    return "trained on tales"


def report_content(model: Thinker, tokenizer: Tokenizer | None, folder: Path, n: int) -> Report:
    """Report what each head attends to in n stories. Raises UserError if the model does not know tales."""
    trained_on = check_run(tokenizer, folder)
    stories = content_heads.make_stories(model, tokenizer, n)
    content = content_heads.score_content(
        lambda tokens: model.attention_weights(tokens.to(model.device)), stories
    )
    inputs, targets = (x.to(model.device) for x in content_heads.fact_targets(stories))
    cost = heads.importance_by_ablation(model, inputs, targets=targets)
    pairs, rows = existing_heads(cost.value), []
    for layer, head in pairs:
        at = layer, head
        cells = [f"{content.measures[name][at]:.3f}" for name in ("distance", "local")]
        cells += [
            f"{found.score[at]:.3f} ({found.chance[at]:.3f})"
            for found in content.relations.values()
        ]
        cells += [
            f"{cost.value[at]:+.3f}",
            f"{content.strength[at]:.2f}",
            str(content.period[at].item() or "none"),
        ]
        rows.append([f"{layer}.{head}", *cells])
    header = {
        "stories": f"{n} of tales ({trained_on})",
        "cells": "weight (chance: of a head that ignores content)",
    }
    header |= RELATIONS
    header["local"] = f"weight of the token itself and the {LOCAL - 1} before it"
    header["cost"] = (
        "loss increase on facts that return (nats per fact) when the head's output is zero"
    )
    columns = ["head", "distance", "local", *RELATIONS, "cost", "periodic", "period"]
    scores = content.measures | {name: found.score for name, found in content.relations.items()}
    by_layer = {name: scores[name].nanmean(dim=1) for name in BY_DEPTH}  # (layers,) each
    similar = _most_similar(content.divergence, pairs, cost.value.shape[1])
    footer = [*_describe_strongest(content, cost.value, pairs), _describe_depth(by_layer)]
    footer.append(
        "most similar (JS divergence): "
        + ", ".join(f"{a} and {b} ({x:.3f})" for a, b, x in similar)
    )
    tensors = {**content.measures, "periodic": content.strength, "by_distance": content.by_distance}
    data: dict[str, Any] = {name: to_json(x) for name, x in tensors.items()} | {
        "period": content.period.tolist()
    }
    groups = {name: vars(found) for name, found in content.relations.items()}
    for name, group in {**groups, "cost": vars(cost), "by_layer": by_layer}.items():
        data[name] = {key: to_json(x) for key, x in group.items()}
    data["most_similar"] = similar
    panels = _panels(content, cost.value, by_layer, pairs)
    return Report(header, columns, rows, data, panels, "\n".join(footer), panels_per_row=2)


def _describe_strongest(
    content: ContentScores, cost: Tensor, pairs: list[tuple[int, int]]
) -> list[str]:
    """For each relation, the head that exceeds chance most, if the 95% interval of the excess is above zero."""
    lines = []
    for name, found in content.relations.items():
        best = max(pairs, key=lambda at: found.excess[at])
        if not found.excess_low[best] > 0:
            lines.append(f"{name}: no head exceeds chance")
            continue
        score = Estimate(*(x[best].item() for x in (found.score, found.low, found.high))).format(3)
        ratio = (
            f", {found.score[best] / found.chance[best]:.1f} times chance"
            if found.chance[best] > 0
            else ""
        )
        lines.append(f"{name}: head {best[0]}.{best[1]} most, {score}{ratio}")
    best = max(pairs, key=lambda at: cost[at])
    return [*lines, f"cost: head {best[0]}.{best[1]} most, {cost[best]:+.3f} nats per fact"]


def _describe_depth(by_layer: dict[str, Tensor]) -> str:
    """Describe how the means over the heads of a layer change with depth."""
    trends = []
    for name, values in by_layer.items():
        steps = values.diff()
        if len(steps) == 0:
            return "by depth: the model has one layer"
        verb = (
            "grows" if (steps > 0).all() else "falls" if (steps < 0).all() else "goes up and down"
        )
        trends.append(f"{name} {verb} from {values[0]:.3g} to {values[-1]:.3g}")
    return "by depth, first to last layer: " + ", ".join(trends)


def _most_similar(
    divergence: Tensor, pairs: list[tuple[int, int]], n_heads: int
) -> list[tuple[str, str, float]]:
    """The pairs of heads with the lowest divergence, of the same or of different layers."""
    found = []
    for number, (layer, head) in enumerate(pairs):
        for other_layer, other_head in pairs[:number]:
            x = divergence[layer * n_heads + head, other_layer * n_heads + other_head].item()
            found.append((f"{other_layer}.{other_head}", f"{layer}.{head}", x))
    return sorted(found, key=lambda pair: pair[2])[:N_PAIRS]


def _panels(
    content: ContentScores, cost: Tensor, by_layer: dict[str, Tensor], pairs: list[tuple[int, int]]
) -> list[Panel]:
    """A panel per score, of all heads; the means by layer; the divergence of all pairs of heads."""
    labels = head_labels(cost)
    top = max(found.excess.nan_to_num().abs().max().item() for found in content.relations.values())
    panels = [
        Panel(f"{name}: weight minus chance", found.excess, *labels, signed=True, vmax=top)
        for name, found in content.relations.items()
    ]
    panels.append(
        Panel("cost of zero ablation on facts that return (nats)", cost, *labels, signed=True)
    )
    panels.append(Panel("strength of the period", content.strength, *labels, vmax=1.0))
    values = torch.stack(list(by_layer.values()), dim=1)  # (layers, measures)
    cells = [[f"{x:.3g}" for x in row] for row in values.tolist()]
    relative = values / values.amax(dim=0).clamp_min(1e-9)
    title = "means by layer (colors relative to the column)"
    panels.append(
        Panel(title, relative, labels[0], [*by_layer], style="table", cells=cells, vmax=1.0)
    )
    own = [layer * cost.shape[1] + head for layer, head in pairs]
    heads_shown = [f"{layer}.{head}" for layer, head in pairs]
    panels.append(
        Panel(
            "JS divergence of heads (nats)",
            content.divergence[own][:, own],
            heads_shown,
            heads_shown,
        )
    )
    return panels
