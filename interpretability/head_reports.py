"""Scores of all heads on a prompt or random tokens."""

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
    "entropy": "entropy (nats)", "normalised": "normalized entropy", "distance": "mean distance (tokens)",
    "previous": "weight of the previous token", "first": "weight of the first token",
    "duplicate": "duplicate-token score", "induction": "induction score", "periodic": "strength of a period",
}  # fmt: skip
UNBOUNDED = ("entropy", "distance")  # other measures are between 0 and 1


@torch.no_grad()
def measure_heads(
    model: Thinker, tokens: Tensor, measures: dict[str, Callable]
) -> dict[str, list[Tensor]]:
    """Apply each measure to the attention weights (B, H, T, T): tokens (B, T) -> means (H, ...) per layer."""
    results: dict[str, list[Tensor]] = {name: [] for name in measures}

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
    """repeated_random_tokens() of `ids` (default: the vocabulary), (batch, 2n); shorter for a short context."""
    ids = torch.arange(model.config.vocab_size) if ids is None else ids
    n = min(n, len(ids), model.config.max_seq_len // 2)
    return heads.repeated_random_tokens(ids, n, batch).to(model.device)


def score_heads(model: Thinker, tokens: Tensor, random: Tensor) -> dict[str, Tensor]:
    """Compute all measures, (layers, H) each: MEASURES_ON_REPEATS on `random`, the others on `tokens`."""
    scores = measure_heads(model, tokens, MEASURES) | measure_heads(
        model, random, MEASURES_ON_REPEATS
    )
    return {
        name: pad_sequence(x, batch_first=True, padding_value=torch.nan)
        for name, x in scores.items()
    }


def describe_random(random: Tensor, origin: str) -> str:
    """Describe the tokens of the induction scores."""
    return f"{random.shape[1] // 2} random tokens from {origin}, repeated once"


@torch.no_grad()
def report_heads(model: Thinker, prompt: Prompt | None, random: Tensor, origin: str) -> Report:
    """Report all measures of every head on the prompt, or else on `random`, tokens from `origin`."""
    tokens = random if prompt is None else prompt.tokens[None]
    scores = score_heads(model, tokens, random)
    divergence = measure_heads(model, tokens, {"js": heads.pairwise_js_divergence})[
        "js"
    ]  # (H, H) per layer
    rows = []
    for layer, head in existing_heads(scores["entropy"]):
        js = divergence[layer][head].tolist()  # (H,)
        others = [(x, f"{other} ({x:.3f})") for other, x in enumerate(js) if other != head]
        values = (f"{x[layer, head]:.3f}" for x in scores.values())
        rows.append([str(layer), str(head), *values, min(others, default=(0, ""))[1]])
    labels = head_labels(scores["entropy"])
    panels = [Panel("attention of every head", _tile_attention_maps(model, tokens[:1]), *labels)]
    panels += [
        Panel(TITLES[name], x, *labels, vmax=None if name in UNBOUNDED else 1.0)
        for name, x in scores.items()
    ]
    repeats = describe_random(random, origin)
    header = {
        "measured on": repeats
        if prompt is None
        else f"the prompt; duplicate, induction, periodic on {repeats}"
    }
    header["most similar"] = "most similar head in the layer (Jensen–Shannon divergence in nats)"
    data = {name: to_json(x) for name, x in scores.items()} | {
        "js_divergence": [x.tolist() for x in divergence]
    }
    n = random.shape[1] // 2
    uniform = sum(1 / (i + 1) for i in range(n, 2 * n)) / n
    footer = f"uniform attention has duplicate and induction scores of {uniform:.3f}"
    return Report(
        header,
        ["layer", "head", *scores, "most similar"],
        rows,
        data,
        panels,
        footer,
        panels_per_row=2,
    )


def _tile_attention_maps(model: Thinker, tokens: Tensor, max_side: int = 64) -> Tensor:
    """Tile the attention maps of all heads, separated by nan. Cells of long texts show their largest weight."""

    def downsample(weights: Tensor) -> Tensor:
        maps = F.max_pool2d(
            weights.float(), -(-weights.shape[-1] // max_side), ceil_mode=True
        )  # (1, H, S, S)
        # Relative to the largest weight, ignoring the first token, which often dominates.
        return (maps / maps[..., 1:].amax(dim=(2, 3), keepdim=True).clamp_min(1e-9)).clamp_max(1)

    maps = measure_heads(model, tokens, {"maps": downsample})["maps"]
    tiles = pad_sequence(maps, batch_first=True, padding_value=torch.nan)  # (layers, H, S, S)
    gap = 1 + tiles.shape[-1] // 16
    tiles = F.pad(tiles, (0, gap, 0, gap), value=torch.nan)
    return tiles.transpose(1, 2).flatten(2).flatten(0, 1)[:-gap, :-gap]
