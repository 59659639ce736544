"""Reports on change: heads over training, two models side by side, head importance and pruning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from thinker.evaluation.perplexity import estimate_ratio
from thinker.interpretability import heads, pruning
from thinker.interpretability.head_reports import TITLES, UNBOUNDED, describe_random, score_heads
from thinker.interpretability.heads import Importance
from thinker.interpretability.reports import Panel, Prompt, Report, existing_heads, head_labels, to_json
from thinker.model import Thinker
from thinker.runtime.errors import UserError

Texts = tuple[Tensor, Tensor]  # tokens and targets, (N, T) each
COMPARED = ("entropy", "distance", "previous", "first", "induction")


def report_over_training(
    steps: Iterable[tuple[int, Callable[[], Thinker]]], prompt: Prompt | None, random: Tensor, origin: str
) -> Report:
    """The scores of all heads at each checkpoint of a run: the highest of each measure, and which head has it.

    random, origin: as in report_heads().
    """
    step_numbers, scores = [], []
    for step, load_model in tqdm(list(steps), desc="measuring", unit=" checkpoints"):
        step_numbers.append(step)
        scores.append(score_heads(load_model(), random if prompt is None else prompt.tokens[None], random))
    names = [name for name in scores[0] if name not in ("normalised", *UNBOUNDED)]
    pairs = existing_heads(scores[0]["entropy"])
    labels = [f"{layer}.{head}" for layer, head in pairs]
    curves = {name: torch.stack([one[name][tuple(zip(*pairs))] for one in scores]) for name in scores[0]}
    rows = []
    for number, step in enumerate(step_numbers):
        best = [curves[name][number].max(dim=0) for name in names]
        rows.append([str(step), *(f"{value:.3f} ({labels[head]})" for value, head in best)])
    data = {"steps": step_numbers, "heads": labels} | {name: values.tolist() for name, values in curves.items()}
    step_labels = [str(step) for step in step_numbers]
    panels = [
        Panel(TITLES[name], curves[name], step_labels, labels, vmax=1.0, style="lines") for name in reversed(names)
    ]
    header = {"random": describe_random(random, origin), "cells": "the highest score, and (layer.head)"}
    header["checkpoints"] = f"{len(step_numbers)}, steps {step_numbers[0]} to {step_numbers[-1]}"
    return Report(header, ["step", *names], rows, data, panels, panels_per_row=2)


@torch.no_grad()
def compare(
    one: Thinker, other: Thinker, prompt: Prompt | None, random: Tensor, origin: str, names: tuple[str, str]
) -> Report:
    """Two models on the same tokens: how differently each head attends, its scores in both, and their predictions.

    On the prompt, or without one on random tokens repeated once. Models with different numbers of heads are compared
    by their predictions only. Raises UserError if their vocabularies differ in size.
    """
    if one.config.vocab_size != other.config.vocab_size:
        raise UserError("the two models have vocabularies of different sizes: they do not read the same tokens")
    models = one, other
    tokens = random if prompt is None else prompt.tokens[None]
    logprobs = [model(tokens).float().log_softmax(dim=-1) for model in models]
    kl = (logprobs[0].exp() * (logprobs[0] - logprobs[1])).sum(dim=-1)  # (B, T)
    agreement = (logprobs[0].argmax(dim=-1) == logprobs[1].argmax(dim=-1)).float().mean().item()
    footer = f"predictions: KL(first ‖ second) = {kl.mean():.4f} nats per token; same top token at {agreement:.1%}"
    data: dict[str, Any] = {"models": names, "kl_divergence": kl.mean().item(), "top_token_agreement": agreement}
    header = {"first": names[0], "second": names[1], "JS": "Jensen–Shannon divergence of the two heads, nats"}
    header["random"] = describe_random(random, origin)
    n_heads = [[block.attention.n_heads for block in model.blocks] for model in models]
    if n_heads[0] != n_heads[1]:
        header["heads"] = f"{n_heads[0]} and {n_heads[1]} per layer, so they cannot be compared one by one"
        by_position = kl.mean(dim=0, keepdim=True).cpu()  # (1, T)
        positions = [str(position) for position in range(tokens.shape[1])]
        columns, cells, labels = ["position", "KL"], [positions], positions
        if prompt is not None:
            columns, cells, labels = ["position", "token", "KL"], [positions, prompt.labels], prompt.numbered()
        rows = [[*row, f"{x:.4f}"] for *row, x in zip(*cells, by_position[0].tolist())]
        panel = Panel("KL of the predictions, by position (nats)", by_position, [""], labels)
        return Report(header, columns, rows, data | {"by_position": by_position[0].tolist()}, [panel], footer)
    scores = [score_heads(model, tokens, random) for model in models]
    weights = zip(*(model.attention_weights(tokens) for model in models))
    divergence = pad_sequence([_js_divergence(*pair) for pair in weights], batch_first=True)  # (layers, H)
    rows = []
    for layer, head in existing_heads(scores[0]["entropy"]):
        changes = [" → ".join(f"{part[name][layer, head]:.3f}" for part in scores) for name in COMPARED]
        rows.append([str(layer), str(head), f"{divergence[layer, head]:.4f}", *changes])
    labels = head_labels(divergence)
    panels = [Panel("Jensen–Shannon divergence of the two heads (nats)", divergence, *labels)]
    for name in ("previous", "induction", "entropy"):
        difference = scores[1][name] - scores[0][name]
        panels.append(Panel(f"{TITLES[name]}: second minus first", difference, *labels, signed=True))
    data["js_divergence"] = to_json(divergence)
    data |= {name: [to_json(part[name]) for part in scores] for name in scores[0]}
    columns = ["layer", "head", "JS", *COMPARED]
    return Report(header, columns, rows, data, panels, footer, panels_per_row=2)


def _js_divergence(one: Tensor, other: Tensor) -> Tensor:
    """The Jensen–Shannon divergence of two models' heads, averaged over texts and rows: (B, H, T, T) each -> (H,)."""
    pairs = torch.stack((one, other), dim=2)  # (B, H, 2, T, T)
    return heads.pairwise_js_divergence(pairs)[..., 0, 1].mean(dim=0).cpu()


def _importance(model: Thinker, texts: Texts, method: str, by_group: bool) -> Importance:
    if method == "gradient":
        return heads.importance_by_gradient(model, texts[0], targets=texts[1], by_group=by_group)
    return heads.importance_by_ablation(model, texts[0], method, targets=texts[1], by_group=by_group, progress=True)


IMPORTANCE_COLUMNS = ("importance", "95% from", "to")
UNITS = {
    "zero": "loss in nats per token when the head's output is zero",
    "mean": "loss in nats per token when the head's output is its mean",
    "gradient": "mean of |Σ z · ∂L/∂z|, each layer scaled to norm 1 (Michel et al.)",
}


def _importance_cells(importance: Importance, pair: tuple[int, int]) -> list[str]:
    return [f"{values[pair]:+.5f}" for values in (importance.value, importance.low, importance.high)]


def _importance_data(importance: Importance, method: str) -> dict[str, Any]:
    return {"importance": method} | {name: to_json(values) for name, values in vars(importance).items()}


def report_importance(model: Thinker, texts: Texts, method: str) -> Report:
    """The importance of each head, largest first, with 95 % intervals over texts."""
    importance = _importance(model, texts, method, by_group=False)
    value = importance.value
    order = sorted(existing_heads(value), key=lambda pair: -value[pair])
    rows = [[str(layer), str(head), *_importance_cells(importance, (layer, head))] for layer, head in order]
    panel = Panel(UNITS[method], value, *head_labels(value), signed=bool((value < 0).any()))
    header = {"importance": UNITS[method], "texts": f"{len(texts[0])} of {texts[0].shape[1]} tokens"}
    columns = ["layer", "head", *IMPORTANCE_COLUMNS]
    return Report(header, columns, rows, _importance_data(importance, method), [panel])


def report_pruning(
    model: Thinker, texts: Texts, method: str, count: int | None, groups: list[tuple[int, int]] | None
) -> tuple[Thinker, Report]:
    """The model without `groups`, or without the `count` least important ones, and its loss before and after.

    The first half of the texts chooses the heads, the second measures the loss.
    """
    half = len(texts[0]) // 2
    if half < 2:
        raise UserError(f"{len(texts[0])} texts are too few: half of them choose, the others measure; give at least 4")
    choosing, measuring = ((texts[0][part], texts[1][part]) for part in (slice(half), slice(half, None)))
    pruning.prune(model, groups or [])  # fail before long work
    pruning.check_count(model, len(groups or []) if count is None else count)
    importance = _importance(model, choosing, method, by_group=True)
    value = importance.value
    pruned = pruning.least_important(importance, count) if groups is None else groups
    pruned_model = pruning.prune(model, pruned)
    with torch.no_grad():
        before, after = (heads.losses(each, *measuring).cpu() for each in (model, pruned_model))
    cost = estimate_ratio(after - before, torch.ones(len(before)), 0.95)
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, pruned_model)]
    loss_before, loss_after = before.mean().item(), after.mean().item()
    header = {
        "importance": UNITS[method],
        "loss": f"{loss_before:.4f} nats per token before, {loss_after:.4f} after",
        "cost": f"{cost.mean:+.4f} [{cost.low:+.4f}, {cost.high:+.4f}]",
        "texts": f"{half} to choose by, {len(before)} others to measure on, of {texts[0].shape[1]} tokens",
        "parameters": f"{sizes[0]:,} before, {sizes[1]:,} after",
    }
    kind = "head" if model.config.n_heads == model.config.n_kv_heads else "KV head"
    pairs = existing_heads(value)
    renumbered = []
    for layer in range(len(value)):
        remaining = [head for at_layer, head in pairs if at_layer == layer and (layer, head) not in pruned]
        if remaining != list(range(len(remaining))):
            renumbered.append(f"layer {layer}: {', '.join(map(str, remaining))}")
    if renumbered:
        header["new numbers"] = f"{kind}s are numbered from 0 again; {'; '.join(renumbered)}"
    rows = []
    for layer, head in sorted(pairs, key=lambda pair: value[pair]):
        mark = "pruned" if (layer, head) in pruned else ""
        rows.append([str(layer), str(head), mark, *_importance_cells(importance, (layer, head))])
    data = {"pruned": pruned} | _importance_data(importance, method)
    data |= {"loss_before": loss_before, "loss_after": loss_after, "parameters": sizes, "cost": vars(cost)}
    cells = [
        [f"{x:.4f}{' pruned' if (layer, head) in pruned else ''}" for head, x in enumerate(row)]
        for layer, row in enumerate(value.tolist())
    ]
    layers, columns = head_labels(value)
    columns = [name.replace("head", kind) for name in columns]
    signed = bool((value < 0).any())
    panel = Panel(UNITS[method], value, layers, columns, signed, style="table", cells=cells)
    columns = ["layer", kind, "pruned", *IMPORTANCE_COLUMNS]
    return pruned_model, Report(header, columns, rows, data, [panel])
