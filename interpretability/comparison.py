"""Reports that compare models: over training, side by side, and with heads removed."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from thinker.evaluation.perplexity import estimate_ratio
from thinker.features.pruning import pruning
from thinker.interpretability import heads
from thinker.interpretability.head_reports import TITLES, UNBOUNDED, describe_random, score_heads
from thinker.interpretability.reports import (
    Panel,
    Prompt,
    Report,
    decimal,
    existing_heads,
    head_labels,
    to_json,
)
from thinker.model import Thinker
from thinker.runtime.errors import UserError

Texts = tuple[Tensor, Tensor]  # tokens and targets, (N, T) each
COMPARED = ("entropy", "distance", "previous", "first", "induction")


def report_over_training(
    steps: Iterable[tuple[int, Callable[[], Thinker]]],
    prompt: Prompt | None,
    random: Tensor,
    origin: str,
) -> Report:
    """Report the highest score of each measure, and its head, per checkpoint. See report_heads()."""
    scores = {}
    for step, load_model in tqdm(list(steps), desc="measuring", unit=" checkpoints"):
        scores[step] = score_heads(
            load_model(), random if prompt is None else prompt.tokens[None], random
        )
    first, rows = next(iter(scores.values())), []
    pairs = existing_heads(first["entropy"])
    labels, step_labels = (
        [f"{layer}.{head}" for layer, head in pairs],
        [str(step) for step in scores],
    )
    curves = {
        name: torch.stack([one[name][tuple(zip(*pairs))] for one in scores.values()])
        for name in first
    }
    shown = [name for name in first if name not in ("normalised", *UNBOUNDED)]
    for number, step in enumerate(step_labels):
        best = [curves[name][number].max(dim=0) for name in shown]
        rows.append([step, *(f"{value:.3f} ({labels[head]})" for value, head in best)])
    data = {"steps": [*scores], "heads": labels} | {
        name: values.tolist() for name, values in curves.items()
    }
    panels = [
        Panel(TITLES[key], curves[key], step_labels, labels, vmax=1.0, style="lines")
        for key in reversed(shown)
    ]
    header = {"random": describe_random(random, origin), "cells": "highest score (layer.head)"}
    header["checkpoints"] = f"{len(scores)}, steps {step_labels[0]} to {step_labels[-1]}"
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
    """Compare attention, head scores and predictions on the prompt or `random`. May raise UserError."""
    if one.config.vocab_size != other.config.vocab_size:
        raise UserError(
            "the models have vocabularies of different sizes; compare models with the same tokenizer"
        )
    models = one, other
    tokens = random if prompt is None else prompt.tokens[None]
    logprobs = [model(tokens).float().log_softmax(dim=-1) for model in models]
    kl = (logprobs[0].exp() * (logprobs[0] - logprobs[1])).sum(dim=-1)  # (B, T)
    agreement = (logprobs[0].argmax(dim=-1) == logprobs[1].argmax(dim=-1)).float().mean().item()
    footer = f"predictions: KL(first ‖ second) = {kl.mean():.4f} nats per token; same top token at {agreement:.1%}"
    data: dict[str, Any] = {
        "models": names,
        "kl_divergence": kl.mean().item(),
        "top_token_agreement": agreement,
    }
    header = {
        "first": names[0],
        "second": names[1],
        "JS": "Jensen–Shannon divergence between the two heads (nats)",
    }
    header["random"] = describe_random(random, origin)
    n_heads = [[block.attention.n_heads for block in model.blocks] for model in models]
    if n_heads[0] != n_heads[1]:
        header["heads"] = (
            f"{n_heads[0]} and {n_heads[1]} per layer, so only predictions are compared"
        )
        by_position = kl.mean(dim=0).cpu()  # (T,)
        data["by_position"] = by_position.tolist()
        columns = {"position": [str(position) for position in range(len(by_position))]}
        if prompt is not None:
            columns["token"] = prompt.labels
        columns["KL"] = [f"{x:.4f}" for x in data["by_position"]]
        labels = columns["position"] if prompt is None else prompt.numbered()
        panel = Panel(
            "KL divergence of predictions by position (nats)", by_position[None], [""], labels
        )
        return Report(header, [*columns], [*zip(*columns.values())], data, [panel], footer)
    scores = [score_heads(model, tokens, random) for model in models]
    weights = zip(*(model.attention_weights(tokens) for model in models))
    pairs = (torch.stack(pair, dim=2) for pair in weights)  # (B, H, 2, T, T) per layer
    js = [heads.pairwise_js_divergence(pair)[..., 0, 1].mean(dim=0).cpu() for pair in pairs]
    divergence = torch.stack(js)  # (layers, H)
    rows = []
    for layer, head in existing_heads(scores[0]["entropy"]):
        changes = [
            " → ".join(f"{part[name][layer, head]:.3f}" for part in scores) for name in COMPARED
        ]
        rows.append([str(layer), str(head), f"{divergence[layer, head]:.4f}", *changes])
    labels = head_labels(divergence)
    panels = [Panel("Jensen–Shannon divergence between the two heads (nats)", divergence, *labels)]
    for name in ("previous", "induction", "entropy"):
        difference = scores[1][name] - scores[0][name]
        panels.append(
            Panel(f"{TITLES[name]}: second minus first", difference, *labels, signed=True)
        )
    data["js_divergence"] = to_json(divergence)
    data |= {name: [to_json(part[name]) for part in scores] for name in scores[0]}
    return Report(
        header, ["layer", "head", "JS", *COMPARED], rows, data, panels, footer, panels_per_row=2
    )


IMPORTANCE_COLUMNS = ("importance", "95% from", "to")
UNITS = {
    "zero": "loss in nats per token when the head's output is zero",
    "mean": "loss in nats per token when the head's output is its mean",
    "gradient": "mean of |Σ z · ∂L/∂z|, each layer scaled to norm 1 (Michel et al.)",
}


def _importance(
    model: Thinker, texts: Texts, method: str, by_group: bool
) -> tuple[heads.Importance, dict[tuple[int, int], list[str]], dict[str, Any]]:
    """Measure importance. Returns it, its table cells by (layer, head), and its values for JSON."""
    if method == "gradient":
        importance = heads.importance_by_gradient(model, *texts, by_group)
    else:
        importance = heads.importance_by_ablation(model, texts[0], method, texts[1], by_group)
    columns = vars(importance)
    cells = {
        pair: [decimal(x[pair], 5, "+") for x in columns.values()]
        for pair in existing_heads(importance.value)
    }
    return (
        importance,
        cells,
        {"importance": method} | {name: to_json(x) for name, x in columns.items()},
    )


def report_importance(model: Thinker, texts: Texts, method: str) -> Report:
    """Report the importance of each head, in descending order, with 95% intervals over texts."""
    importance, cells, data = _importance(model, texts, method, by_group=False)
    value = importance.value
    rows = [
        [*map(str, pair), *cells[pair]] for pair in sorted(cells, key=lambda pair: -value[pair])
    ]
    panel = Panel(UNITS[method], value, *head_labels(value), signed=bool((value < 0).any()))
    header = {
        "importance": UNITS[method],
        "texts": f"{len(texts[0])} of {texts[0].shape[1]} tokens",
    }
    return Report(header, ["layer", "head", *IMPORTANCE_COLUMNS], rows, data, [panel])


def report_pruning(
    model: Thinker,
    texts: Texts,
    method: str,
    count: int | None,
    groups: list[tuple[int, int]] | None,
) -> tuple[Thinker, Report]:
    """Prune `groups`, or the `count` least important ones on half the texts; measure the loss on the other half."""
    half = len(texts[0]) // 2
    if half < 2:
        raise UserError(
            f"{len(texts[0])} texts are too few to choose heads and measure the loss; use at least 4"
        )
    choosing, measuring = (
        (texts[0][part], texts[1][part]) for part in (slice(half), slice(half, None))
    )
    pruning.prune(model, groups or [])  # fail before long work
    pruning.check_count(model, len(groups or []) if count is None else count)
    importance, cells, data = _importance(model, choosing, method, by_group=True)
    value = importance.value
    pruned = pruning.least_important(importance.value, count) if groups is None else groups
    pruned_model = pruning.prune(model, pruned)
    with torch.no_grad():
        before, after = (heads.losses(each, *measuring).cpu() for each in (model, pruned_model))
    cost = estimate_ratio(after - before, torch.ones(len(before)), 0.95)
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, pruned_model)]
    loss_before, loss_after = before.mean().item(), after.mean().item()
    header = {
        "importance": UNITS[method],
        "loss": f"{loss_before:.4f} nats per token before, {loss_after:.4f} after",
        "cost": "{} [{}, {}]".format(
            *(decimal(x, 4, "+") for x in (cost.mean, cost.low, cost.high))
        ),
        "texts": f"{half} to choose heads, {len(before)} to measure the loss, {texts[0].shape[1]} tokens each",
        "parameters": f"{sizes[0]:,} before, {sizes[1]:,} after",
    }
    kind, renumbered = "head" if model.config.n_heads == model.config.n_kv_heads else "KV head", []
    for layer in range(len(value)):
        remaining = [
            head for at_layer, head in cells if at_layer == layer and (layer, head) not in pruned
        ]
        if remaining != list(range(len(remaining))):
            renumbered.append(f"layer {layer}: {', '.join(map(str, remaining))}")
    if renumbered:
        header["new numbers"] = f"{kind}s renumbered from 0: {'; '.join(renumbered)}"
    data = {"pruned": pruned} | data
    data |= {
        "loss_before": loss_before,
        "loss_after": loss_after,
        "parameters": sizes,
        "cost": vars(cost),
    }
    order = sorted(cells, key=lambda pair: value[pair])
    rows = [[*map(str, pair), "pruned" if pair in pruned else "", *cells[pair]] for pair in order]
    texts_of_heads = [[decimal(x, 4) for x in row] for row in value.tolist()]
    for layer, head in set(pruned):
        texts_of_heads[layer][head] += " pruned"
    signed = bool((value < 0).any())
    panel = Panel(
        UNITS[method], value, *head_labels(value, kind), signed, style="table", cells=texts_of_heads
    )
    return pruned_model, Report(
        header, ["layer", kind, "pruned", *IMPORTANCE_COLUMNS], rows, data, [panel]
    )
