"""What scripts/inspect_model.py shows of changes: over a training, between two models, and with heads left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from tqdm import tqdm

from analysis import heads, pruning
from analysis.heads import Importance
from analysis.reports import Panel, Prompt, Report, all_heads, by_layer_and_head, numbers, scores
from errors import UserError
from evaluation.text import ratio
from model import Thinker

Texts = tuple[Tensor, Tensor]  # tokens and targets, (N, T) each


def show_training(
    steps: Iterable[tuple[int, Callable[[], Thinker]]], prompt: Prompt | None, random: Tensor, origin: str
) -> Report:
    """The scores of all heads at each step of a training: of every measure the highest, and which head has it.

    random, origin: as in reports.measure_heads.
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
        Panel(f"{name} score of every head", curves[name], [str(step) for step in at], labels, top=1.0, style="lines")
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

    Of the prompt, or without one of random tokens repeated once. Raises UserError where the models do not have the same
    tokens or heads.
    """
    if one.config.vocab_size != other.config.vocab_size:
        raise UserError("the two models have vocabularies of different sizes: they do not read the same tokens")
    tokens = random if prompt is None else prompt.tokens[None]
    found = [scores(model, tokens, random) for model in (one, other)]
    shapes = [tuple(part["entropy"].shape) for part in found]
    if shapes[0] != shapes[1] or len({tuple(all_heads(part["entropy"])) for part in found}) > 1:
        raise UserError(f"the two models have other heads: {shapes[0]} and {shapes[1]} layers and heads")
    apart = torch.stack([_apart(*pair) for pair in zip(*(model.attention_weights(tokens) for model in (one, other)))])
    logs = [model(tokens).float().log_softmax(dim=-1) for model in (one, other)]
    divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(dim=-1).mean().item()
    same = (logs[0].argmax(dim=-1) == logs[1].argmax(dim=-1)).float().mean().item()
    shown = ("entropy", "distance", "previous", "first", "induction")
    rows = [
        [str(layer), str(head), f"{apart[layer, head]:.4f}"]
        + [f"{found[0][name][layer, head]:.3f} → {found[1][name][layer, head]:.3f}" for name in shown]
        for layer, head in all_heads(apart)
    ]
    labels = by_layer_and_head(apart)
    panels = [Panel("how differently heads look (Jensen–Shannon, nats)", apart, *labels)]
    panels += [Panel(f"{name}: the second less the first", found[1][name] - found[0][name], *labels, signed=True)
               for name in ("previous", "induction", "entropy")]  # fmt: skip
    data = {"models": names, "divergence_of_predictions": divergence, "same_prediction": same, "apart": numbers(apart)}
    data |= {name: [numbers(part[name]) for part in found] for name in found[0]}
    after = f"predictions: KL(first ‖ second) = {divergence:.4f} nats a token; the same likeliest token at {same:.1%}"
    about = {"first": names[0], "second": names[1]}
    about |= {"random": f"{random.shape[1] // 2} tokens of {origin}, repeated once"}
    return Report(about, ["layer", "head", "apart", *shown], rows, data, panels, after, across=2)


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """Of two models' heads the Jensen–Shannon divergence, over texts and rows: (B, H, T, T) twice -> (H,)."""
    pairs = torch.stack((one, other), dim=2)  # (B, H, 2, T, T)
    return heads.redundancy(pairs)[..., 0, 1].mean(dim=0).cpu()


def _importance(thinker: Thinker, texts: Texts, how: str, by_group: bool) -> Importance:
    if how == "gradient":
        return heads.importance_by_gradient(thinker, texts[0], targets=texts[1], by_group=by_group)
    return heads.importance_by_ablation(thinker, texts[0], how, targets=texts[1], by_group=by_group, progress=True)


UNITS = {
    "zero": "nats a token that are lost when the head's output is zero",
    "mean": "nats a token that are lost when the head's output is its mean",
    "gradient": "mean of |Σ z · ∂L/∂z|, each layer scaled to norm 1 (Michel et al.)",
}


def show_importance(thinker: Thinker, texts: Texts, how: str) -> Report:
    """What each head is worth, the most important first, with 95 % intervals over texts."""
    found = _importance(thinker, texts, how, by_group=False)
    order = sorted(all_heads(found.value), key=lambda at: -found.value[at])
    rows = [[str(layer), str(head), *_interval(found, (layer, head))] for layer, head in order]
    data = {"importance": how} | {name: numbers(x) for name, x in vars(found).items()}
    panel = Panel("importance of heads", found.value, *by_layer_and_head(found.value), signed=how != "gradient")
    about = {"importance": UNITS[how], "texts": f"{len(texts[0])} of {texts[0].shape[1]} tokens"}
    return Report(about, ["layer", "head", "importance", "low", "high"], rows, data, [panel])


def _interval(found: Importance, at: tuple[int, int]) -> list[str]:
    return [f"{values[at]:+.5f}" for values in (found.value, found.low, found.high)]


def show_pruning(
    thinker: Thinker, texts: Texts, how: str, count: int | None, groups: list[tuple[int, int]] | None
) -> tuple[Thinker, Report]:
    """The model without `groups`, or without the `count` least important ones, and its loss before and after.

    What is chosen by the first half of the texts is measured on the second.
    """
    half = len(texts[0]) // 2
    if half < 2:
        raise UserError(f"{len(texts[0])} texts are too few: half of them choose, the others measure; give at least 4")
    chosen, measured = ((texts[0][part], texts[1][part]) for part in (slice(half), slice(half, None)))
    found = _importance(thinker, chosen, how, by_group=True)
    gone = pruning.least_important(found, count) if groups is None else groups
    left = pruning.prune(thinker, gone)
    with torch.no_grad():
        before, after = heads.losses(thinker, *measured).cpu(), heads.losses(left, *measured).cpu()
    one = torch.ones(len(before))
    cost = ratio(after - before, one, 0.95)
    order = sorted(all_heads(found.value), key=lambda at: found.value[at])
    rows = [[str(at[0]), str(at[1]), "out" if at in gone else "", *_interval(found, at)] for at in order]
    sizes = [sum(p.numel() for p in model.parameters()) for model in (thinker, left)]
    losses = [before.mean().item(), after.mean().item()]
    about = {"importance": UNITS[how], "loss": f"{losses[0]:.4f} nats a token before, {losses[1]:.4f} after"}
    about |= {"cost": f"{cost.mean:+.4f} [{cost.low:+.4f}, {cost.high:+.4f}]", "texts": f"{half} to choose by, "}
    about["texts"] += f"{len(before)} others to measure on, of {texts[0].shape[1]} tokens"
    about["parameters"] = f"{sizes[0]:,} before, {sizes[1]:,} after"
    data = {"pruned": gone, "importance": how, "value": numbers(found.value), "low": numbers(found.low)}
    data |= {"high": numbers(found.high), "loss_before": losses[0], "loss_after": losses[1], "parameters": sizes}
    data |= {"cost": vars(cost)}
    cells = [[f"{x:.4f}{' out' if (layer, k) in gone else ''}" for k, x in enumerate(row)]
             for layer, row in enumerate(found.value.tolist())]  # fmt: skip
    rows_of, columns = by_layer_and_head(found.value)
    columns = [name.replace("head", "key head") for name in columns]
    panel = Panel(
        "importance, and what went out", found.value, rows_of, columns, how != "gradient", None, "table", cells
    )
    return left, Report(about, ["layer", "key head", "pruned", "importance", "low", "high"], rows, data, [panel])
