"""What scripts/inspect_model.py shows of changes: over a training, between two models, and with heads left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from thinker.evaluation.perplexity import estimate_ratio
from thinker.interpretability import heads, pruning
from thinker.interpretability.heads import Importance
from thinker.interpretability.reports import (
    TITLES,
    Panel,
    Prompt,
    Report,
    all_heads,
    head_labels,
    numbers,
    scores,
)
from thinker.model import Thinker
from thinker.runtime.errors import UserError

Texts = tuple[Tensor, Tensor]  # tokens and targets, (N, T) each


def report_over_training(
    steps: Iterable[tuple[int, Callable[[], Thinker]]], prompt: Prompt | None, random: Tensor, origin: str
) -> Report:
    """The scores of all heads at each step of a training: of every measure the highest, and which head has it.

    random, origin: as in reports.report_heads.
    """
    at, found = [], []
    for step, open_model in tqdm(list(steps), desc="measuring", unit=" checkpoints"):
        at.append(step)
        found.append(scores(open_model(), random if prompt is None else prompt.tokens[None], random))
    names = [name for name in found[0] if name not in ("entropy", "normalised", "distance")]  # from 0 to 1
    heads_there = all_heads(found[0]["entropy"])
    labels = [f"{layer}.{head}" for layer, head in heads_there]
    curves = {name: torch.stack([one[name][tuple(zip(*heads_there))] for one in found]) for name in found[0]}
    rows = []
    for number, step in enumerate(at):
        best = [curves[name][number].max(dim=0) for name in names]
        rows.append([str(step), *(f"{value:.3f} ({labels[head]})" for value, head in best)])
    data = {"steps": at, "heads": labels} | {name: values.tolist() for name, values in curves.items()}
    panels = [
        Panel(TITLES[name], curves[name], [str(step) for step in at], labels, top=1.0, style="lines")
        for name in reversed(names)
    ]
    about = {"random": f"{random.shape[1] // 2} tokens of {origin}, repeated once"}
    about |= {"checkpoints": f"{len(at)}, steps {at[0]} to {at[-1]}", "cells": "the highest score, and (layer.head)"}
    return Report(about, ["step", *names], rows, data, panels, across=2)


@torch.no_grad()
def compare(
    one: Thinker, other: Thinker, prompt: Prompt | None, random: Tensor, origin: str, names: tuple[str, str]
) -> Report:
    """Two models on the same tokens: how differently each head looks, its scores in both, and what they predict.

    Of the prompt, or without one of random tokens repeated once. Of models with other heads the predictions alone.
    Raises UserError where they do not have the same tokens.
    """
    if one.config.vocab_size != other.config.vocab_size:
        raise UserError("the two models have vocabularies of different sizes: they do not read the same tokens")
    tokens = random if prompt is None else prompt.tokens[None]
    logs = [model(tokens).float().log_softmax(dim=-1) for model in (one, other)]
    divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(dim=-1).mean().item()
    same = (logs[0].argmax(dim=-1) == logs[1].argmax(dim=-1)).float().mean().item()
    after = f"predictions: KL(first ‖ second) = {divergence:.4f} nats a token; the same likeliest token at {same:.1%}"
    data: dict[str, Any] = {"models": names, "divergence_of_predictions": divergence, "same_prediction": same}
    about = {"first": names[0], "second": names[1], "apart": "Jensen–Shannon divergence of the two heads, nats"}
    about["random"] = f"{random.shape[1] // 2} tokens of {origin}, repeated once"
    have = [[block.attention.n_heads for block in model.blocks] for model in (one, other)]
    if have[0] != have[1]:
        about["heads"] = f"{have[0]} and {have[1]} by layer, so that they cannot be set beside each other"
        by_position = (logs[0].exp() * (logs[0] - logs[1])).sum(dim=-1).mean(dim=0, keepdim=True).cpu()  # (1, T)
        labels = [str(at) for at in range(tokens.shape[1])] if prompt is None else prompt.numbered()
        panel = Panel("KL of the predictions, by position (nats)", by_position, [""], labels)
        rows = [[*label.split(" ", 1), f"{x:.4f}"] for label, x in zip(labels, by_position[0].tolist())]
        columns = ["position", "token", "KL"] if prompt is not None else ["position", "KL"]
        return Report(about, columns, rows, data | {"by_position": by_position[0].tolist()}, [panel], after)
    found = [scores(model, tokens, random) for model in (one, other)]
    apart = pad_sequence(
        [_apart(*pair) for pair in zip(*(model.attention_weights(tokens) for model in (one, other)))], batch_first=True
    )
    shown = ("entropy", "distance", "previous", "first", "induction")
    rows = [
        [str(layer), str(head), f"{apart[layer, head]:.4f}"]
        + [f"{found[0][name][layer, head]:.3f} → {found[1][name][layer, head]:.3f}" for name in shown]
        for layer, head in all_heads(found[0]["entropy"])
    ]
    labels = head_labels(apart)
    panels = [Panel("how far apart heads look (Jensen–Shannon, nats)", apart, *labels)]
    panels += [Panel(f"{TITLES[name]}: second minus first", found[1][name] - found[0][name], *labels, signed=True)
               for name in ("previous", "induction", "entropy")]  # fmt: skip
    data |= {"apart": numbers(apart)} | {name: [numbers(part[name]) for part in found] for name in found[0]}
    return Report(about, ["layer", "head", "apart", *shown], rows, data, panels, after, across=2)


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Of two models' heads the Jensen–Shannon divergence, over texts and rows: (B, H, T, T) twice -> (H,)."""
    pairs = torch.stack((one, other), dim=2)  # (B, H, 2, T, T)
    return heads.pairwise_js_divergence(pairs)[..., 0, 1].mean(dim=0).cpu()


def _importance(model: Thinker, texts: Texts, how: str, by_group: bool) -> Importance:
    if how == "gradient":
        return heads.importance_by_gradient(model, texts[0], targets=texts[1], by_group=by_group)
    return heads.importance_by_ablation(model, texts[0], how, targets=texts[1], by_group=by_group, progress=True)


INTERVAL = ("95% from", "to")
UNITS = {
    "zero": "nats a token that are lost when the head's output is zero",
    "mean": "nats a token that are lost when the head's output is its mean",
    "gradient": "mean of |Σ z · ∂L/∂z|, each layer scaled to norm 1 (Michel et al.)",
}


def report_importance(model: Thinker, texts: Texts, how: str) -> Report:
    """What each head is worth, the most important first, with 95 % intervals over texts."""
    found = _importance(model, texts, how, by_group=False)
    order = sorted(all_heads(found.value), key=lambda at: -found.value[at])
    rows = [[str(layer), str(head), *_interval(found, (layer, head))] for layer, head in order]
    data = {"importance": how} | {name: numbers(x) for name, x in vars(found).items()}
    signed = bool((found.value < 0).any())
    panel = Panel(UNITS[how], found.value, *head_labels(found.value), signed)
    about = {"importance": UNITS[how], "texts": f"{len(texts[0])} of {texts[0].shape[1]} tokens"}
    return Report(about, ["layer", "head", "importance", *INTERVAL], rows, data, [panel])


def _interval(found: Importance, at: tuple[int, int]) -> list[str]:
    return [f"{values[at]:+.5f}" for values in (found.value, found.low, found.high)]


def report_pruning(
    model: Thinker, texts: Texts, how: str, count: int | None, groups: list[tuple[int, int]] | None
) -> tuple[Thinker, Report]:
    """The model without `groups`, or without the `count` least important ones, and its loss before and after.

    What is chosen by the first half of the texts is measured on the second.
    """
    half = len(texts[0]) // 2
    if half < 2:
        raise UserError(f"{len(texts[0])} texts are too few: half of them choose, the others measure; give at least 4")
    chosen, measured = ((texts[0][part], texts[1][part]) for part in (slice(half), slice(half, None)))
    pruning.prune(model, groups or [])  # what cannot be done is said before long work
    pruning.check_count(model, len(groups or []) if count is None else count)
    found = _importance(model, chosen, how, by_group=True)
    gone = pruning.least_important(found, count) if groups is None else groups
    left = pruning.prune(model, gone)
    with torch.no_grad():
        before, after = heads.losses(model, *measured).cpu(), heads.losses(left, *measured).cpu()
    cost = estimate_ratio(after - before, torch.ones(len(before)), 0.95)
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, left)]
    losses = [before.mean().item(), after.mean().item()]
    about = {"importance": UNITS[how], "loss": f"{losses[0]:.4f} nats a token before, {losses[1]:.4f} after"}
    about |= {"cost": f"{cost.mean:+.4f} [{cost.low:+.4f}, {cost.high:+.4f}]", "texts": f"{half} to choose by, "}
    about["texts"] += f"{len(before)} others to measure on, of {texts[0].shape[1]} tokens"
    about["parameters"] = f"{sizes[0]:,} before, {sizes[1]:,} after"
    kind = "head" if model.config.n_heads == model.config.n_kv_heads else "key head"
    kept: dict[int, list[int]] = {}
    for layer, group in all_heads(found.value):
        kept.setdefault(layer, []).extend([group] * ((layer, group) not in gone))
    renamed = {layer: some for layer, some in kept.items() if some != list(range(len(some)))}
    if renamed:
        words = (f"layer {layer}: {', '.join(map(str, some))}" for layer, some in renamed.items())
        about["new numbers"] = f"{kind}s are counted from 0 again; {'; '.join(words)}"
    order = sorted(all_heads(found.value), key=lambda at: found.value[at])
    rows = [[str(at[0]), str(at[1]), "out" if at in gone else "", *_interval(found, at)] for at in order]
    data = {"pruned": gone, "importance": how, "value": numbers(found.value), "low": numbers(found.low)}
    data |= {"high": numbers(found.high), "loss_before": losses[0], "loss_after": losses[1], "parameters": sizes}
    data |= {"cost": vars(cost)}
    cells = [[f"{x:.4f}{' out' if (layer, k) in gone else ''}" for k, x in enumerate(row)]
             for layer, row in enumerate(found.value.tolist())]  # fmt: skip
    layers, columns = head_labels(found.value)
    columns = [name.replace("head", kind) for name in columns]
    signed = bool((found.value < 0).any())
    panel = Panel(UNITS[how], found.value, layers, columns, signed, style="table", cells=cells)
    return left, Report(about, ["layer", kind, "pruned", "importance", *INTERVAL], rows, data, [panel])
