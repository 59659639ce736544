"""Record and patch activations by name.

The forward pass knows nothing of this. While a record() or patch() is open, hooks of torch see the
inputs and outputs of modules, and the methods that compute the other activations are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinker.model.attention import AnyCache, LinearAttention
from thinker.model.attention_dispatch import AttentionMask, repeat_heads, softmax_with_sinks
from thinker.model.inspection.implied_attention import is_sum_by_weights, weights_of_attend
from thinker.model.inspection.open_hooks import counted_as_open
from thinker.model.kernels.linear_attention import LinearState
from thinker.model.layers import AllHeadsNorm, LayerNorm, OnePlusRMSNorm
from thinker.model.masks import ForwardContext
from thinker.runtime.checks import check_types, describe
from thinker.runtime.errors import UserError, did_you_mean

Patch = Literal["zero", "mean"] | float | Tensor | Callable[[Tensor], Tensor]


class ActivationCache(dict[str, Tensor]):
    """Each activation of the last pass by name. `passes[name]` lists it for every pass, such as
    each decoding step."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: dict[str, list[Tensor]] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Record the activation of another pass."""
        self[name] = value
        self.passes.setdefault(name, []).append(value)


class _Hook:
    """Passes an activation to a function, which may return another. Cannot be copied with the
    model."""

    def __init__(self, function: Callable[[Tensor], Tensor | None]) -> None:
        self.function = function

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        raise UserError(
            "cannot copy a model while its activations are recorded or patched; close the "
            "hooks first"
        )


class _OutputHook(_Hook):
    """A forward hook of torch: sees the output of a module."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return self.function(output)


class _InputHook(_Hook):
    """A forward pre-hook of torch: sees the first input of a module."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        patched = self.function(inputs[0])
        if patched is None:
            return None
        return patched, *inputs[1:]


class _HookedMethod(dict[str, list[_Hook]]):
    """Stands in for a method of one module while some of its tensors are recorded or patched.

    Has the open hooks by their point within the method, in the order in which they were opened.
    """

    method = ""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.plain = getattr(module, self.method)
        self.is_of_class = self.method not in vars(module)  # and not put there by a user

    @classmethod
    @contextmanager
    def open(cls, module: nn.Module, point: str, hook: _Hook) -> Iterator[None]:
        """Context in which the hook is open. The first hook replaces the method, and the last one
        restores it."""
        hooked = vars(module).get(cls.method)
        if not isinstance(hooked, cls):
            hooked = vars(module)[cls.method] = cls(module)
        hooked.setdefault(point, []).append(hook)
        try:
            yield
        finally:
            hooked[point].remove(hook)
            if not hooked[point]:
                del hooked[point]
            if not hooked and hooked.is_of_class:
                del vars(module)[cls.method]
            elif not hooked:
                vars(module)[cls.method] = hooked.plain

    def apply(self, point: str, x: Tensor) -> Tensor:
        """Pass x through all hooks of a point. Returns x itself if nothing patches it, a view if a
        patch returns x."""
        for hook in self.get(point, ()):
            patched = hook.function(x)
            if patched is None:
                continue
            if patched is x:
                patched = x.view_as(x)  # another object, which says that x was patched
            x = patched
        return x


class _HookedEmbed(_HookedMethod):
    """Thinker.embed() with hooks on its result."""

    method = "embed"

    def __call__(self, inputs: Tensor, context: ForwardContext) -> Tensor:
        return self.apply("result", self.plain(inputs, context))


class _HookedAttend(_HookedMethod):
    """Attention.attend() with hooks on its inputs, the scores, the weights and the output of each
    head."""

    method = "attend"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: AnyCache
    ) -> Tensor:
        has_state = isinstance(cache, LinearState)
        has_cached_keys = cache is not None and not has_state
        if has_cached_keys:  # later passes overwrite the cache that k and v view
            if "k" in self:
                k = k.clone()
            if "v" in self:
                v = v.clone()
        q, k, v = self.apply("q", q), self.apply("k", k), self.apply("v", v)
        # Such a cache attends to keys that attend() is not given.
        has_other_keys = cache is not None and mask.kernel == "cache"
        for point in ("scores", "weights"):
            if point in self and (has_state or has_other_keys):
                raise UserError(
                    f"attention.{point} is not available with this kind of cache; run without a "
                    f"cache"
                )
        y = self._sum_values(q, k, v, mask, cache)  # (B, H, T, D)
        if not any(point.startswith("heads") for point in self):
            return y
        heads = list(y.unbind(dim=1))  # (B, T, D) each
        patched = [self.apply(f"heads.{head}", x) for head, x in enumerate(heads)]
        is_patched = any(new is not old for new, old in zip(patched, heads))
        # Recorded tensors need their gradients.
        if is_patched or (torch.is_grad_enabled() and y.requires_grad):
            y = torch.stack(patched, dim=1)
        return self.apply("heads", y)

    def _sum_values(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: AnyCache
    ) -> Tensor:
        """attend(), or the sum of values by patched scores or weights."""
        attend = partial(self.plain, mask=mask, cache=cache)
        by_head = partial(repeat_heads, n_heads=q.shape[1])
        if "scores" in self:
            scores = self.module.scores(q, k, mask)  # (B, H, T, S)
            if not is_sum_by_weights(self._softmax(scores), v, attend(q, k, v)):
                raise UserError(
                    "attention.scores is not available, because attend() of this model was changed"
                )
            patched = self.apply("scores", scores)
            if patched is not scores:
                weights = self.apply("weights", self._softmax(patched))
                return weights.to(v.dtype) @ by_head(v)
        if "weights" not in self:
            return attend(q, k, v)
        weights, y = weights_of_attend(self.module, attend, q, k, v, mask)  # (B, H, T, S)
        patched = self.apply("weights", weights)
        if patched is weights:
            return y
        return patched.to(v.dtype) @ by_head(v)

    def _softmax(self, scores: Tensor) -> Tensor:
        return softmax_with_sinks(scores, self.module.sinks)


class _HookedNorm(_HookedMethod):
    """forward() of an RMSNorm or LayerNorm with hooks on the scale, (..., 1), by which it divides,
    and on the normalized input before weight and bias, (..., width)."""

    method = "forward"

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.module
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if isinstance(norm, AllHeadsNorm):
            wide = wide.flatten(-2)  # (B, T, H · D)
        if isinstance(norm, LayerNorm):
            wide = wide - wide.mean(-1, keepdim=True)
        scale = (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        patched_scale = self.apply("scale", scale)
        normalized = wide / patched_scale
        patched = self.apply("normalized", normalized)
        if patched is normalized and patched_scale is scale:
            return self.plain(x)
        y = patched
        if isinstance(norm, OnePlusRMSNorm):
            y = y + y * norm.weight
        elif norm.weight is not None:
            y = y * norm.weight
        if getattr(norm, "bias", None) is not None:
            y = y + norm.bias
        return y.view_as(x).to(x.dtype)


@dataclass(frozen=True)
class HookPoint:
    """Where an activation is: at the "output" or "input" of a module, in a method such as "attend",
    or in a "norm"."""

    module: nn.Module
    place: str
    name: str = ""  # within the method

    @contextmanager
    def open(self, function: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
        """Context in which the function sees the activation, and may return another."""
        if self.place == "output":
            handle = self.module.register_forward_hook(_OutputHook(function))
        elif self.place == "input":
            handle = self.module.register_forward_pre_hook(_InputHook(function))
        else:
            methods = {"embed": _HookedEmbed, "attend": _HookedAttend, "norm": _HookedNorm}
            with methods[self.place].open(self.module, self.name, _Hook(function)):
                yield
            return
        try:
            yield
        finally:
            handle.remove()


def hook_points(model: nn.Module) -> dict[str, HookPoint]:
    """Where each activation of a Thinker is, by name, in the order of the pass
    (docs/guides/inspecting.md)."""
    points = {"embedding": HookPoint(model, "embed", "result")}
    for layer, block in enumerate(model.blocks):
        path, attention = f"blocks.{layer}", block.attention
        points[f"{path}.attention_norm"] = HookPoint(block.attention_norm, "output")
        heads = [f"heads.{head}" for head in range(attention.n_heads)]
        parts = ["q", "k", "v", "scores", "weights", "heads", *heads]
        if isinstance(attention, LinearAttention):
            parts.remove("scores")
        for name in parts:
            points[f"{path}.attention.{name}"] = HookPoint(attention, "attend", name)
        points[f"{path}.attention"] = HookPoint(attention, "output")
        points[f"{path}.mlp_norm"] = HookPoint(block.mlp_norm, "output")
        if hasattr(block.mlp, "down_proj"):  # an MLP of the user may have other parts
            points[f"{path}.mlp.hidden"] = HookPoint(block.mlp.down_proj, "input")
        points[f"{path}.mlp"] = HookPoint(block.mlp, "output")
        points[path] = HookPoint(block, "output")
    points["norm"] = HookPoint(model.norm, "output")
    points["logits"] = HookPoint(model.lm_head, "output")
    return points


@contextmanager
def open_hooks(
    model: nn.Module, names: tuple[str, ...], patches: Mapping[str, Patch]
) -> Iterator[ActivationCache]:
    """Record the named activations of every pass and apply the patches; `*` matches one part of a
    name.

    Later hooks see earlier patches. Not for compiled models or threads. Raises UserError for
    unknown names.
    """
    check_types({"patches": Mapping}, {"patches": patches})
    cache, points = ActivationCache(), hook_points(model)
    hooks = []
    for pattern in names:
        for name in _matching_names(pattern, points):
            hooks.append((name, partial(cache.add, name)))
    for pattern, patch in patches.items():
        for name in _matching_names(pattern, points):
            hooks.append((name, partial(_apply_patch, name, patch)))
    with ExitStack() as stack:
        stack.enter_context(counted_as_open(model))
        if any(name == "logits" for name, _ in hooks):
            refuse = model.register_forward_pre_hook(_refuse_targets, with_kwargs=True)
            stack.callback(refuse.remove)
        for name, function in hooks:
            stack.enter_context(points[name].open(function))
        yield cache


def _refuse_targets(model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    if options.get("targets") is not None:
        raise UserError(
            "logits cannot be recorded or patched in a pass with targets; leave out the targets"
        )


def _matching_names(pattern: str, names: Iterable[str]) -> list[str]:
    check_types({"name": str}, {"name": pattern})
    parts = pattern.split(".")
    matches = []
    for name in names:
        found = name.split(".")
        if len(found) == len(parts) and all(map(fnmatchcase, found, parts)):
            matches.append(name)
    if not matches:
        raise UserError(f"the model has no activation {pattern}{did_you_mean(pattern, names)}")
    return matches


def _apply_patch(name: str, patch: Patch, x: Tensor) -> Tensor:
    """What a patch puts in place of the activation x. Raises UserError if it does not fit."""
    if callable(patch):
        value = patch(x)
        if _fits(name, value, x):
            return value
        wanted = "return a tensor of the same shape"
    else:
        value = _value_of_patch(name, patch, x)
        with suppress(RuntimeError, TypeError, ValueError):
            return torch.as_tensor(value, dtype=x.dtype, device=x.device).expand_as(x)
        wanted = "use a number, or a tensor that broadcasts to this shape"
    found = describe(value)
    if isinstance(value, Tensor):
        found = tuple(value.shape)
    raise UserError(f"{name} has shape {tuple(x.shape)}, but its patch is {found}; {wanted}")


def _fits(name: str, value: Tensor, x: Tensor) -> bool:
    """Whether a function may replace x by this value: a tensor of the same shape."""
    if not isinstance(value, Tensor) or value.dim() != x.dim():
        return False
    dims = range(x.dim())
    if name == "norm":  # whose patch may select which positions get logits
        dims = (0, 2)
    return all(value.shape[i] == x.shape[i] for i in dims)


def _value_of_patch(name: str, patch: Patch, x: Tensor) -> float | Tensor:
    """A patch as a number or tensor: "zero", or "mean" over this pass."""
    if not isinstance(patch, str):
        return patch
    if patch == "zero":
        return 0.0
    if patch != "mean":
        raise UserError(
            f"the patch for {name} is {patch!r}; use zero, mean, a number, a tensor or a function"
        )
    dims = (0, 1)  # batch and positions
    if name.endswith(("scores", "weights")):
        dims = 0
    elif name.endswith((".q", ".k", ".v", "heads")):
        dims = (0, 2)
    return x.mean(dim=dims, keepdim=True)
