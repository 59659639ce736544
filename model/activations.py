"""Taps: activations of an ordinary forward pass by name, to keep or to change. Others run none of this."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinker.model.attend import AttentionMask
from thinker.model.linear_attention import LinearAttention
from thinker.model.masks import ForwardContext
from thinker.model.patterns import TokenInfo
from thinker.runtime.errors import UserError, did_you_mean

Edit = Literal["zero", "mean"] | float | Tensor | Callable[[Tensor], Tensor]
READ_ONLY = ("q", "k", "v")


class ActivationCache(dict[str, Tensor]):
    """name -> what the last pass had there. `passes[name]`: what every pass had, such as each step of a generation."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: dict[str, list[Tensor]] = {}

    def keep(self, name: str, value: Tensor) -> None:
        """One more."""
        self[name] = value
        self.passes.setdefault(name, []).append(value)


def activation_names(model: nn.Module) -> list[str]:
    """All that can be tapped, in the order of the pass.

    | name | shape | |
    |---|---|---|
    | embedding | (B, T, C) | what enters the first block |
    | blocks.i | (B, T, C) | the residual stream after a block |
    | blocks.i.attention_norm, blocks.i.mlp_norm, norm | (B, T, C) | what is read of it |
    | blocks.i.attention, blocks.i.mlp | (B, T, C) | what is added to it |
    | blocks.i.attention.q, k, v | (B, H, T, D), (B, K, S, D) twice | normed and rotated; with a cache all its keys |
    | blocks.i.attention.weights | (B, H, T, S) | rows are queries and sum to 1 (with sinks to less) |
    | blocks.i.attention.heads, blocks.i.attention.heads.h | (B, H, T, D), (B, T, D) | the weighted sums of values |
    | blocks.i.mlp.hidden | (B, T, d_ff) | silu(gate) · up |
    | logits | (B, T, V) | where the pass has no targets |
    """
    found = ["embedding"]
    for layer, block in enumerate(model.blocks):
        attention = [*READ_ONLY, "weights", "heads", *(f"heads.{head}" for head in range(block.attention.n_heads))]
        parts = ["attention_norm", *(f"attention.{part}" for part in attention), "attention"]
        parts += ["mlp_norm", "mlp.hidden", "mlp"]
        found += [f"blocks.{layer}.{part}" for part in parts] + [f"blocks.{layer}"]
    return [*found, "norm", "logits"]


@contextmanager
def taps(model: nn.Module, names: tuple[str, ...], edits: Mapping[str, Edit]) -> Iterator[ActivationCache]:
    """While it is open, keep what is named of every pass, and change what `edits` names.

    `*` in a name stands for one part of it. Where several are open, each sees what those before it have changed. Not
    for a compiled model, nor for several threads at once. Raises UserError for a name that there is not.
    """
    seen, hooks, known = ActivationCache(), [], activation_names(model)
    for name in _matching(names, known):
        hooks.append((name, partial(seen.keep, name)))
    for pattern, edit in edits.items():
        for name in _matching((pattern,), known):
            if name.rpartition(".attention.")[2] in READ_ONLY:
                raise UserError(f"{name} can be seen, not changed; change weights or heads")
            hooks.append((name, partial(_change, name, edit)))
    points = vars(model).setdefault("_points", Points(model))
    points.hooks += hooks
    points.lay()
    try:
        yield seen
    finally:
        points.hooks = [hook for hook in points.hooks if hook not in hooks]
        points.lay()
        if not points.hooks:
            vars(model).pop("_points", None)


def _matching(patterns: tuple[str, ...], known: list[str]) -> list[str]:
    found = []
    for pattern in patterns:
        parts = pattern.split(".")
        apart = [(name, name.split(".")) for name in known]
        some = [name for name, own in apart if len(own) == len(parts) and all(map(fnmatchcase, own, parts))]
        if not some:
            raise UserError(f"this model has no activation {pattern}{did_you_mean(pattern, known)}")
        found += some
    return found


def _change(name: str, edit: Edit, x: Tensor) -> Tensor:
    if callable(edit):
        return edit(x)
    if isinstance(edit, str):
        if edit not in ("zero", "mean"):
            raise UserError(f"{name} cannot become {edit!r}; it can be zero, mean, a number, a tensor or a function's")
        places = 0 if name.endswith("weights") else (0, 2) if name.endswith("heads") else (0, 1)
        edit = x.mean(dim=places, keepdim=True) if edit == "mean" else 0.0  # of this pass
    return torch.as_tensor(edit, dtype=x.dtype, device=x.device).expand_as(x)


def _need_logits(_: nn.Module, given: tuple, options: dict[str, Any]) -> None:
    if options.get("targets") is not None:
        raise UserError("with targets a pass makes no logits that could be tapped or edited")


def is_open(model: nn.Module) -> bool:
    """Whether anything of it is tapped or edited."""
    return "_points" in vars(model)


class Points:
    """Every hook that is open on a model, in the order of opening, and the places where they are called."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.undo = model, ExitStack()
        self.hooks: list[tuple[str, Callable[[Tensor], Tensor | None]]] = []

    def __deepcopy__(self, memo: dict) -> Points:
        raise UserError("a model cannot be copied while its activations are tapped or edited; close that before")

    def through(self, name: str, x: Tensor) -> Tensor:
        """x after all hooks of that name; x itself where none changes it, a view where one gives it back."""
        for at, hook in self.hooks:
            if at == name and (new := hook(x)) is not None:
                x = new.view_as(new) if new is x else new
        return x

    def lay(self) -> None:
        """Take away what was laid, and lay what the hooks ask for."""
        self.undo.close()
        model, names = self.model, {name for name, _ in self.hooks}
        inside = [(layer, [name for name in names if name.startswith(f"blocks.{layer}.attention.")])
                  for layer in range(len(model.blocks))]  # fmt: skip
        for layer, some in inside:
            module, path = model.blocks[layer].attention, f"blocks.{layer}.attention"
            if any(".heads" in name for name in some):
                self.undo.callback(module.o_proj.register_forward_pre_hook(partial(self.heads, module, path)).remove)
            if wanted := {name.removeprefix(f"{path}.") for name in some if ".heads" not in name}:
                self.replace(module, "mix", partial(self.mix, module, layer, path, wanted, module.mix))
                if "weights" in wanted and "make_context" not in vars(model):
                    self.replace(model, "make_context", partial(self.place, model.make_context))
        if "embedding" in names:
            embed = model.embed
            self.replace(model, "embed", lambda *given: self.through("embedding", embed(*given)))
        if "logits" in names:
            self.undo.callback(model.register_forward_pre_hook(_need_logits, with_kwargs=True).remove)
        for name in names - {"embedding"} - {name for _, some in inside for name in some}:
            if name.endswith(".hidden"):
                module = model.get_submodule(name.removesuffix("hidden") + "down_proj")
                hook = module.register_forward_pre_hook(lambda _, given, name=name: (self.through(name, given[0]),))
            else:
                module = model.get_submodule("lm_head" if name == "logits" else name)
                hook = module.register_forward_hook(lambda _, given, x, name=name: self.through(name, x))
            self.undo.callback(hook.remove)

    def replace(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        """Put a function in the place of a method of one object."""
        vars(module)[name] = method
        self.undo.callback(vars(module).pop, name)

    def place(
        self, place: Callable[..., ForwardContext], given: Tensor, tokens: Any, documents: Any = None, cache: Any = None
    ) -> ForwardContext:
        """Thinker.place, whose result is needed for the weights."""
        self.placement, self.tokens = place(given, tokens, documents, cache), tokens
        self.looking = self.model.looking if cache is None else cache.looking
        return self.placement

    def see(self, layer: int, sight: AttentionMask, q: Tensor, k: Tensor) -> Callable[[slice], AttentionMask]:
        """What some of the queries see, for the reference: kernels have it in forms of their own."""
        place, looking = self.placement, self.looking
        if isinstance(self.model.blocks[layer].attention, LinearAttention):
            return lambda rows: sight
        if sight.held is not None:  # of a cache; what it makes of its keys is a plain mask
            return lambda rows: sight.of(rows, q, k)
        query = place.query or TokenInfo(place.positions, token=self.tokens if looking.by_token else None)
        return lambda rows: looking.of(layer, query, rows)

    def mix(
        self,
        module: Any,
        layer: int,
        path: str,
        wanted: set[str],
        mix: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sight: Any,
        cache: Any,
    ) -> Tensor:
        """Attention.mix, with its hooks called on what it is given, and on the weights."""
        held = cache is not None and not isinstance(module, LinearAttention)
        if held:  # views of what later passes will overwrite
            (q, k, v), cache = cache.store(q, k, v, sight), None
        for name, x in (("q", q), ("k", k), ("v", v)):
            if name in wanted:
                self.through(f"{path}.{name}", x.clone() if held else x)
        if "weights" not in wanted:
            return mix(q, k, v, sight, cache)
        if cache is not None:
            raise UserError(
                f"{path}.weights: a layer of linear attention keeps no keys, so that it has none with a cache"
            )
        weights = module.weights(q, k, self.see(layer, sight, q, k))  # (B, H, T, S)
        changed = self.through(f"{path}.weights", weights)
        if changed is weights:
            return mix(q, k, v, sight, cache)
        return changed.to(v.dtype) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    def heads(self, module: Any, path: str, _: nn.Module, given: tuple[Tensor]) -> tuple[Tensor] | None:
        """Before o_proj, whose input is all heads side by side: (B, T, H·D)."""
        before = given[0].unflatten(-1, (module.n_heads, -1)).transpose(1, 2)  # (B, H, T, D)
        each = [before[:, head] for head in range(module.n_heads)]  # (B, T, D) each
        new = [self.through(f"{path}.heads.{head}", x) for head, x in enumerate(each)]
        learning = torch.is_grad_enabled() and before.requires_grad  # then what is kept has to be what is gone on with
        heads = before if not learning and all(map(lambda a, b: a is b, each, new)) else torch.stack(new, dim=1)
        after = self.through(f"{path}.heads", heads)
        return None if after is before else (after.transpose(1, 2).flatten(2),)
