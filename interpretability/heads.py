"""Measures of attention heads: what a head looks at, in one number each, and what the model loses without it.

Weights are (..., T, T), rows are queries and positions count from 0; logarithms are natural. T is at least 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from thinker.evaluation.perplexity import estimate_ratio
from thinker.model import Thinker
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError


def entropy(weights: Tensor, normalised: bool = False) -> Tensor:
    """Mean over rows of −Σ_j A_ij ln A_ij, with 0 ln 0 = 0, in nats; (..., T, T) -> (...).

    A uniform row i has ln(i + 1). Normalised: mean over rows i ≥ 1 of the row's entropy / ln(i + 1), from 0 to 1.
    """
    rows = torch.special.entr(weights).sum(dim=-1)  # (..., T)
    if not normalised:
        return rows.mean(dim=-1)
    return (rows[..., 1:] / torch.arange(2, rows.shape[-1] + 1, device=rows.device).log()).mean(dim=-1)


def mean_distance(weights: Tensor) -> Tensor:
    """Mean over rows of Σ_j A_ij (i − j), in tokens; (..., T, T) -> (...). Uniform: (T − 1)/4.

    (Σ_j A_ij j would be the mean position, another thing.)
    """
    at = torch.arange(weights.shape[-1], device=weights.device)
    return (weights * (at[:, None] - at)).sum(dim=-1).mean(dim=-1)


def previous_token(weights: Tensor) -> Tensor:
    """Mean over i ≥ 1 of A[i, i − 1]; (..., T, T) -> (...)."""
    return weights.diagonal(-1, -2, -1).mean(dim=-1)


def first_token(weights: Tensor) -> Tensor:
    """The share on the first token: mean over i ≥ 1 of A[i, 0] (row 0 has no choice); (..., T, T) -> (...)."""
    return weights[..., 1:, 0].mean(dim=-1)


def repeated_random_tokens(ids: int | Tensor, n: int, batch: int = 8, seed: int = 0) -> Tensor:
    """Rows of n distinct random tokens, repeated once: (batch, 2n), for induction() and duplicate_token().

    ids: those to draw from, or how many there are, from 0. Raises UserError where there are fewer than n.
    """
    ids = torch.arange(ids) if isinstance(ids, int) else ids
    if len(ids) < n:
        raise UserError(f"{n} distinct tokens cannot be drawn of a vocabulary of {len(ids)}")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.stack([ids[torch.randperm(len(ids), generator=generator)[:n]] for _ in range(batch)])  # (B, n)
    return rows.repeat(1, 2)


def induction(weights: Tensor) -> Tensor:
    """On repeated_random_tokens(): mean over i = n..2n−1 of A[i, i − n + 1]; (..., 2n, 2n) -> (...).

    Olsson et al. 2022 (arXiv:2209.11895): the head attends to what followed the same token before; a perfect one has 1.
    """
    n = weights.shape[-1] // 2
    return weights.diagonal(1 - n, -2, -1)[..., 1:].mean(dim=-1)


def duplicate_token(weights: Tensor) -> Tensor:
    """On repeated_random_tokens(): mean over i = n..2n−1 of A[i, i − n]; (..., 2n, 2n) -> (...)."""
    return weights.diagonal(-(weights.shape[-1] // 2), -2, -1).mean(dim=-1)


def pairwise_js_divergence(weights: Tensor) -> Tensor:
    """How differently two heads look: mean over rows of their Jensen–Shannon divergence; (..., H, T, T) -> (..., H, H).

    JS(P, Q) = H((P + Q)/2) − (H(P) + H(Q))/2 in nats, 0 (alike) to ln 2 (Lin 1991, IEEE Trans. Inf. Theory 37:145).
    """
    H, own = weights.shape[-3], torch.special.entr(weights).sum(dim=-1)  # (..., H, T)
    found = weights.new_zeros(*weights.shape[:-3], H, H)
    for head in range(H):  # all pairs at once would take H times the memory
        both = torch.special.entr((weights + weights[..., head : head + 1, :, :]) / 2).sum(dim=-1)
        found[..., head, :] = (both - (own + own[..., head : head + 1, :]) / 2).mean(dim=-1)
    return found.clamp_min(0)


@dataclass(frozen=True)
class Importance:
    """Of each head (or group of heads): its value and the interval that covers it, (layers, H) each.

    Where a layer has fewer heads than others, nan takes the others' place.
    """

    value: Tensor
    low: Tensor
    high: Tensor


def losses(model: Thinker, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
    """The mean cross-entropy of each text, in nats a token: (N, T) -> (N,).

    targets: (N, T), IGNORE_INDEX where nothing is counted; unless given, each text's next tokens, the last having none.
    """
    return torch.cat([_losses(model, *some) for some in _batches(model, tokens, targets)])


def _losses(model: Thinker, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens).float()  # (B, T, V)
    nats = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORE_INDEX)  # (B, T)
    return nats.sum(dim=1) / (targets != IGNORE_INDEX).sum(dim=1).clamp_min(1)


def _batches(model: Thinker, tokens: Tensor, targets: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """So many texts at a time that their logits stay below 256 MiB."""
    if targets is None:
        tokens, targets = tokens[:, :-1], tokens[:, 1:]
    rows = max(1, 2**26 // (tokens.shape[1] * model.config.vocab_size))
    return list(zip(tokens.split(rows), targets.split(rows)))


def _without(group: range, instead: Tensor | float) -> Callable[[Tensor], Tensor]:
    """An edit of blocks.i.attention.heads, (B, H, T, D): these heads' outputs replaced."""

    def edit(z: Tensor) -> Tensor:
        z = z.clone()
        z[:, group.start : group.stop] = instead
        return z

    return edit


@torch.no_grad()
def importance_by_ablation(
    model: Thinker,
    tokens: Tensor,
    how: str = "zero",
    *,
    targets: Tensor | None = None,
    share: float = 0.95,
    by_group: bool = False,
    progress: bool = False,
) -> Importance:
    """What each head's absence costs: the mean over texts of CE(with the head's output replaced) − CE, in nats a token.

    Args:
        tokens: (N, T), at least two texts; targets as in losses().
        how: "zero", or "mean": its mean over all texts and positions given.
        share: of the confidence interval, over texts, each compared with itself.
        by_group: of all query heads of a key head together, (layers, K).
    """
    names = [f"blocks.{layer}.attention.heads" for layer in range(len(model.blocks))]
    sums, passes = dict.fromkeys(names, 0.0), _batches(model, tokens, targets)
    with model.record(*names) as seen:
        plain = []
        for some in passes:
            plain.append(_losses(model, *some))
            sums = {name: sums[name] + seen[name].sum(dim=(0, 2))[:, None] for name in names}  # (H, 1, D)
            seen.passes.clear()
    plain, n_tokens = torch.cat(plain), sum(some.numel() for some, _ in passes)
    groups = [_groups(block.attention, by_group) for block in model.blocks]
    bar = tqdm(total=sum(map(len, groups)), desc="leaving out heads", disable=not progress)
    costs = []
    for name, some in zip(names, groups):
        found = []
        for group in some:
            instead = 0.0 if how == "zero" else sums[name][group.start : group.stop] / n_tokens
            with model.patch({name: _without(group, instead)}):
                found.append(losses(model, tokens, targets) - plain)
            bar.update()
        costs.append(torch.stack(found))  # (H, N)
    bar.close()
    return _means(costs, share)


def _groups(attention: Any, by_group: bool) -> list[range]:
    size = attention.n_heads // attention.n_kv_heads if by_group else 1
    return [range(head, head + size) for head in range(0, attention.n_heads, size)]


def _means(values: list[Tensor], share: float) -> Importance:
    """Over texts, with their intervals: of each layer (H, N) -> (layers, H) each."""
    one = torch.ones(values[0].shape[-1])
    found = []
    for layer in values:
        rows = [vars(estimate_ratio(row, one, share)).values() for row in layer.cpu()]
        found.append(torch.tensor([[math.nan if x is None else x for x in row] for row in rows]))  # (H, 3)
    return Importance(*pad_sequence(found, batch_first=True, padding_value=math.nan).unbind(-1))


def importance_by_gradient(
    model: Thinker,
    tokens: Tensor,
    *,
    targets: Tensor | None = None,
    share: float = 0.95,
    by_group: bool = False,
) -> Importance:
    """E_x |Σ_t z · ∂L/∂z|, then each layer's vector scaled to L2 norm 1 (Michel et al. 2019, arXiv:1905.10650).

    z (T, D) is a head's output, L the mean loss of a text x; the absolute value is taken text by text. One backward
    pass for all heads. The interval is over texts, scaled with the value. Arguments as in importance_by_ablation().
    """
    free = {"embedding": lambda x: x.detach().requires_grad_()}  # whatever weights are frozen
    each: list[list[Tensor]] = [[] for _ in model.blocks]  # by layer: (H, B) each
    for some in _batches(model, tokens, targets):
        with torch.enable_grad(), model.patch(free), model.record("blocks.*.attention.heads") as seen:
            loss, heads = _losses(model, *some).sum(), list(seen.values())  # (B, H, T, D) each
            gradients = torch.autograd.grad(loss, heads)
        for found, block, z, g in zip(each, model.blocks, heads, gradients):
            groups = _groups(block.attention, by_group)
            found.append((z * g).detach().sum(dim=(2, 3)).unflatten(1, (len(groups), -1)).sum(dim=2).abs().T)
    found = _means([torch.cat(parts, dim=1) for parts in each], share)
    size = found.value.nan_to_num().norm(dim=1, keepdim=True).clamp_min(1e-30)
    return Importance(found.value / size, found.low / size, found.high / size)
