"""Scores of all heads on a prompt or random tokens."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.interpretability import distances, heads
from thinker.interpretability.reports import (
    Panel,
    Prompt,
    Report,
    existing_heads,
    head_labels,
    to_json,
)
from thinker.model import Thinker

MEASURES = {
    "entropy": heads.entropy,
    "normalised": lambda weights: heads.entropy(weights, normalised=True),
    "distance": heads.mean_distance,
    "previous": heads.previous_token,
    "first": heads.first_token,
}
MEASURES_ON_REPEATS = {
    "duplicate": heads.duplicate_token,
    "induction": heads.induction,
    "periodic": distances.periodic,
}
TITLES = {
    "entropy": "entropy (nats)",
    "normalised": "normalized entropy",
    "distance": "mean distance (tokens)",
    "previous": "weight of the previous token",
    "first": "weight of the first token",
    "duplicate": "duplicate-token score",
    "induction": "induction score",
    "periodic": "strength of a period",
}
UNBOUNDED = ("entropy", "distance")  # other measures are between 0 and 1


@torch.no_grad()
def measure_heads(
    model: Thinker, tokens: Tensor, measures: dict[str, Callable]
) -> dict[str, list[Tensor]]:
    """Apply each measure to the attention weights (B, H, T, T).

    tokens (B, T) -> means over the batch, (H, ...) per layer.
    """
    results: dict[str, list[Tensor]] = {name: [] for name in measures}

    # A patch instead of a record, which would keep the weights of all layers.
    def record(weights: Tensor) -> Tensor:
        for name, measure in measures.items():
            results[name].append(measure(weights).mean(dim=0).cpu())
        return weights

    with model.patch({"blocks.*.attention.weights": record}):
        model(tokens)
    return results


def random_repeats(
    model: Thinker, ids: Tensor | None = None, n: int = 24, batch: int = 8
) -> Tensor:
    """repeated_random_tokens() of `ids` (default: the vocabulary), (batch, 2n).

    Shorter for a short context.
    """
    if ids is None:
        ids = torch.arange(model.config.vocab_size)
    n = min(n, len(ids), model.config.max_seq_len // 2)
    return heads.repeated_random_tokens(ids, n, batch).to(model.device)


def score_heads(model: Thinker, tokens: Tensor, random: Tensor) -> dict[str, Tensor]:
    """Compute all measures, (layers, H) each, nan for missing heads.

    MEASURES_ON_REPEATS on `random`, the others on `tokens`.
    """
    by_layer = measure_heads(model, tokens, MEASURES)
    by_layer |= measure_heads(model, random, MEASURES_ON_REPEATS)
    scores = {}
    for name, layers in by_layer.items():
        scores[name] = pad_sequence(layers, batch_first=True, padding_value=torch.nan)
    return scores


def describe_random(random: Tensor, origin: str) -> str:
    """Describe the tokens of the induction scores."""
    return f"{random.shape[1] // 2} random tokens from {origin}, repeated once"


@torch.no_grad()
def report_heads(model: Thinker, prompt: Prompt | None, random: Tensor, origin: str) -> Report:
    """Report all measures of every head on the prompt, or on `random` (tokens from `origin`)."""
    repeats = describe_random(random, origin)
    if prompt is None:
        tokens = random
        measured_on = repeats
    else:
        tokens = prompt.tokens[None]
        measured_on = f"the prompt; duplicate, induction, periodic on {repeats}"
    scores = score_heads(model, tokens, random)
    measures = {"js": heads.pairwise_js_divergence}
    divergence = measure_heads(model, tokens, measures)["js"]  # (H, H) per layer

    rows = []
    for layer, head in existing_heads(scores["entropy"]):
        cells = [str(layer), str(head)]
        cells += [f"{values[layer, head]:.3f}" for values in scores.values()]
        cells.append(_most_similar(divergence[layer][head], head))
        rows.append(cells)
    labels = head_labels(scores["entropy"])
    panels = [Panel("attention of every head", _tile_attention_maps(model, tokens[:1]), *labels)]
    for name, values in scores.items():
        vmax = None if name in UNBOUNDED else 1.0
        panels.append(Panel(TITLES[name], values, *labels, vmax=vmax))
    header = {
        "measured on": measured_on,
        "most similar": "most similar head in the layer (Jensen–Shannon divergence in nats)",
    }
    data = {name: to_json(values) for name, values in scores.items()}
    data["js_divergence"] = [layer.tolist() for layer in divergence]
    # Query i of the second half has i + 1 visible keys; one of them is the right one.
    n = random.shape[1] // 2
    uniform = sum(1 / (i + 1) for i in range(n, 2 * n)) / n
    footer = f"uniform attention has duplicate and induction scores of {uniform:.3f}"
    columns = ["layer", "head", *scores, "most similar"]
    return Report(header, columns, rows, data, panels, footer, panels_per_row=2)


def _most_similar(divergence: Tensor, head: int) -> str:
    """The other head with the lowest divergence (H,) from a head, or "" if there is none."""
    others = []
    for other, value in enumerate(divergence.tolist()):
        if other != head:
            others.append((value, f"{other} ({value:.3f})"))
    if not others:
        return ""
    _, description = min(others)
    return description


def _tile_attention_maps(model: Thinker, tokens: Tensor, max_side: int = 64) -> Tensor:
    """Tile the attention maps of all heads, separated by nan.

    Cells of long texts show their largest weight.
    """

    def downsample(weights: Tensor) -> Tensor:
        side = math.ceil(weights.shape[-1] / max_side)  # of a cell
        maps = F.max_pool2d(weights.float(), side, ceil_mode=True)  # (1, H, S, S)
        # Relative to the largest weight, ignoring the first token, which often dominates.
        largest = maps[..., 1:].amax(dim=(2, 3), keepdim=True)
        return (maps / largest.clamp_min(1e-9)).clamp_max(1)

    maps = measure_heads(model, tokens, {"maps": downsample})["maps"]
    tiles = pad_sequence(maps, batch_first=True, padding_value=torch.nan)  # (layers, H, S, S)
    gap = 1 + tiles.shape[-1] // 16
    tiles = F.pad(tiles, (0, gap, 0, gap), value=torch.nan)
    # Rows of pixels run through all heads of a layer: (layers, S, H, S) -> (layers · S, H · S).
    image = tiles.transpose(1, 2).flatten(2).flatten(0, 1)
    return image[:-gap, :-gap]
