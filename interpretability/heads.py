"""Measures of attention heads and of their importance to the loss.

Weights are (..., T, T) with T >= 2, rows are queries, positions count from 0. Logarithms
are natural.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from thinker.evaluation.perplexity import estimate_ratio
from thinker.interpretability.attribution import require_grad_from_embedding
from thinker.model import Thinker
from thinker.model.inspection import attention_statistics
from thinker.model.inspection.attention_statistics import row_entropy
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.runtime.process.progress import Progress

# Measures of heads, too; the model has them, because monitoring needs them without this package.
entropy = attention_statistics.entropy
first_token = attention_statistics.first_token


def mean_distance(weights: Tensor) -> Tensor:
    """Mean over rows of Σ_j A_ij (i − j), in tokens; (..., T, T) -> (...). Uniform: (T − 1)/4."""
    position = torch.arange(weights.shape[-1], device=weights.device)
    return (weights * (position[:, None] - position)).sum(dim=-1).mean(dim=-1)


def previous_token(weights: Tensor) -> Tensor:
    """Mean over i ≥ 1 of A[i, i − 1]; (..., T, T) -> (...)."""
    return weights.diagonal(-1, -2, -1).mean(dim=-1)


def repeated_random_tokens(ids: int | Tensor, n: int, batch: int = 8, seed: int = 0) -> Tensor:
    """Repeat n distinct random tokens of `ids` (or a vocabulary size): (batch, 2n).

    Raises UserError if there are too few.
    """
    if isinstance(ids, int):
        ids = torch.arange(ids)
    if len(ids) < n:
        raise UserError(
            f"cannot sample {n} distinct tokens from {len(ids)}; use a larger vocabulary"
        )
    # Distinct tokens: each has a single earlier occurrence, so it is clear where to attend.
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(batch):
        order = torch.randperm(len(ids), generator=generator)
        rows.append(ids[order[:n]])
    return torch.stack(rows).repeat(1, 2)


def induction(weights: Tensor) -> Tensor:
    """On repeated_random_tokens(): mean over i = n..2n−1 of A[i, i − n + 1].

    (..., 2n, 2n) -> (...). Olsson et al. 2022 (arXiv:2209.11895): attends to the token after an
    earlier occurrence; 1 is perfect.
    """
    n = weights.shape[-1] // 2
    return weights.diagonal(1 - n, -2, -1)[..., 1:].mean(dim=-1)


def duplicate_token(weights: Tensor) -> Tensor:
    """On repeated_random_tokens(): mean over i = n..2n−1 of A[i, i − n]; (..., 2n, 2n) -> (...)."""
    return weights.diagonal(-(weights.shape[-1] // 2), -2, -1).mean(dim=-1)


def pairwise_js_divergence(weights: Tensor) -> Tensor:
    """Mean over rows of the JS divergence of two heads; (..., H, T, T) -> (..., H, H).

    JS(P, Q) = H((P + Q)/2) − (H(P) + H(Q))/2 in nats, 0 (equal) to ln 2 (Lin 1991, IEEE Trans. Inf.
    Theory 37:145).
    """
    n_heads = weights.shape[-3]
    entropies = row_entropy(weights)  # (..., H, T)
    divergence = weights.new_zeros(*weights.shape[:-3], n_heads, n_heads)
    for head in range(n_heads):  # all pairs at once would need H times the memory
        mixed = row_entropy((weights + weights[..., head : head + 1, :, :]) / 2)
        separate = (entropies + entropies[..., head : head + 1, :]) / 2
        divergence[..., head, :] = (mixed - separate).mean(dim=-1)
    return divergence.clamp_min(0)  # rounding errors


@dataclass(frozen=True)
class Importance:
    """Importance of each head (or group) with its 95% interval.

    (layers, H) each; nan for missing heads.
    """

    value: Tensor
    low: Tensor
    high: Tensor


def losses(model: Thinker, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of each text, in nats per token: (N, T) -> (N,).

    See importance_by_ablation().
    """
    parts = []
    for batch in _batches(model, tokens, targets):
        parts.append(_losses(model, *batch))
    return torch.cat(parts)


def _losses(model: Thinker, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens).float().transpose(1, 2)  # (B, V, T)
    nats = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE_INDEX)  # (B, T)
    n_targets = (targets != IGNORE_INDEX).sum(dim=1)
    return nats.sum(dim=1) / n_targets.clamp_min(1)


def _batches(model: Thinker, tokens: Tensor, targets: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Split tokens and targets into batches with at most 256 MiB of logits."""
    if targets is None:
        tokens, targets = tokens[:, :-1], tokens[:, 1:]
    # Of 4 bytes each.
    rows = max(1, 2**26 // (tokens.shape[1] * model.config.vocab_size))
    return list(zip(tokens.split(rows), targets.split(rows)))


@torch.no_grad()
def importance_by_ablation(
    model: Thinker,
    tokens: Tensor,
    ablation: str = "zero",
    targets: Tensor | None = None,
    by_group: bool = False,
) -> Importance:
    """Loss increase per ablated head: mean over texts of CE(ablated) − CE, in nats per token.

    tokens: (N, T), at least two texts; the interval is of their paired differences.
    ablation: replace the output with "zero" or "mean", its mean over all texts and positions.
    targets: (N, T), IGNORE_INDEX where no loss counts; by default the next tokens.
    by_group: ablate all query heads of a KV head together, (layers, K).
    """
    names = [f"blocks.{layer}.attention.heads" for layer in range(len(model.blocks))]
    baseline, means = _losses_and_means(model, names, _batches(model, tokens, targets))
    groups = [_groups(block.attention, by_group) for block in model.blocks]
    costs = []
    with Progress(total=sum(map(len, groups)), desc="ablating heads") as bar:
        for name, layer_groups in zip(names, groups):
            layer_costs = []
            for group in layer_groups:
                patches = {}
                for head in group:
                    patches[f"{name}.{head}"] = 0.0
                    if ablation != "zero":
                        patches[f"{name}.{head}"] = means[name][head]
                with model.patch(patches):
                    layer_costs.append(losses(model, tokens, targets) - baseline)
                bar.update()
            costs.append(torch.stack(layer_costs))  # (H, N)
    return _estimate(costs)


def _losses_and_means(
    model: Thinker, names: list[str], batches: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of all texts, (N,), and means of activations over texts and positions, (H, D)."""
    baseline = []
    n_tokens = 0
    sums = dict.fromkeys(names, 0.0)
    with model.record(*names) as cache:
        for batch in batches:
            baseline.append(_losses(model, *batch))
            n_tokens += batch[0].numel()
            for name in names:
                sums[name] = sums[name] + cache[name].sum(dim=(0, 2))
            cache.passes.clear()  # which would keep the activations of all batches
    means = {name: total / n_tokens for name, total in sums.items()}
    return torch.cat(baseline), means


def _groups(attention: Any, by_group: bool) -> list[range]:
    """List the query heads to ablate together: of each KV head, or single heads."""
    size = 1
    if by_group:
        size = attention.n_heads // attention.n_kv_heads
    return [range(head, head + size) for head in range(0, attention.n_heads, size)]


def _estimate(values: list[Tensor]) -> Importance:
    """Estimate means over texts with intervals: (H, N) per layer -> (layers, H) each."""
    ones = torch.ones(values[0].shape[-1])  # every text counts the same
    layers = []
    for layer in values:
        estimates = [_estimate_row(row, ones) for row in layer.cpu()]
        layers.append(torch.tensor(estimates))  # (H, 3)
    # Layers may have different numbers of heads after pruning.
    padded = pad_sequence(layers, batch_first=True, padding_value=math.nan)  # (layers, H, 3)
    return Importance(*padded.unbind(-1))


def _estimate_row(values: Tensor, sizes: Tensor) -> list[float]:
    """The mean of values (N,) and both ends of its 95% interval, nan where there is none."""
    estimate = estimate_ratio(values, sizes, 0.95)
    if estimate.low is None:  # a single text says nothing about the spread
        return [estimate.mean, math.nan, math.nan]
    return [estimate.mean, estimate.low, estimate.high]


def importance_by_gradient(
    model: Thinker, tokens: Tensor, targets: Tensor | None = None, by_group: bool = False
) -> Importance:
    """E_x |Σ_t z · ∂L/∂z|, then each layer's vector scaled to L2 norm 1.

    Michel et al. 2019, arXiv:1905.10650. z (T, D): output of a head; L: mean loss of text x.
    Intervals are scaled, too. See importance_by_ablation().
    """
    by_layer: list[list[Tensor]] = [[] for _ in model.blocks]  # (H, B) per batch
    patches = {"embedding": require_grad_from_embedding}
    names = "blocks.*.attention.heads"
    for batch in _batches(model, tokens, targets):
        with torch.enable_grad(), model.patch(patches), model.record(names) as cache:
            # The sum, as the loss of a text has no gradient with respect to another text.
            loss = _losses(model, *batch).sum()
            heads = list(cache.values())  # (B, H, T, D) each
            gradients = torch.autograd.grad(loss, heads)
        for values, block, z, g in zip(by_layer, model.blocks, heads, gradients):
            by_head = (z * g).detach().sum(dim=(2, 3))  # (B, H)
            n_groups = len(_groups(block.attention, by_group))
            by_group_of_heads = by_head.unflatten(1, (n_groups, -1)).sum(dim=2)
            values.append(by_group_of_heads.abs().T)
    estimate = _estimate([torch.cat(values, dim=1) for values in by_layer])
    norm = estimate.value.nan_to_num().norm(dim=1, keepdim=True).clamp_min(1e-30)
    return Importance(estimate.value / norm, estimate.low / norm, estimate.high / norm)
