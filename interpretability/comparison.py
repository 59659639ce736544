"""Reports that compare models: over training, side by side, and with heads removed."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from thinker.evaluation.perplexity import estimate_ratio
from thinker.interpretability import heads
from thinker.interpretability.head_reports import TITLES, UNBOUNDED, describe_random, score_heads
from thinker.interpretability.reports import (
    Panel,
    Prompt,
    Report,
    decimal,
    existing_heads,
    head_labels,
    head_names,
    to_json,
)
from thinker.model import Thinker
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress
from thinker.runtime.registry import feature_command

Texts = tuple[Tensor, Tensor]  # tokens and targets, (N, T) each
Head = tuple[int, int]  # layer and head (or KV head) in it
COMPARED = ("entropy", "distance", "previous", "first", "induction")
JS_TITLE = "Jensen–Shannon divergence between the two heads (nats)"


def report_over_training(
    steps: Iterable[tuple[int, Callable[[], Thinker]]],
    prompt: Prompt | None,
    random: Tensor,
    origin: str,
) -> Report:
    """Report the highest score of each measure, and its head, per checkpoint.

    See report_heads().
    """
    tokens = random if prompt is None else prompt.tokens[None]
    scores = {}
    for step, load_model in Progress(list(steps), desc="measuring", unit=" checkpoints"):
        scores[step] = score_heads(load_model(), tokens, random)
    step_labels = [str(step) for step in scores]
    first = next(iter(scores.values()))
    pairs = existing_heads(first["entropy"])
    labels = head_names(pairs)
    at_heads = tuple(zip(*pairs))  # an index: layers and heads
    curves = {}  # (steps, heads) each
    for name in first:
        rows = [of_step[name][at_heads] for of_step in scores.values()]
        curves[name] = torch.stack(rows)

    # The highest value of a measure without a bound says little about a head.
    shown = [name for name in first if name not in ("normalised", *UNBOUNDED)]
    rows = []
    for number, step in enumerate(step_labels):
        cells = [step]
        for name in shown:
            value, head = curves[name][number].max(dim=0)
            cells.append(f"{value:.3f} ({labels[head]})")
        rows.append(cells)
    data = {"steps": [*scores], "heads": labels}
    for name, values in curves.items():
        data[name] = values.tolist()
    panels = []
    for name in reversed(shown):
        panel = Panel(TITLES[name], curves[name], step_labels, labels, vmax=1.0, style="lines")
        panels.append(panel)
    header = {
        "random": describe_random(random, origin),
        "cells": "highest score (layer.head)",
        "checkpoints": f"{len(scores)}, steps {step_labels[0]} to {step_labels[-1]}",
    }
    return Report(header, ["step", *shown], rows, data, panels, panels_per_row=2)


@torch.no_grad()
def compare(
    one: Thinker,
    other: Thinker,
    prompt: Prompt | None,
    random: Tensor,
    origin: str,
    names: tuple[str, str],
) -> Report:
    """Compare attention, head scores and predictions on the prompt or `random`.

    May raise UserError.
    """
    if one.config.vocab_size != other.config.vocab_size:
        problem = "the models have vocabularies of different sizes"
        raise UserError(f"{problem}; compare models with the same tokenizer")
    models = one, other
    tokens = random if prompt is None else prompt.tokens[None]
    first, second = (model(tokens).float().log_softmax(dim=-1) for model in models)
    # Predictions first: models with different heads can only be compared by these.
    kl = (first.exp() * (first - second)).sum(dim=-1)  # (B, T)
    is_same = first.argmax(dim=-1) == second.argmax(dim=-1)  # (B, T)
    agreement = is_same.float().mean().item()
    footer = f"predictions: KL(first ‖ second) = {kl.mean():.4f} nats per token"
    footer += f"; same top token at {agreement:.1%}"
    data: dict[str, Any] = {
        "models": names,
        "kl_divergence": kl.mean().item(),
        "top_token_agreement": agreement,
    }
    header = {
        "first": names[0],
        "second": names[1],
        "JS": JS_TITLE,
        "random": describe_random(random, origin),
    }
    one_heads = _heads_per_layer(one)
    other_heads = _heads_per_layer(other)
    if one_heads != other_heads:
        counts = f"{one_heads} and {other_heads} per layer"
        header["heads"] = f"{counts}, so only predictions are compared"
        return _report_predictions(kl, prompt, header, data, footer)

    scores = [score_heads(model, tokens, random) for model in models]
    divergence = _divergence(one, other, tokens)  # (layers, H)
    rows = []
    for layer, head in existing_heads(scores[0]["entropy"]):
        cells = [str(layer), str(head), f"{divergence[layer, head]:.4f}"]
        for name in COMPARED:
            before = scores[0][name][layer, head]
            after = scores[1][name][layer, head]
            cells.append(f"{before:.3f} → {after:.3f}")
        rows.append(cells)
    labels = head_labels(divergence)
    panels = [Panel(JS_TITLE, divergence, *labels)]
    for name in ("previous", "induction", "entropy"):
        title = f"{TITLES[name]}: second minus first"
        panels.append(Panel(title, scores[1][name] - scores[0][name], *labels, signed=True))
    # Nothing is rounded here, unlike in the rows.
    data["js_divergence"] = to_json(divergence)
    for name in scores[0]:
        data[name] = [to_json(part[name]) for part in scores]
    columns = ["layer", "head", "JS", *COMPARED]
    return Report(header, columns, rows, data, panels, footer, panels_per_row=2)


def _heads_per_layer(model: Thinker) -> list[int]:
    return [block.attention.n_heads for block in model.blocks]


def _divergence(one: Thinker, other: Thinker, tokens: Tensor) -> Tensor:
    """The JS divergence of each head of one model from the same head of the other, (layers, H)."""
    layers = []
    # (B, H, T, T) of a layer, from both models.
    for weights in zip(one.attention_weights(tokens), other.attention_weights(tokens)):
        pair = torch.stack(weights, dim=2)  # (B, H, 2, T, T)
        js = heads.pairwise_js_divergence(pair)[..., 0, 1]  # (B, H)
        layers.append(js.mean(dim=0).cpu())
    return torch.stack(layers)


def _report_predictions(
    kl: Tensor, prompt: Prompt | None, header: dict[str, str], data: dict[str, Any], footer: str
) -> Report:
    """Report the KL divergence of predictions by position, kl (B, T)."""
    by_position = kl.mean(dim=0).cpu()  # (T,)
    data = data | {"by_position": by_position.tolist()}
    positions = list(map(str, range(len(by_position))))
    columns = {"position": positions}
    labels = positions
    if prompt is not None:
        columns["token"] = prompt.labels
        labels = prompt.numbered()
    columns["KL"] = [f"{value:.4f}" for value in data["by_position"]]
    title = "KL divergence of predictions by position (nats)"
    panel = Panel(title, by_position[None], [""], labels)
    rows = list(zip(*columns.values()))
    return Report(header, [*columns], rows, data, [panel], footer)


IMPORTANCE_COLUMNS = ("importance", "95% from", "to")
UNITS = {
    "zero": "loss in nats per token when the head's output is zero",
    "mean": "loss in nats per token when the head's output is its mean",
    "gradient": "mean of |Σ z · ∂L/∂z|, each layer scaled to norm 1 (Michel et al.)",
}


def _importance(
    model: Thinker, texts: Texts, method: str, by_group: bool
) -> tuple[Tensor, dict[Head, list[str]], dict[str, Any]]:
    """Measure importance: (layers, H), its table cells by head, and its values for JSON."""
    tokens, targets = texts
    if method == "gradient":
        importance = heads.importance_by_gradient(model, tokens, targets, by_group)
    else:
        importance = heads.importance_by_ablation(model, tokens, method, targets, by_group)
    parts = vars(importance)  # the value and both ends of its interval
    cells = {}
    for pair in existing_heads(importance.value):
        cells[pair] = [decimal(values[pair], 5, "+") for values in parts.values()]
    data: dict[str, Any] = {"importance": method}
    for name, values in parts.items():
        data[name] = to_json(values)
    return importance.value, cells, data


def report_importance(model: Thinker, texts: Texts, method: str) -> Report:
    """Report the importance of each head, in descending order, with 95% intervals over texts."""
    value, cells, data = _importance(model, texts, method, by_group=False)
    rows = []
    for pair in sorted(cells, key=lambda pair: -value[pair]):
        layer, head = pair
        rows.append([str(layer), str(head), *cells[pair]])
    # Removing a head may make the loss lower.
    signed = bool((value < 0).any())
    panel = Panel(UNITS[method], value, *head_labels(value), signed=signed)
    n_texts, length = texts[0].shape
    header = {"importance": UNITS[method], "texts": f"{n_texts} of {length} tokens"}
    return Report(header, ["layer", "head", *IMPORTANCE_COLUMNS], rows, data, [panel])


def report_pruning(
    model: Thinker, texts: Texts, method: str, count: int | None, groups: list[Head] | None
) -> tuple[Thinker, Report]:
    """Prune `groups`, or the `count` least important ones on half the texts.

    The other half measures the loss. Returns the pruned model and a report. Raises UserError.
    """
    feature_command("prune")  # raises UserError without the feature that the next line imports
    from thinker.features.pruning import pruning

    choosing, measuring = _halves(texts)
    # Both fail before long work.
    given = [] if groups is None else groups
    n_pruned = len(given) if count is None else count
    pruning.prune(model, given)
    pruning.check_count(model, n_pruned)

    value, cells, data = _importance(model, choosing, method, by_group=True)
    pruned = groups
    if groups is None:
        pruned = pruning.least_important(value, count)
    pruned_model = pruning.prune(model, pruned)
    with torch.no_grad():
        before = heads.losses(model, *measuring).cpu()  # (N,)
        after = heads.losses(pruned_model, *measuring).cpu()
    # Of paired differences, as the texts differ more than the models.
    cost = estimate_ratio(after - before, torch.ones(len(before)), 0.95)
    loss_before = before.mean().item()
    loss_after = after.mean().item()
    sizes = [_n_parameters(model), _n_parameters(pruned_model)]
    interval = f"[{decimal(cost.low, 4, '+')}, {decimal(cost.high, 4, '+')}]"
    counts = f"{len(choosing[0])} to choose heads, {len(before)} to measure the loss"
    header = {
        "importance": UNITS[method],
        "loss": f"{loss_before:.4f} nats per token before, {loss_after:.4f} after",
        "cost": f"{decimal(cost.mean, 4, '+')} {interval}",
        "texts": f"{counts}, {texts[0].shape[1]} tokens each",
        "parameters": f"{sizes[0]:,} before, {sizes[1]:,} after",
    }
    # With grouped-query attention, a KV head is removed with all its query heads.
    kind = "head" if model.config.n_heads == model.config.n_kv_heads else "KV head"
    renumbered = _describe_new_numbers(list(cells), pruned, len(value))
    if renumbered:
        header["new numbers"] = f"{kind}s renumbered from 0: {'; '.join(renumbered)}"
    data = {
        "pruned": pruned,
        **data,
        "loss_before": loss_before,
        "loss_after": loss_after,
        "parameters": sizes,
        "cost": vars(cost),
    }
    rows = []
    for pair in sorted(cells, key=lambda pair: value[pair]):
        layer, head = pair
        mark = "pruned" if pair in pruned else ""
        rows.append([str(layer), str(head), mark, *cells[pair]])
    panel = _pruning_panel(value, pruned, kind, UNITS[method])
    columns = ["layer", kind, "pruned", *IMPORTANCE_COLUMNS]
    return pruned_model, Report(header, columns, rows, data, [panel])


def _halves(texts: Texts) -> tuple[Texts, Texts]:
    """Split texts in two halves. Raises UserError if they are too few."""
    tokens, targets = texts
    half = len(tokens) // 2
    if half < 2:
        problem = f"{len(tokens)} texts are too few to choose heads and measure the loss"
        raise UserError(f"{problem}; use at least 4")
    return (tokens[:half], targets[:half]), (tokens[half:], targets[half:])


def _n_parameters(model: Thinker) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _describe_new_numbers(existing: list[Head], pruned: list[Head], n_layers: int) -> list[str]:
    """For each layer whose heads get new numbers, the old ones in order."""
    lines = []
    for layer in range(n_layers):
        remaining = []
        for pair in existing:
            if pair[0] == layer and pair not in pruned:
                remaining.append(pair[1])
        if remaining != list(range(len(remaining))):
            lines.append(f"layer {layer}: {', '.join(map(str, remaining))}")
    return lines


def _pruning_panel(value: Tensor, pruned: list[Head], kind: str, title: str) -> Panel:
    """A table of importance (layers, H) that marks the pruned heads."""
    cells = []
    for row in value.tolist():
        cells.append([decimal(x, 4) for x in row])
    for layer, head in set(pruned):  # a user may name a head twice
        cells[layer][head] += " pruned"
    signed = bool((value < 0).any())
    labels = head_labels(value, kind)
    return Panel(title, value, *labels, signed, style="table", cells=cells)
