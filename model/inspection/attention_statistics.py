"""Figures of attention per layer and query: entropy, largest logit, and share of the first
token."""

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinker.model.attention import Attention, LinearAttention
from thinker.model.attention_dispatch import AttentionMask
from thinker.model.kv_cache import KVCache
from thinker.model.transformer import Thinker

FIGURES = ("attention_entropy", "max_logit", "first_token_share")


def row_entropy(weights: Tensor) -> Tensor:
    """−Σ_j A_ij ln A_ij of each row, with 0 ln 0 = 0, in nats; (..., S) -> (...)."""
    return torch.special.entr(weights).sum(dim=-1)


def entropy(weights: Tensor, normalised: bool = False) -> Tensor:
    """Mean of row_entropy(); (..., T, T) -> (...). A uniform row i has ln(i + 1).

    Normalized: mean over rows i ≥ 1 of entropy / ln(n), from 0 to 1, where n is i + 1 or, in a
    bidirectional prefix, the number of positions that the row attends to.
    """
    rows = row_entropy(weights)  # (..., T)
    if not normalised:
        return rows.mean(dim=-1)
    n_visible = (weights > 0).sum(dim=-1)  # (..., T)
    n = n_visible.maximum(torch.arange(1, rows.shape[-1] + 1, device=rows.device))  # (..., T)
    return (rows / n.log())[..., 1:].mean(dim=-1)


def first_token(weights: Tensor) -> Tensor:
    """Mean over i ≥ 1 of A[i, 0], the weight of the first token; (..., T, T) -> (...)."""
    return weights[..., 1:, 0].mean(dim=-1)


def has_logits(attention: Attention) -> bool:
    """Whether a layer has attention logits. Linear attention has none, so it has no figures."""
    return not isinstance(attention, LinearAttention)


@torch.no_grad()
def measure_attention(
    model: Thinker,
    tokens: Tensor,
    document_ids: Tensor | None = None,
    cache: KVCache | None = None,
    last_logits_only: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run a pass, and measure each layer and query.

    attention_entropy: mean over the heads, in nats. max_logit: the largest scaled q·k over the
    heads and the keys with weight, before the soft cap and ALiBi. first_token_share: mean over the
    heads of the weight on the first token of the query's document; 0 if the pattern or the cache
    leaves it out.

    Args:
        model: without compilation and sharding; in evaluation mode if the figures should not depend
            on dropout.
        tokens: (B, T); with a cache, T = 1.
        cache: the position is added to it, as in the forward pass.

    Returns: figures (layers, 3, B, T) in fp32, in the order of FIGURES, NaN for layers of linear
    attention; and the
        logits, (B, T or 1, V).
    """
    B, T = tokens.shape
    end = T
    if cache is not None:
        # A hook updates the cache twice, which changes nothing for one position.
        assert T == 1
        end = max(cache.lengths) + 1
    first_keys = torch.zeros(B, T, dtype=torch.int64, device=tokens.device)
    if document_ids is not None:
        starts = document_ids[:, 1:] != document_ids[:, :-1]  # (B, T - 1)
        first_keys[:, 1:] = (starts * torch.arange(1, T, device=tokens.device)).cummax(dim=1).values
    figures = torch.full((len(model.blocks), len(FIGURES), B, T), torch.nan, device=tokens.device)
    thread = threading.get_ident()

    def measure(layer: int, attention: Attention, inputs: tuple[Any, ...]) -> None:
        if threading.get_ident() != thread:
            return  # another pass of the same model
        x, rope, mask, layer_cache, slots, token_values = inputs
        q, k, v = attention.query_key_value(x, rope, token_values)
        if slots is not None:
            q, k, _ = layer_cache.update(q, k, v, slots)
        figures[layer] = _figures(attention, q, k, mask, first_keys)
        if slots is not None and layer_cache.size < end and layer_cache.n_global == 0:
            figures[layer, FIGURES.index("first_token_share")] = 0  # another key has taken its slot

    hooks = []
    for layer, block in enumerate(model.blocks):
        if has_logits(block.attention):
            hook = block.attention.register_forward_pre_hook(partial(measure, layer))
            hooks.append(hook)
    try:
        logits = model(
            tokens, document_ids=document_ids, cache=cache, last_logits_only=last_logits_only
        )
    finally:
        for hook in hooks:
            hook.remove()
    return figures, logits


def _figures(
    attention: Attention, q: Tensor, k: Tensor, mask: AttentionMask, first_keys: Tensor
) -> Tensor:
    """q (B, H, T, D), k (B, K, S, D), first_keys (B, T) -> (3, B, T), in chunks of queries to bound
    the memory."""
    H, K = q.shape[1], k.shape[1]
    parts = []
    for rows, weights in attention.weight_chunks(q, k, mask):  # (B, H, R, S)
        grouped = q[:, :, rows].float().unflatten(1, (K, H // K))  # (B, K, H/K, R, D)
        products = grouped @ k.float()[:, :, None].mT  # (B, K, H/K, R, S)
        logits = products.flatten(1, 2) * attention.scale  # (B, H, R, S)
        largest = logits.masked_fill(weights == 0, -torch.inf).amax(dim=(1, 3))  # (B, R)
        first = first_keys[:, None, rows, None].expand(-1, H, -1, -1)  # (B, H, R, 1)
        share = weights.gather(3, first)[..., 0].mean(dim=1)  # (B, R)
        parts.append(torch.stack((row_entropy(weights).mean(dim=1), largest, share)))
    return torch.cat(parts, dim=-1)


def figure_names(n_layers: int) -> list[str]:
    """Names of the figures of measure_text(), in order: "blocks.0.attention_entropy", ...,
    "token_entropy"."""
    names = []
    for layer in range(n_layers):
        names += [f"blocks.{layer}.{name}" for name in FIGURES]
    return [*names, "token_entropy"]


def measure_text(
    model: Thinker, tokens: Tensor, vocab_size: int, cache: KVCache | None = None
) -> Tensor:
    """Measure each position of one text, (1, T), as measure_attention() does: figures (N, T) by
    figure_names().

    token_entropy: of the distribution of the next token over the first `vocab_size` ids, in nats,
    before temperature and filters.
    """
    figures, logits = measure_attention(model, tokens, cache=cache)
    next_tokens = logits[0, :, :vocab_size].float().softmax(dim=-1)  # (T, V)
    return torch.cat((figures[:, :, 0].flatten(0, 1), row_entropy(next_tokens)[None]))
