"""TransformerLens's names of activations, and where these are in a Thinker.

In shapes, B is the batch size, T the number of tokens, H the number of heads, K that of KV heads, D
the width of a head and C the width of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinker.model import Thinker
from thinker.model.attention import Attention, LinearAttention
from thinker.model.inspection.activation_hooks import HookPoint
from thinker.model.layers import LayerNorm, RMSNorm

Function = Callable[[Tensor], Tensor | None]
# Cached only if asked for, because they are large or the same as others.
BY_NAME_ONLY = {"hook_result": "use_attn_result", "hook_mlp_in": "use_hook_mlp_in"}

ACTIVATION_ALIASES = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "key": "k",
    "query": "q",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_mid": "mid",
    "mlp_post": "post",
}
PART_ALIASES = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}
OF_ATTENTION = ("k", "v", "q", "z", "rot_k", "rot_q", "result", "pattern", "attn_scores")
OF_MLP = ("pre", "post", "mid", "pre_linear")


def get_act_name(name: str, layer: int | str | None = None, part: str | None = None) -> str:
    """The full name of an activation, by the rules of TransformerLens.

    ("pattern", 3) is blocks.3.attn.hook_pattern, ("scale", 4, "ln1") is blocks.4.ln1.hook_scale;
    "pattern3" and "scale4ln1" are short for them.
    """
    if layer is None and part is None and ("." in name or name.startswith("hook_")):
        return name
    short = re.match(r"([a-z]+)(\d+)([a-z]?.*)", name)
    if short is not None:
        name, layer, part = short.groups()
    name = ACTIVATION_ALIASES.get(name, name)
    if name in OF_ATTENTION:
        part = "attn"
    elif name in OF_MLP:
        part = "mlp"
    else:
        part = PART_ALIASES.get(part, part)
    parts = [f"hook_{name}"]
    if part:
        parts.insert(0, part)
    if layer is not None:
        parts.insert(0, f"blocks.{layer}")
    elif name in ("scale", "normalized"):
        parts.insert(0, "ln_final")
    return ".".join(parts)


@dataclass(frozen=True)
class LensPoint:
    """Where an activation of TransformerLens is in a Thinker, and its shape there.

    from_ours maps our tensor to their shape, as a view if that is possible; to_ours(value, x) maps
    a value of their shape to the shape of our tensor x.
    """

    point: HookPoint
    from_ours: Callable[[Tensor], Tensor] = lambda x: x
    to_ours: Callable[[Tensor, Tensor], Tensor] = lambda value, x: value


class _AfterAttention(HookPoint):
    """The residual stream between attention and MLP of a block, which is no module's output."""

    @contextmanager
    def open(self, function: Function) -> Iterator[None]:
        """Context in which the function sees it, and may return another."""
        inputs: list[Tensor] = []

        def keep(x: Tensor) -> None:
            inputs[:] = [x]

        def change_what_is_added(added: Tensor) -> Tensor | None:
            patched = function(inputs[0] + added)
            if patched is None:
                return None
            return patched - inputs[0]

        block = self.module
        with ExitStack() as stack:
            stack.enter_context(HookPoint(block, "input").open(keep))
            attention = HookPoint(added_by(block, "attention"), "output")
            stack.enter_context(attention.open(change_what_is_added))
            yield


class _HeadResults(HookPoint):
    """What each head of an Attention adds to its output, (B, T, H, C)."""

    @contextmanager
    def open(self, function: Function) -> Iterator[None]:
        """Context in which the function sees it, and may return another."""
        attention = self.module

        def change_output(o_proj: nn.Module, inputs: tuple[Tensor], y: Tensor) -> Tensor | None:
            z = inputs[0].unflatten(-1, (attention.n_heads, -1))  # (B, T, H, D)
            w = (
                o_proj.effective_weight().to(z.dtype).unflatten(1, (attention.n_heads, -1))
            )  # (C, H, D)
            patched = function(torch.einsum("bthd,chd->bthc", z, w))
            if patched is None:
                return None
            y = patched.sum(dim=2)
            if o_proj.bias is not None:
                y = y + o_proj.bias
            return y

        handle = attention.o_proj.register_forward_hook(change_output)
        try:
            yield
        finally:
            handle.remove()


class _Positions(HookPoint):
    """The learned positions of a Thinker for each text of the batch, (B, T, C)."""

    @contextmanager
    def open(self, function: Function) -> Iterator[None]:
        """Context in which the function sees them, and may return others."""
        batch_sizes: list[int] = []

        def keep_batch_size(embedded: Tensor) -> None:
            batch_sizes[:] = [len(embedded)]

        def repeat(x: Tensor) -> Tensor | None:
            if x.dim() == 2:  # (T, C): the same for all texts
                x = x.repeat(*batch_sizes, 1, 1)
            return function(x)

        model = self.module
        with ExitStack() as stack:
            stack.enter_context(HookPoint(model.embedding, "output").open(keep_batch_size))
            stack.enter_context(HookPoint(model.positions, "output").open(repeat))
            yield


def lens_points(model: Thinker) -> dict[str, LensPoint]:
    """All activations that a model has by their name in TransformerLens, in the order of the
    pass."""
    points = {"hook_embed": LensPoint(HookPoint(model.embedding, "output"))}
    if model.positions is not None:
        points["hook_pos_embed"] = LensPoint(_Positions(model, "output"))
    has_rope = model.config.positions == "rope"
    unrotated = model.config.no_rope_layers or []
    for layer, block in enumerate(model.blocks):
        for name, point in _block_points(block, has_rope and layer not in unrotated).items():
            points[f"blocks.{layer}.{name}"] = point
    points |= _norm_points("ln_final", model.norm)
    points["unembed.hook_in"] = LensPoint(HookPoint(model.lm_head, "input"))
    points["unembed.hook_out"] = LensPoint(HookPoint(model.lm_head, "output"))
    return points


def added_by(block: nn.Module, name: str) -> nn.Module:
    """The module whose output the "attention" or "mlp" of a block adds to the residual stream."""
    return getattr(block, name)


def _block_points(block: nn.Module, has_rope: bool) -> dict[str, LensPoint]:
    points = {"hook_resid_pre": LensPoint(HookPoint(block, "input"))}
    points |= _norm_points("ln1", block.attention_norm)
    points |= _attention_points(block.attention, has_rope)
    points["hook_attn_out"] = LensPoint(HookPoint(added_by(block, "attention"), "output"))
    points["hook_resid_mid"] = LensPoint(_AfterAttention(block, "output"))
    # A copy, because a hook may write into it, and the residual stream passes by the MLP.
    points["hook_mlp_in"] = LensPoint(HookPoint(block.mlp_norm, "input"), Tensor.clone)
    points |= _norm_points("ln2", block.mlp_norm)
    mlp = block.mlp
    if hasattr(mlp, "gate_proj"):
        points["mlp.hook_pre"] = LensPoint(HookPoint(mlp.gate_proj, "output"))
        points["mlp.hook_pre_linear"] = LensPoint(HookPoint(mlp.up_proj, "output"))
    elif hasattr(mlp, "up_proj"):
        points["mlp.hook_pre"] = LensPoint(HookPoint(mlp.up_proj, "output"))
    if hasattr(mlp, "down_proj"):  # an MLP of the user may have other parts
        points["mlp.hook_post"] = LensPoint(HookPoint(mlp.down_proj, "input"))
    points["hook_mlp_out"] = LensPoint(HookPoint(added_by(block, "mlp"), "output"))
    points["hook_resid_post"] = LensPoint(HookPoint(block, "output"))
    return points


def _attention_points(attention: Attention, has_rope: bool) -> dict[str, LensPoint]:
    points = {}
    for name in ("q", "k", "v"):
        projection = HookPoint(getattr(attention, f"{name}_proj"), "output")
        points[f"attn.hook_{name}"] = _split_heads(projection, attention.head_dim)
    for name in ("q_norm", "k_norm"):
        points |= _norm_points(f"attn.{name}", getattr(attention, name), is_flat=True)
    if has_rope:
        points["attn.hook_rot_q"] = _heads_last(HookPoint(attention, "attend", "q"))
        points["attn.hook_rot_k"] = _heads_last(HookPoint(attention, "attend", "k"))
    if not isinstance(attention, LinearAttention):
        points["attn.hook_attn_scores"] = LensPoint(HookPoint(attention, "attend", "scores"))
    points["attn.hook_pattern"] = LensPoint(HookPoint(attention, "attend", "weights"))
    points["attn.hook_z"] = _heads_last(HookPoint(attention, "attend", "heads"))
    points["attn.hook_result"] = LensPoint(_HeadResults(attention, "output"))
    return points


def is_plain_norm(norm: nn.Module) -> bool:
    """Whether a module is a norm whose scale is known."""
    return type(norm) is RMSNorm or isinstance(norm, LayerNorm)


def _norm_points(path: str, norm: nn.Module, is_flat: bool = False) -> dict[str, LensPoint]:
    """Scale and normalized input of a norm, before its weight. is_flat: (B · T · heads, ...)."""
    points = {}
    if not is_plain_norm(norm):
        return points
    for name in ("scale", "normalized"):
        point = HookPoint(norm, "norm", name)
        points[f"{path}.hook_{name}"] = LensPoint(point)
        if is_flat:
            points[f"{path}.hook_{name}"] = LensPoint(point, _flatten_rows, _reshape)
    return points


def _split_heads(point: HookPoint, head_dim: int) -> LensPoint:
    """(B, T, heads · D) here, (B, T, heads, D) there."""
    return LensPoint(point, lambda x: x.unflatten(-1, (-1, head_dim)), _reshape)


def _heads_last(point: HookPoint) -> LensPoint:
    """(B, heads, T, D) here, (B, T, heads, D) there."""
    return LensPoint(point, lambda x: x.transpose(1, 2), lambda value, x: value.transpose(1, 2))


def _flatten_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _reshape(value: Tensor, x: Tensor) -> Tensor:
    return value.reshape(x.shape)
