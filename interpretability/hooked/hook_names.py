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

from thinker.interop.families.layouts import channel_order
from thinker.model import Thinker
from thinker.model.attention import LinearAttention
from thinker.model.inspection.activation_hooks import HookPoint
from thinker.model.layers import AllHeadsNorm, LayerNorm, OnePlusRMSNorm, RMSNorm, Scale
from thinker.model.transformer import ParallelBlock

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
            added = HookPoint(block.after_attention, "output")
            stack.enter_context(added.open(change_what_is_added))
            yield


class _HeadResults(HookPoint):
    """What each head of a block adds to the residual stream, (B, T, H, C), or to the input of the
    norm that follows attention."""

    @contextmanager
    def open(self, function: Function) -> Iterator[None]:
        """Context in which the function sees it, and may return another."""
        attention = self.module.attention
        factor = factor_of(self.module.after_attention)

        def change_output(o_proj: nn.Module, inputs: tuple[Tensor], y: Tensor) -> Tensor | None:
            z = inputs[0].unflatten(-1, (attention.n_heads, -1))  # (B, T, H, D)
            w = o_proj.effective_weight().to(z.dtype)
            w = factor * w.unflatten(1, (attention.n_heads, -1))  # (C, H, D)
            results = torch.einsum("bthd,chd->bthc", z, w)
            patched = function(results)
            if patched is None:
                return None
            y = patched.sum(dim=2) / factor
            if o_proj.bias is not None:
                y = y + o_proj.bias
            return y.to(z.dtype)

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
    """All activations of a model by their names in TransformerLens, in the order of the pass."""
    points = {"hook_embed": LensPoint(HookPoint(model.embedding, "output"))}
    if model.positions is not None:
        points["hook_pos_embed"] = LensPoint(_Positions(model, "output"))
    order = their_channels(model)
    for layer, block in enumerate(model.blocks):
        has_rope = model.config.rope_of_layer(layer) != "none"
        for name, point in _block_points(block, has_rope, order).items():
            points[f"blocks.{layer}.{name}"] = point
    points |= _norm_points("ln_final", {"ln_final": model.norm})
    points["unembed.hook_in"] = LensPoint(HookPoint(model.lm_head, "input"))
    if model.logit_transform is None:  # otherwise the LM head also scales or caps the logits
        points["unembed.hook_out"] = LensPoint(HookPoint(model.lm_head, "output"))
    return points


def their_channels(model: Thinker) -> Tensor | None:
    """For each channel of a query or key in TransformerLens, which one of ours it is, (D,); None if
    the order is the same. It differs if RoPE rotates only some channels: there, the first ones."""
    order = channel_order(model.config, rotates_neighbors=False)
    if order is None:
        return None
    return order.argsort()


def norms_of(block: nn.Module) -> dict[str, nn.Module]:
    """The norms of a block by their names in TransformerLens, in the order in which they run."""
    is_post_norm = is_plain_norm(block.after_attention) and not is_plain_norm(block.attention_norm)
    if is_post_norm:
        return {"ln1": block.after_attention, "ln2": block.after_mlp}
    first = block.attention_norm
    if isinstance(block, ParallelBlock) and is_plain_norm(block.block_norm):
        first = block.block_norm
    norms = {"ln1": first, "ln1_post": block.after_attention, "ln2": block.mlp_norm}
    norms["ln2_post"] = block.after_mlp
    return {name: norm for name, norm in norms.items() if is_plain_norm(norm)}


def factor_of(module: nn.Module) -> float:
    """The factor on what a block adds to the residual stream."""
    if isinstance(module, Scale):
        return module.factor
    return 1.0


def _block_points(block: nn.Module, has_rope: bool, order: Tensor | None) -> dict[str, LensPoint]:
    is_parallel = isinstance(block, ParallelBlock)
    norms = norms_of(block)
    is_post_norm = norms.get("ln1") is block.after_attention
    after_attention, after_mlp = "ln1_post", "ln2_post"
    if is_post_norm:
        after_attention, after_mlp = "ln1", "ln2"
    points = {"hook_resid_pre": LensPoint(HookPoint(block, "input"))}
    if not is_post_norm:
        points |= _norm_points("ln1", norms)
    points |= _attention_points(block, has_rope, order)
    points |= _norm_points(after_attention, norms)
    points["hook_attn_out"] = LensPoint(HookPoint(block.after_attention, "output"))
    if not is_parallel:
        points["hook_resid_mid"] = LensPoint(_AfterAttention(block, "output"))
    if not is_parallel or not is_plain_norm(block.block_norm):
        # A copy, because a hook may write into it, and the residual stream bypasses the MLP.
        points["hook_mlp_in"] = LensPoint(HookPoint(block.mlp_norm, "input"), Tensor.clone)
    if not is_post_norm:
        points |= _norm_points("ln2", norms)
    mlp = block.mlp
    if hasattr(mlp, "gate_proj"):
        points["mlp.hook_pre"] = LensPoint(HookPoint(mlp.gate_proj, "output"))
        points["mlp.hook_pre_linear"] = LensPoint(HookPoint(mlp.up_proj, "output"))
    elif hasattr(mlp, "up_proj"):
        points["mlp.hook_pre"] = LensPoint(HookPoint(mlp.up_proj, "output"))
    if hasattr(mlp, "down_proj"):  # an MLP of the user may have other parts
        points["mlp.hook_post"] = LensPoint(HookPoint(mlp.down_proj, "input"))
    points |= _norm_points(after_mlp, norms)
    points["hook_mlp_out"] = LensPoint(HookPoint(block.after_mlp, "output"))
    points["hook_resid_post"] = LensPoint(HookPoint(block, "output"))
    return points


def _attention_points(
    block: nn.Module, has_rope: bool, order: Tensor | None
) -> dict[str, LensPoint]:
    attention = block.attention
    points = {}
    for name in ("q", "k", "v"):
        projection = HookPoint(getattr(attention, f"{name}_proj"), "output")
        points[f"attn.hook_{name}"] = _split_heads(projection, attention.head_dim)
        if name != "v":
            points[f"attn.hook_{name}"] = _reorder(points[f"attn.hook_{name}"], order)
    for name in ("attn.q_norm", "attn.k_norm"):
        norm = getattr(attention, name.removeprefix("attn."))
        points |= _norm_points(name, {name: norm})
    if has_rope:
        for name in ("q", "k"):
            rotated = _heads_last(HookPoint(attention, "attend", name))
            points[f"attn.hook_rot_{name}"] = _reorder(rotated, order)
    if not isinstance(attention, LinearAttention):
        points["attn.hook_attn_scores"] = LensPoint(HookPoint(attention, "attend", "scores"))
    points["attn.hook_pattern"] = LensPoint(HookPoint(attention, "attend", "weights"))
    points["attn.hook_z"] = _heads_last(HookPoint(attention, "attend", "heads"))
    points["attn.hook_result"] = LensPoint(_HeadResults(block, "output"))
    return points


def is_plain_norm(norm: nn.Module) -> bool:
    """Whether a module is a norm whose scale is known."""
    kinds = (RMSNorm, OnePlusRMSNorm, AllHeadsNorm)
    return type(norm) in kinds or isinstance(norm, LayerNorm)


def _norm_points(path: str, norms: dict[str, nn.Module]) -> dict[str, LensPoint]:
    """The scale of a norm, if there is one of this name, and its output before the weight.

    In TransformerLens, those of norms of single heads are (B · T · heads, ...).
    """
    points = {}
    norm = norms.get(path)
    if not is_plain_norm(norm):
        return points
    is_of_heads = path.startswith("attn.") and not isinstance(norm, AllHeadsNorm)
    for name in ("scale", "normalized"):
        point = HookPoint(norm, "norm", name)
        points[f"{path}.hook_{name}"] = LensPoint(point)
        if is_of_heads:
            points[f"{path}.hook_{name}"] = LensPoint(point, _flatten_rows, _reshape)
    return points


def _split_heads(point: HookPoint, head_dim: int) -> LensPoint:
    """(B, T, heads · D) here, (B, T, heads, D) there."""
    return LensPoint(point, lambda x: x.unflatten(-1, (-1, head_dim)), _reshape)


def _heads_last(point: HookPoint) -> LensPoint:
    """(B, heads, T, D) here, (B, T, heads, D) there."""
    return LensPoint(point, lambda x: x.transpose(1, 2), lambda value, x: value.transpose(1, 2))


def _reorder(place: LensPoint, order: Tensor | None) -> LensPoint:
    """With the channels in another order there; see their_channels()."""
    if order is None:
        return place
    back = order.argsort()
    return LensPoint(
        place.point,
        lambda x: place.from_ours(x)[..., order],
        lambda value, x: place.to_ours(value[..., back], x),
    )


def _flatten_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _reshape(value: Tensor, x: Tensor) -> Tensor:
    return value.reshape(x.shape)
