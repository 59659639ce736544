"""Heads taken out for good: smaller matrices, and for each layer a number of heads of its own."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from thinker.interpretability.heads import Importance
from thinker.model import Thinker, ThinkerConfig
from thinker.runtime.errors import UserError


@torch.no_grad()
def prune(model: Thinker, groups: Collection[tuple[int, int]]) -> Thinker:
    """A model without these (layer, key head), each with all the query heads that share it.

    It computes what the given one does with "blocks.i.attention.heads.h" set to zero for each of them. Where all layers
    keep as many, it is an ordinary model of fewer heads; else its config says n_kv_heads_per_layer.

    Raises UserError where there is no such group, a layer would keep none, or heads differ by more than their weights
    (alibi, patterns by head).
    """
    old, keep = model.config, []
    for layer, block in enumerate(model.blocks):
        out = {group for at, group in groups if at == layer}
        keep.append([group for group in range(block.attention.n_kv_heads) if group not in out])
        if not keep[-1]:
            raise UserError(f"layer {layer} would have no head left; keep at least one in every layer")
    there = {(layer, k) for layer, block in enumerate(model.blocks) for k in range(block.attention.n_kv_heads)}
    if unknown := set(groups) - there:
        raise UserError(f"layer {min(unknown)[0]} has no key head {min(unknown)[1]}")
    sizes, shared = [len(some) for some in keep], old.n_heads // old.n_kv_heads
    values = old.to_dict() | {"n_kv_heads_per_layer": sizes}
    ThinkerConfig.from_dict(values)  # may say no
    if len(set(sizes)) == 1:
        values |= {"n_heads": sizes[0] * shared, "n_kv_heads": sizes[0], "n_kv_heads_per_layer": None}
    new = Thinker(ThinkerConfig.from_dict(values)).to(model.device, model.embedding.weight.dtype).eval()
    new.activation_dtype = model.activation_dtype
    weights = {}
    for name, weight in model.state_dict().items():
        parts = name.split(".")
        if parts[0] == "blocks" and parts[2] == "attention":
            weight = _part(parts[3], weight, keep[int(parts[1])], shared, old.head_dim)
        weights[name] = weight
    new.load_state_dict(weights)
    return new


def _part(name: str, weight: Tensor, groups: list[int], shared: int, D: int) -> Tensor:
    """What these key heads, and the query heads that share them, have of one of attention's weights."""
    heads = {"q_proj": shared * D, "k_proj": D, "v_proj": D, "sinks": shared, "o_proj": shared * D}
    if name not in heads:
        return weight  # a norm's, the same for all heads
    kept = torch.tensor(groups, device=weight.device)
    axis = 1 if name == "o_proj" else 0
    return weight.unflatten(axis, (-1, heads[name])).index_select(axis, kept).flatten(axis, axis + 1)


def check_count(model: Thinker, n: int) -> None:
    """Raise UserError where n groups cannot be taken out, at least one of each layer being kept."""
    most = sum(block.attention.n_kv_heads - 1 for block in model.blocks)
    if not 1 <= n <= most:
        raise UserError(f"{n} key heads cannot be taken out: 1 to {most} can, since every layer keeps one")


def least_important(importance: Importance, n: int) -> list[tuple[int, int]]:
    """The n (layer, group) of the smallest importance, at least one group of each layer being kept: see check_count."""
    value = importance.value
    left = (~value.isnan()).sum(dim=1).tolist()
    found: list[tuple[int, int]] = []
    for flat in value.nan_to_num(torch.inf).flatten().argsort(stable=True).tolist():
        layer, group = divmod(flat, value.shape[1])
        if len(found) < n and left[layer] > 1:
            found.append((layer, group))
            left[layer] -= 1
    return found
