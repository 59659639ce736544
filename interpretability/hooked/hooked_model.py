"""A Thinker with the interface of TransformerLens's HookedTransformer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinker.data.tokenizers.tokenizer import Tokenizer
from thinker.generation.sampler import distribution
from thinker.generation.sampling_params import SamplingParams
from thinker.interop.load import load
from thinker.interpretability.hooked import weight_processing
from thinker.interpretability.hooked.hook_names import BY_NAME_ONLY, LensPoint, lens_points
from thinker.interpretability.hooked.hooked_cache import HookedCache, without_batch
from thinker.interpretability.hooked.hooked_config import config_of
from thinker.interpretability.hooked.lens_tokens import LensTokens, Texts
from thinker.interpretability.hooked.lens_weights import LensWeights
from thinker.model import Thinker
from thinker.model.inspection.open_hooks import counted_as_open
from thinker.runtime.errors import UserError, did_you_mean

HookFunction = Callable[..., Any]  # (activation or gradient, hook=NamedPoint) -> a new one, or None
NamesFilter = str | list[str] | Callable[[str], bool] | None
Hooks = Iterable[tuple[str | Callable[[str], bool], HookFunction]]
GUIDE = "docs/guides/inspecting.md lists what is offered"


@dataclass
class NamedPoint:
    """What a hook function gets as `hook`: the name of the activation, and a dict to keep things
    in between passes."""

    name: str
    ctx: dict[str, Any] = field(default_factory=dict)

    def layer(self) -> int:
        """The layer. Raises UserError if the activation is of no layer."""
        if not self.name.startswith("blocks."):
            raise UserError(f"{self.name} is not in a layer")
        return int(self.name.split(".")[1])


@dataclass(eq=False)
class _Hook:
    function: HookFunction
    is_backward: bool = False
    is_permanent: bool = False


class HookedThinker(LensWeights, LensTokens):
    """A model and its tokenizer with the names, shapes and functions of a HookedTransformer.

    The model itself stays as it is: hooks are open during the passes of this object alone. Names
    that the model does not have raise UserError; hook_dict has all of them.

    Attributes:
        model: the Thinker.
        cfg: its shape.
        hook_dict: name -> what hook functions get as `hook`.
    """

    def __init__(
        self,
        model: Thinker,
        tokenizer: Tokenizer | None = None,
        default_prepend_bos: bool | None = None,
    ) -> None:
        """default_prepend_bos: whether texts begin with the BOS token (default: if there is a
        tokenizer, as in TransformerLens, even for models that were trained without)."""
        if not isinstance(model, Thinker):
            raise UserError(f"the model is a {type(model).__name__}; pass a Thinker")
        if default_prepend_bos is None:
            default_prepend_bos = tokenizer is not None
        self._tokenizer = tokenizer
        self._use(model)
        self.cfg = config_of(model, default_prepend_bos)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        *,
        device: torch.device | str = "cpu",
        checkpoint: str | int = "latest",
        default_prepend_bos: bool | None = None,
    ) -> HookedThinker:
        """Open whatever load() opens, and process its weights; see process_weights_()."""
        model, tokenizer = load(path, device, checkpoint)
        hooked = cls(model, tokenizer, default_prepend_bos)
        hooked.process_weights_(fold_ln, center_writing_weights, center_unembed, fold_value_biases)
        return hooked

    @classmethod
    def from_pretrained_no_processing(cls, path: str | Path, **options: Any) -> HookedThinker:
        """Open whatever load() opens, with its weights as they are."""
        return cls.from_pretrained(path, False, False, False, False, **options)

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
    ) -> None:
        """Work on a copy of the model with other weights and the same log-probabilities.

        fold_ln: multiply the weights of norms into the matrices that follow.
        center_writing_weights: if all norms are LayerNorm, subtract its mean from whatever is added
        to the residual stream. center_unembed: subtract the mean of the logits from them.
        fold_value_biases: move the biases of values into that of the output, in layers where
        attention weights sum to 1.
        """
        if not (fold_ln or center_writing_weights or center_unembed or fold_value_biases):
            return
        model = weight_processing.copy_to_process(self.model)
        if fold_ln:
            weight_processing.fold_norms(model)
            self.cfg.normalization_type = self.cfg.normalization_type.removesuffix("Pre") + "Pre"
        if center_writing_weights:
            weight_processing.center_writing_weights(model)
        if center_unembed:
            weight_processing.center_unembed(model)
        if fold_value_biases:
            weight_processing.fold_value_biases(model)
        self._use(model)

    def _use(self, model: Thinker) -> None:
        self.model = model
        self._points = lens_points(model)
        self._hooks: dict[str, list[_Hook]] = {name: [] for name in self._points}
        self.hook_dict = {name: NamedPoint(name) for name in self._points}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"HookedThinker has no {name}{did_you_mean(name, dir(self))}; {GUIDE}")

    def __repr__(self) -> str:
        return f"HookedThinker({self.cfg})"

    # Hooks

    def _names(self, wanted: NamesFilter) -> list[str]:
        """The names that a filter selects. Raises UserError if there are none."""
        if wanted is None:
            return [name for name in self._points if self._is_cached_by_default(name)]
        if callable(wanted):
            names = [name for name in self._points if wanted(name)]
            if not names:
                raise UserError("the filter selects no activation; hook_dict has their names")
            return names
        if isinstance(wanted, str):
            wanted = [wanted]
        for name in wanted:
            if name not in self._points:
                hint = did_you_mean(name, self._points)
                raise UserError(f"this model has no activation {name}{hint}; {GUIDE}")
        return list(wanted)

    def _is_cached_by_default(self, name: str) -> bool:
        option = BY_NAME_ONLY.get(name.split(".")[-1])
        return option is None or getattr(self.cfg, option)

    def add_hook(
        self,
        name: str | Callable[[str], bool],
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """Call hook(activation, hook=point) in each pass. It may return another activation of the
        same shape, or write into it.

        name: that of the activation, or a function that selects names. dir: "bwd"
        calls the hook with the gradient in the backward pass instead. prepend: call it before the
        other hooks of the activation.
        """
        if dir not in ("fwd", "bwd"):
            raise UserError(f"dir is {dir!r}; use fwd or bwd")
        for each in self._names(name):
            added = _Hook(hook, dir == "bwd", is_permanent)
            if prepend:
                self._hooks[each].insert(0, added)
            else:
                self._hooks[each].append(added)

    def add_perma_hook(
        self, name: str | Callable[[str], bool], hook: HookFunction, dir: str = "fwd"
    ) -> None:
        """add_hook() that reset_hooks() leaves in place."""
        self.add_hook(name, hook, dir, is_permanent=True)

    def reset_hooks(self, including_permanent: bool = False) -> None:
        """Remove all hooks."""
        for name, hooks in self._hooks.items():
            kept = [hook for hook in hooks if hook.is_permanent and not including_permanent]
            self._hooks[name] = kept

    @contextmanager
    def hooks(
        self, fwd_hooks: Hooks = (), bwd_hooks: Hooks = (), reset_hooks_end: bool = True
    ) -> Iterator[HookedThinker]:
        """Context with more hooks: pairs of a name, or a function of names, and a hook function.

        reset_hooks_end: remove them at the end.
        """
        before = {name: list(hooks) for name, hooks in self._hooks.items()}
        try:
            for name, function in fwd_hooks:
                self.add_hook(name, function)
            for name, function in bwd_hooks:
                self.add_hook(name, function, dir="bwd")
            yield self
        finally:
            if reset_hooks_end:
                self._hooks.update(before)

    @contextmanager
    def _open_hooks(self) -> Iterator[None]:
        """Context in which passes of the model call the hooks."""
        with ExitStack() as stack:
            stack.enter_context(counted_as_open(self.model))
            for name, point in self._points.items():
                if self._hooks[name]:
                    stack.enter_context(point.point.open(self._caller(name, point)))
            yield

    def _caller(self, name: str, point: LensPoint) -> Callable[[Tensor], Tensor | None]:
        """A function of our tensor that calls the hooks of an activation with theirs."""
        named = self.hook_dict[name]

        def call(x: Tensor) -> Tensor | None:
            value = point.from_ours(x)
            is_changed = False
            for hook in self._hooks[name]:
                if hook.is_backward:
                    value = value.view_as(value)  # through which the gradients come
                    self._call_with_gradient(value, hook, named)
                    is_changed = True
                    continue
                version = _version(value)
                result = hook.function(value, hook=named)
                if result is None:
                    is_changed = is_changed or _version(value) != version
                    continue
                if not isinstance(result, Tensor) or result.shape != value.shape:
                    raise UserError(
                        f"a hook of {name} must return a tensor of shape {tuple(value.shape)}, or "
                        "None"
                    )
                value = result.to(value.dtype)
                is_changed = True
            if is_changed:
                return point.to_ours(value, x)
            return None

        return call

    def _call_with_gradient(self, value: Tensor, hook: _Hook, named: NamedPoint) -> None:
        if not value.requires_grad:
            raise UserError(
                f"{named.name} has no gradient for its backward hook; turn gradients on, for "
                "example with torch.enable_grad()"
            )

        def call(gradient: Tensor) -> Tensor | None:
            if hook not in self._hooks[named.name]:
                return None
            result = hook.function(gradient, hook=named)
            if isinstance(result, tuple):
                (result,) = result
            return result

        value.register_hook(call)

    # Passes

    def forward(
        self,
        input: Texts | Tensor,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """Run a pass over texts or tokens, (B, T) or (T,), and call the hooks.

        return_type: "logits", (B, T, V); "loss", the mean cross-entropy of each next token in nats,
        or with loss_per_token (B, T − 1); "both", (logits, loss); or None.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise UserError(f"return_type is {return_type!r}; use logits, loss, both or None")
        if self.model.training and self.model.config.dropout > 0:
            raise UserError(
                "the model is in training mode, where dropout hides activations; call "
                "model.eval() first"
            )
        if loss_per_token and return_type in ("logits", None):
            raise UserError("loss_per_token needs return_type loss or both")
        tokens = input
        if not isinstance(input, Tensor):
            tokens = self.to_tokens(input, prepend_bos)
            if return_type in ("loss", "both"):
                self._check_no_padding(input, prepend_bos)
        if tokens.dim() == 1:
            tokens = tokens[None]
        tokens = tokens.to(self.cfg.device)
        with self._open_hooks():
            logits = self.model(tokens)
        if return_type is None:
            return None
        if return_type == "logits":
            return logits
        loss = self.loss_fn(logits, tokens, loss_per_token)
        if return_type == "loss":
            return loss
        return logits, loss

    __call__ = forward

    def _check_no_padding(self, texts: Texts, prepend_bos: bool | None) -> None:
        rows = [texts] if isinstance(texts, str) else texts
        lengths = {len(self._encode(text, prepend_bos, truncate=True)) for text in rows}
        if len(lengths) > 1:
            raise UserError(
                "texts of different lengths have no common loss, because padding would count; pass "
                "one at a time"
            )

    def loss_fn(self, logits: Tensor, tokens: Tensor, per_token: bool = False) -> Tensor:
        """The cross-entropy of each next token in nats: the mean, or (B, T − 1)."""
        losses = F.cross_entropy(
            logits[:, :-1].float().transpose(1, 2), tokens[:, 1:], reduction="none"
        )
        if per_token:
            return losses
        return losses.mean()

    def run_with_hooks(
        self, *inputs: Any, fwd_hooks: Hooks = (), reset_hooks_end: bool = True, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """forward() with more hooks. For backward hooks, use hooks()."""
        with self.hooks(fwd_hooks, reset_hooks_end=reset_hooks_end):
            return self.forward(*inputs, **options)

    def run_with_cache(
        self,
        *inputs: Any,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        return_cache_object: bool = True,
        **options: Any,
    ) -> tuple[Any, HookedCache | dict[str, Tensor]]:
        """forward(), and the activations as the hooks leave them, detached.

        names_filter: a name, several, or a function of names; by default all except hook_result and
        hook_mlp_in, which cfg.use_attn_result and cfg.use_hook_mlp_in add. device: where to keep
        them. incl_bwd: call backward() on the result, which must be a loss, and keep gradients as
        NAME_grad. return_cache_object: a HookedCache instead of a dict.
        """
        cache: dict[str, Tensor] = {}

        def on_device(value: Tensor) -> Tensor:
            if device is None:
                return value
            return value.to(device)

        def keep(value: Tensor, hook: NamedPoint) -> None:
            cache[hook.name] = on_device(value.detach())

        def keep_gradient(value: Tensor, hook: NamedPoint) -> None:
            cache[f"{hook.name}_grad"] = on_device(value.detach())

        names = self._names(names_filter)
        fwd_hooks = [(name, keep) for name in names]
        bwd_hooks = []
        if incl_bwd:
            bwd_hooks = [(name, keep_gradient) for name in names]
        with self.hooks(fwd_hooks, bwd_hooks):
            result = self.forward(*inputs, **options)
            if incl_bwd:
                result.backward()
        if remove_batch_dim:
            cache = without_batch(cache)
        if not return_cache_object:
            return result, cache
        return result, HookedCache(cache, self, has_batch_dim=not remove_batch_dim)

    @torch.no_grad()
    def generate(
        self,
        input: Texts | Tensor = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        *,
        prepend_bos: bool | None = None,
        return_type: str = "input",
        verbose: bool = True,
    ) -> str | list[str] | Tensor:
        """Continue texts of the same number of tokens, or tokens (B, T), and call the hooks in each
        pass, which sees all positions: there is no KV cache.

        Samples with torch's random numbers. return_type: "str", "tokens", or "input" for the type
        of the input. verbose: show a progress bar. For speed, use thinker.Generator.
        """
        if return_type not in ("input", "str", "tokens"):
            raise UserError(f"return_type is {return_type!r}; use input, str or tokens")
        tokens = input
        if not isinstance(input, Tensor):
            tokens = self.to_tokens(input, prepend_bos)
            self._check_no_padding(input, prepend_bos)
        if return_type == "input":
            return_type = "tokens" if isinstance(input, Tensor) else "str"
        if tokens.dim() == 1:
            tokens = tokens[None]
        if tokens.shape[1] + max_new_tokens > self.cfg.n_ctx:
            raise UserError(
                f"{tokens.shape[1]} tokens and {max_new_tokens} new ones are more than n_ctx = "
                f"{self.cfg.n_ctx}"
            )
        if stop_at_eos and eos_token_id is None:
            eos_token_id = self.tokenizer.eos_id
        if not do_sample:
            temperature = 0.0
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        is_done = torch.zeros(len(tokens), dtype=torch.bool, device=self.cfg.device)
        tokens = tokens.to(self.cfg.device)
        for _ in _progress(max_new_tokens, verbose):
            logits = self.forward(tokens)[:, -1].float()
            probabilities = distribution(logits, params)  # (B, V)
            new = torch.multinomial(probabilities, 1)  # (B, 1)
            if stop_at_eos:
                new[is_done] = eos_token_id
                is_done |= new[:, 0] == eos_token_id
            tokens = torch.cat([tokens, new], dim=1)
            if is_done.all():
                break
        if return_type == "tokens":
            return tokens
        texts = [self.tokenizer.decode(row) for row in tokens.tolist()]
        if len(texts) == 1:
            return texts[0]
        return texts

    # As of a module

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the model."""
        return self.model.parameters()

    def zero_grad(self) -> None:
        """Forget the gradients of the parameters."""
        self.model.zero_grad()

    def to(self, device: torch.device | str) -> HookedThinker:
        """Move the model to a device."""
        self.model.to(device)
        self.cfg.device = self.model.device
        return self


def _progress(n_steps: int, is_shown: bool) -> Iterable[int]:
    if not is_shown:
        return range(n_steps)
    from thinker.runtime.process.progress import Progress

    return Progress(range(n_steps))


def _version(x: Tensor) -> int | object:
    """A number that changes when someone writes into the tensor."""
    if x.is_inference():  # which has no such number
        return object()
    return x._version
