"""The activations of a pass by their names in TransformerLens, and sums of the residual stream."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinker.interpretability.hooked.hook_names import get_act_name
from thinker.interpretability.hooked.hooked_config import HookedConfig
from thinker.interpretability.hooked.lens_weights import BlockWeights
from thinker.runtime.errors import UserError, did_you_mean

Key = str | tuple
# An index, (start, end), a list of indices, or None for all.
Positions = int | tuple | list | slice | Tensor | None
Stack = Tensor | tuple[Tensor, list[str]]


class CachedModel(Protocol):
    """What a cache needs of its model."""

    cfg: HookedConfig
    hook_dict: dict[str, Any]

    @property
    def blocks(self) -> list[BlockWeights]:
        """The weights by layer."""

    @property
    def ln_final(self) -> nn.Module:
        """The norm before the logits."""

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """The vectors whose products with a residual are the logits of tokens."""


def select(x: Tensor, positions: Positions, dim: int = -2) -> Tensor:
    """Some positions of a tensor. An index removes the dimension."""
    if positions is None:
        return x
    if isinstance(positions, tuple):
        positions = slice(*positions)
    index = [slice(None)] * x.dim()
    index[dim] = positions
    return x[tuple(index)]


class HookedCache:
    """Activations by name: cache["blocks.3.attn.hook_pattern"] or cache["pattern", 3].

    A layer of -1 is the last one. In the methods, layer=None and layer=-1 mean all layers up to the
    logits. Components of the residual stream are stacked in the first dimension: (components, B, T,
    C), without B after remove_batch_dim() and without T if pos_slice is an index.
    """

    def __init__(
        self, cache_dict: dict[str, Tensor], model: CachedModel, has_batch_dim: bool = True
    ) -> None:
        self.cache_dict = cache_dict
        self.model = model
        self.has_batch_dim = has_batch_dim

    def _full_name(self, key: Key) -> str:
        if isinstance(key, str):
            return get_act_name(key)
        name, layer, *part = key
        if layer is not None and layer < 0:
            layer += self.model.cfg.n_layers
        return get_act_name(name, layer, *part)

    def __getitem__(self, key: Key) -> Tensor:
        name = self._full_name(key)
        if name in self.cache_dict:
            return self.cache_dict[name]
        if name in self.model.hook_dict:
            raise UserError(f"{name} was not cached; include it in names_filter")
        raise UserError(f"the cache has no {name}{did_you_mean(name, self.cache_dict)}")

    def __contains__(self, key: Key) -> bool:
        return self._full_name(key) in self.cache_dict

    def __len__(self) -> int:
        return len(self.cache_dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def __repr__(self) -> str:
        return f"HookedCache with keys {list(self.cache_dict)}"

    def keys(self) -> KeysView[str]:
        """The full names."""
        return self.cache_dict.keys()

    def values(self) -> ValuesView[Tensor]:
        """The activations."""
        return self.cache_dict.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Pairs of full name and activation."""
        return self.cache_dict.items()

    def to(self, device: torch.device | str) -> HookedCache:
        """Move the activations to a device."""
        self.cache_dict = {name: value.to(device) for name, value in self.cache_dict.items()}
        return self

    def remove_batch_dim(self) -> HookedCache:
        """Remove the batch dimension of a cache of one text."""
        if self.has_batch_dim:
            self.cache_dict = without_batch(self.cache_dict)
            self.has_batch_dim = False
        return self

    def _end(self, layer: int | None) -> int:
        """The number of layers before `layer`."""
        n_layers = self.model.cfg.n_layers
        if layer is None or layer == -1:
            return n_layers
        if not 0 <= layer <= n_layers:
            raise UserError(f"layer is {layer}; use 0 to {n_layers}, or -1 for all layers")
        return layer

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Positions = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Stack:
        """The residual stream before each layer up to `layer`, as for a logit lens.

        incl_mid: also between attention and MLP. mlp_input: also there in `layer` itself. apply_ln:
        apply the norm of `layer` with the scale that it had in the pass; if `layer` is the end, the
        last norm, with the scale of each.
        """
        end = self._end(layer)
        parts, labels = [], []
        for number in range(end + 1):
            if number == self.model.cfg.n_layers:
                parts.append(self["resid_post", number - 1])
                labels.append("final_post")
                break
            parts.append(self["resid_pre", number])
            labels.append(f"{number}_pre")
            if (incl_mid and number < end) or (mlp_input and number == end):
                parts.append(self["resid_mid", number])
                labels.append(f"{number}_mid")
        stack = torch.stack([select(part, pos_slice) for part in parts])
        if apply_ln and end == self.model.cfg.n_layers:
            stack = self.model.ln_final(stack)
        elif apply_ln:
            stack = self.apply_ln_to_stack(stack, end, mlp_input, pos_slice)
        return _labeled(stack, labels, return_labels)

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: Positions = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Stack:
        """What embedding, attention and MLPs add to the residual stream before `layer`; with mode
        "all" they sum to it, unless the embedding has other parts than tokens and positions.

        mode: "all", "attn" or "mlp". mlp_input: also the attention of `layer` itself.
        """
        if mode not in ("all", "attn", "mlp"):
            raise UserError(f"mode is {mode!r}; use all, attn or mlp")
        end = self._end(layer)
        keys, labels = [], []
        if incl_embeds:
            keys = [name for name in ("hook_embed", "hook_pos_embed") if name in self.cache_dict]
            labels = [name.removeprefix("hook_") for name in keys]
        kinds = [kind for kind in ("attn", "mlp") if mode in ("all", kind)]
        for number in range(end):
            for kind in kinds:
                keys.append((f"{kind}_out", number))
                labels.append(f"{number}_{kind}_out")
        if mlp_input and mode != "mlp":
            keys.append(("attn_out", end))
            labels.append(f"{end}_attn_out")
        stack = torch.stack([select(self[key], pos_slice) for key in keys])
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, end, mlp_input, pos_slice)
        return _labeled(stack, labels, return_labels)

    def compute_head_results(self) -> None:
        """Cache what each head adds to the residual stream, if it is not cached yet."""
        for layer, block in enumerate(self.model.blocks):
            name = get_act_name("result", layer)
            if name not in self.cache_dict:
                z = self["z", layer]  # (..., H, D)
                w = block.attn.W_O.to(z)  # (H, D, C)
                self.cache_dict[name] = torch.einsum("...hd,hdc->...hc", z, w)

    def stack_head_results(
        self,
        layer: int | None = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Positions = None,
        apply_ln: bool = False,
    ) -> Stack:
        """What each head before `layer` adds to the residual stream, layer by layer.

        incl_remainder: at the end, the rest of the residual stream.
        """
        end = self._end(layer)
        if end == 0:
            raise UserError("there are no heads before layer 0; use a layer from 1")
        self.compute_head_results()
        parts, labels = [], []
        for number in range(end):
            results = select(self["result", number], pos_slice, dim=-3)  # (..., H, C)
            parts.append(results.movedim(-2, 0))
            labels += [f"L{number}H{head}" for head in range(results.shape[-2])]
        stack = torch.cat(parts)
        if incl_remainder:
            whole = select(self["resid_post", end - 1], pos_slice)
            stack = torch.cat([stack, (whole - stack.sum(dim=0))[None]])
            labels.append("remainder")
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, end, pos_slice=pos_slice)
        return _labeled(stack, labels, return_labels)

    def stack_activation(
        self, activation_name: str, layer: int | None = -1, sublayer_type: str | None = None
    ) -> Tensor:
        """An activation of each layer before `layer`, (layers, ...)."""
        layers = range(self._end(layer))
        return torch.stack([self[activation_name, number, sublayer_type] for number in layers])

    def apply_ln_to_stack(
        self,
        residual_stack: Tensor,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Positions = None,
    ) -> Tensor:
        """Divide components of the residual stream by the scale that the norm of `layer` had in
        this pass; for LayerNorm, subtract the mean of each first. The weight of the norm is not
        applied: fold it into the matrices (fold_ln).

        pos_slice: the positions that the stack has been reduced to.
        """
        end = self._end(layer)
        if self.model.cfg.normalization_type.startswith("LN"):
            residual_stack = residual_stack - residual_stack.mean(dim=-1, keepdim=True)
        name = "ln_final.hook_scale"
        if end < self.model.cfg.n_layers:
            norm = "ln2" if mlp_input else "ln1"
            name = f"blocks.{end}.{norm}.hook_scale"
        return residual_stack / select(self[name], pos_slice)

    def logit_attrs(
        self,
        residual_stack: Tensor,
        tokens: str | int | Tensor,
        incorrect_tokens: str | int | Tensor | None = None,
        pos_slice: Positions = None,
    ) -> Tensor:
        """What each component of a stack adds to the logits of tokens, or to the difference from
        the logits of incorrect_tokens, (components, B, T).

        Tokens: one for all, or (B,) or (B, T). With fold_ln, all components of the residual stream
        sum to the logits without b_U, before a soft cap.
        """
        directions = self.model.tokens_to_residual_directions(tokens)
        if incorrect_tokens is not None:
            others = self.model.tokens_to_residual_directions(incorrect_tokens)
            if others.shape != directions.shape:
                raise UserError("tokens and incorrect_tokens must have the same shape")
            directions = directions - others
        scaled = self.apply_ln_to_stack(residual_stack, pos_slice=pos_slice)
        if directions.dim() == 2 and scaled.dim() == 4 and len(directions) == scaled.shape[1]:
            directions = directions[:, None]  # (B, 1, C): the same token at all positions
        return (scaled * directions).sum(dim=-1)


def without_batch(cache: dict[str, Tensor]) -> dict[str, Tensor]:
    """The activations of one text without the batch dimension."""
    if any(len(value) != 1 for name, value in cache.items() if "_norm.hook_" not in name):
        raise UserError("remove_batch_dim works only for one text")
    removed = {}
    for name, value in cache.items():
        removed[name] = value
        if len(value) == 1:  # norms of heads have no batch dimension
            removed[name] = value[0]
    return removed


def _labeled(stack: Tensor, labels: list[str], return_labels: bool) -> Stack:
    if return_labels:
        return stack, labels
    return stack
