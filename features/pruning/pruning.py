"""Permanent removal of attention heads, neurons and layers."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from thinker.checkpoint import model_class
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError


@torch.no_grad()
def prune(model: Thinker, groups: Collection[tuple[int, int]]) -> Thinker:
    """Copy the model without these (layer, KV head) groups and their query heads.

    Equals the model with "blocks.i.attention.heads.h" set to zero. If layers keep different numbers
    of heads, the config has n_kv_heads_per_layer. Raises UserError for unknown groups, layers
    without heads, ALiBi, patterns by head, a norm over all heads.
    """
    old = model.config
    check_norms(old)
    remaining = _remaining_groups(model, groups)
    sizes = [len(kv_heads) for kv_heads in remaining]
    shared = old.n_heads // old.n_kv_heads
    values = old.to_dict() | {"n_kv_heads_per_layer": sizes}
    ThinkerConfig.from_dict(values)  # rejects settings that cannot differ by layer
    if len(set(sizes)) == 1:
        values["n_heads"] = sizes[0] * shared
        values["n_kv_heads"] = sizes[0]
        values["n_kv_heads_per_layer"] = None

    D = old.head_dim
    size_of = {  # rows or columns of a KV group
        "q_proj": shared * D,
        "k_proj": D,
        "v_proj": D,
        "sinks": shared,
        "o_proj": shared * D,
    }
    if old.qk_norm_type == "layernorm_per_head":  # other norms have one weight for all heads
        size_of |= {"q_norm": shared * D, "k_norm": D}
    weights = model.state_dict()
    for name, weight in weights.items():
        parts = name.split(".")  # such as blocks.0.attention.q_proj.weight
        if parts[0] != "blocks" or parts[2] != "attention" or parts[3] not in size_of:
            continue
        if parts[3:] == ["o_proj", "bias"]:  # is added once for all heads
            continue
        layer, matrix = int(parts[1]), parts[3]
        dim = 1 if matrix == "o_proj" else 0
        kept = torch.tensor(remaining[layer], device=weight.device)
        by_group = weight.unflatten(dim, (-1, size_of[matrix]))
        weights[name] = by_group.index_select(dim, kept).flatten(dim, dim + 1)
    return _copy(model, values, weights)


def check_norms(config: ThinkerConfig) -> None:
    """Raise UserError if a head cannot be removed without changing the others."""
    if config.qk_norm_type == "rmsnorm_width":
        raise UserError(
            "KV heads of this model cannot be removed: its norms of queries and keys read all "
            "heads at once (model.qk_norm_type=rmsnorm_width); remove neurons or layers"
        )


def _remaining_groups(model: Thinker, groups: Collection[tuple[int, int]]) -> list[list[int]]:
    """The KV heads that each layer keeps. Raises UserError if one has none left, or has not had one
    of `groups`."""
    existing = set()
    remaining = []
    for layer, block in enumerate(model.blocks):
        heads = range(block.attention.n_kv_heads)
        existing.update((layer, head) for head in heads)
        remaining.append([head for head in heads if (layer, head) not in groups])
        if not remaining[-1]:
            raise UserError(
                f"layer {layer} would have no heads left; keep at least one in every layer"
            )
    unknown = set(groups) - existing
    if unknown:
        layer, head = min(unknown)
        raise UserError(f"layer {layer} has no KV head {head}; use existing heads, counted from 0")
    return remaining


def check_count(model: Thinker, n: int) -> None:
    """Raise UserError unless n groups can be removed with at least one left per layer."""
    most = sum(block.attention.n_kv_heads - 1 for block in model.blocks)
    if not 1 <= n <= most:
        possible = f"use 1 to {most}" if most else "no layer has more than one"
        raise UserError(
            f"cannot remove {n} KV heads, since every layer keeps at least one; {possible}"
        )


def least_important(importance: Tensor, n: int) -> list[tuple[int, int]]:
    """Choose the n least important (layer, group), with at least one left per layer. See
    check_count().

    importance: (layers, KV heads), NaN where a layer has fewer.
    """
    chosen = []
    left = (~importance.isnan()).sum(dim=1).tolist()
    order = importance.nan_to_num(torch.inf).flatten().argsort(stable=True)
    for flat in order.tolist():
        layer, group = divmod(flat, importance.shape[1])
        if len(chosen) < n and left[layer] > 1:
            chosen.append((layer, group))
            left[layer] -= 1
    return chosen


@torch.no_grad()
def prune_neurons(model: Thinker, kept: Sequence[Tensor]) -> Thinker:
    """Copy the model with only these neurons of each layer's MLP, indices (n,), as many in every
    layer.

    Equals the model with all other entries of "blocks.i.mlp.hidden" set to zero.
    """
    (n,) = {len(indices) for indices in kept}
    weights = model.state_dict()
    for layer, indices in enumerate(kept):
        order = indices.sort().values.to(model.device)
        for name, dim in (
            ("gate_proj.weight", 0),
            ("gate_proj.bias", 0),
            ("up_proj.weight", 0),
            ("up_proj.bias", 0),
            ("down_proj.weight", 1),
        ):
            key = f"blocks.{layer}.mlp.{name}"
            if key in weights:  # an ungated MLP has no gate
                weights[key] = weights[key].index_select(dim, order)
    return _copy(model, model.config.to_dict() | {"d_ff": n}, weights)


@torch.no_grad()
def prune_layers(model: Thinker, removed: Collection[int]) -> Thinker:
    """Copy the model without these layers, counted from 0. Raises UserError if none is left, or
    layers differ."""
    config = model.config
    kept = [layer for layer in range(config.n_layers) if layer not in removed]
    if not kept:
        raise UserError(f"the model has {config.n_layers} layers; keep at least one")
    has_other_heads = config.n_kv_heads_per_layer is not None
    has_other_positions = config.no_rope_layers is not None
    are_alike = len(set(config.patterns)) == 1 and not config.value_embeddings
    if not are_alike or has_other_heads or has_other_positions:
        raise UserError(
            "the layers of this model differ (attention, KV heads, RoPE or value embeddings), so "
            "none can be removed"
        )
    weights = {}
    for name, weight in model.state_dict().items():
        parts = name.split(".")
        if parts[0] == "blocks":
            if int(parts[1]) in removed:
                continue
            parts[1] = str(kept.index(int(parts[1])))
        weights[".".join(parts)] = weight
    return _copy(model, config.to_dict() | {"n_layers": len(kept)}, weights)


def _copy(model: Thinker, values: dict[str, Any], weights: dict[str, Tensor]) -> Thinker:
    """A model of another shape with these weights, like `model` otherwise."""
    new = model_class(model)(ThinkerConfig.from_dict(values))
    new = new.to(model.device, model.embedding.weight.dtype).eval()
    new.activation_dtype = model.activation_dtype
    new.load_state_dict(weights)
    return new
