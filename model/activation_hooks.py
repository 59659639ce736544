"""Hook points for recording and patching activations by name; Thinker, Block, Attention and MLP call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinker.runtime.checks import check_types, describe
from thinker.runtime.errors import UserError, did_you_mean

Patch = Literal["zero", "mean"] | float | Tensor | Callable[[Tensor], Tensor]
READ_ONLY = ("q", "k", "v")


class ActivationCache(dict[str, Tensor]):
    """Each activation of the last pass by name. `passes[name]` lists it for every pass, such as each decoding step."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: dict[str, list[Tensor]] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Record the activation of another pass."""
        self[name] = value
        self.passes.setdefault(name, []).append(value)


class HookManager(dict[str, list[Callable[[Tensor], Tensor | None]]]):
    """The open hooks of one module by hook point, in the order in which they were opened."""

    def __call__(self, point: str, x: Tensor) -> Tensor:
        """Pass x through all hooks of a point. Returns x itself if nothing patches it, a view if a patch returns x."""
        for function in self.get(point, ()):
            patched = function(x)
            if patched is not None:
                x = patched.view_as(patched) if patched is x else patched
        return x

    def __deepcopy__(self, memo: dict[int, Any]) -> HookManager:
        raise UserError(
            "cannot copy a model while its activations are recorded or patched; close the hooks first"
        )


def hook(hooks: HookManager | None, point: str, x: Tensor) -> Tensor:
    """Pass x through the open hooks of a point, if there are any."""
    return x if hooks is None else hooks(point, x)


def has_open_hooks(model: nn.Module) -> bool:
    """Whether any activation of the model is being recorded or patched."""
    return any(getattr(module, "hooks", None) is not None for module in model.modules())


def hook_points(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Map each name to the module that calls the hook and the module's own name for it (docs/guides/inspecting.md)."""
    points = {"embedding": (model, "embedding")}
    for layer, block in enumerate(model.blocks):
        path = f"blocks.{layer}"
        inner = [
            *READ_ONLY,
            "weights",
            "heads",
            *(f"heads.{head}" for head in range(block.attention.n_heads)),
        ]
        points[f"{path}.attention_norm"] = block, "attention_norm"
        points |= {f"{path}.attention.{point}": (block.attention, point) for point in inner}
        points |= {f"{path}.{point}": (block, point) for point in ("attention", "mlp_norm")}
        points |= {
            f"{path}.mlp.hidden": (block.mlp, "hidden"),
            f"{path}.mlp": (block, "mlp"),
            path: (block, "output"),
        }
    return {**points, "norm": (model, "norm"), "logits": (model, "logits")}


@contextmanager
def open_hooks(
    model: nn.Module, names: tuple[str, ...], patches: Mapping[str, Patch]
) -> Iterator[ActivationCache]:
    """Record the named activations of every pass and apply the patches; `*` matches one part of a name.

    Later hooks see earlier patches. Not for compiled models or threads. Raises UserError for unknown names.
    """
    check_types({"patches": Mapping}, {"patches": patches})
    cache, points = ActivationCache(), hook_points(model)
    hooks = [
        (name, partial(cache.add, name))
        for pattern in names
        for name in _matching_names(pattern, points)
    ]
    for pattern, patch in patches.items():
        for name in _matching_names(pattern, points):
            if points[name][1] in READ_ONLY:
                raise UserError(
                    f"{name} can be recorded but not patched; patch attention.weights or attention.heads"
                )
            hooks.append((name, partial(_apply_patch, name, patch)))
    for name, function in hooks:
        module, point = points[name]
        if module.hooks is None:
            module.hooks = HookManager()
        module.hooks.setdefault(point, []).append(function)
    try:
        yield cache
    finally:
        for name, function in hooks:
            module, point = points[name]
            module.hooks[point].remove(function)
            if not module.hooks[point]:
                del module.hooks[point]
            module.hooks = module.hooks or None


def _matching_names(pattern: str, names: Iterable[str]) -> list[str]:
    check_types({"name": str}, {"name": pattern})
    parts = pattern.split(".")
    candidates = [name for name in names if name.count(".") == pattern.count(".")]
    matches = [name for name in candidates if all(map(fnmatchcase, name.split("."), parts))]
    if not matches:
        raise UserError(f"the model has no activation {pattern}{did_you_mean(pattern, names)}")
    return matches


def _apply_patch(name: str, patch: Patch, x: Tensor) -> Tensor:
    if callable(patch):
        value, wanted = patch(x), "return a tensor of the same shape"
        dims = (
            (0, 2) if name == "norm" else range(x.dim())
        )  # a patch of norm may select which positions get logits
        if (
            isinstance(value, Tensor)
            and value.dim() == x.dim()
            and all(value.shape[i] == x.shape[i] for i in dims)
        ):
            return value
    elif isinstance(patch, str) and patch not in ("zero", "mean"):
        raise UserError(
            f"the patch for {name} is {patch!r}; use zero, mean, a number, a tensor or a function"
        )
    else:
        dims = 0 if name.endswith("weights") else (0, 2) if name.endswith("heads") else (0, 1)
        if isinstance(patch, str):
            patch = x.mean(dim=dims, keepdim=True) if patch == "mean" else 0.0  # over this pass
        value, wanted = patch, "use a number, or a tensor that broadcasts to this shape"
        with suppress(RuntimeError, TypeError, ValueError):
            return torch.as_tensor(patch, dtype=x.dtype, device=x.device).expand_as(x)
    found = tuple(value.shape) if isinstance(value, Tensor) else describe(value)
    raise UserError(f"{name} has shape {tuple(x.shape)}, but its patch is {found}; {wanted}")
