"""Faster forms of modules in a training step: kernels of native/ on a CPU, and matrices that are
cast once.

Outside a step the model runs as written. Within it, one method of each known module is replaced on
the instance. A form is used only if it has proved that it computes the same as the module
(model/proof.py).
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from thinker.model import Thinker, proof
from thinker.model.attention import AnyCache, Attention, LinearAttention
from thinker.model.attention_dispatch import AttentionMask
from thinker.model.kernels.blockwise_attention import BlockwiseAttention
from thinker.model.kernels.linear_cross_entropy import loss_and_gradient
from thinker.model.layers import Linear, RMSNorm
from thinker.model.masks import MaskBuilder
from thinker.model.patterns.pattern import TokenInfo
from thinker.model.positions import Rotation
from thinker.model.transformer import MLP
from thinker.native import training as native
from thinker.native.tiles import tile_kernels as tiles
from thinker.runtime.constants import IGNORE_INDEX
from thinker.runtime.errors import UserError
from thinker.training.settings.settings import TrainSettings

FP32_TOLERANCE = 1e-5
BF16_TOLERANCE = 0.03  # of outputs and gradients; plain and fused forms round at other places
GRADIENT_POSITIONS = 32  # at either end of the context
REAL_POSITIONS = 4  # in the real shape
ATTENTION_POSITIONS = 150  # more than two blocks of the kernel, and no multiple of them
DROPOUT_ELEMENTS = 1 << 16
LOSS_ROWS = 50  # of logits to compare
LOSS_TOKENS = 601


def rms_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    """RMSNorm.forward() in one kernel."""
    return native.rms_norm(x, norm.weight, norm.eps)


def rms_norm_of_torch(norm: RMSNorm, x: Tensor) -> Tensor:
    """RMSNorm.forward() on a GPU."""
    normalized = F.rms_norm(x.float(), x.shape[-1:], eps=norm.eps)
    return normalized.to(x.dtype) * norm.weight.to(x.dtype)


def project(attention: Attention, x: Tensor, rope: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Attention.project() with one matrix product, and one kernel for the norms and the
    rotation."""
    qkv = project_jointly(x, attention.q_proj, attention.k_proj, attention.v_proj)
    q_weight = k_weight = None
    eps = 0.0
    if isinstance(attention.q_norm, RMSNorm):
        q_weight = attention.q_norm.weight
        k_weight = attention.k_norm.weight
        eps = attention.q_norm.eps
    H = attention.n_heads
    K = attention.n_kv_heads
    return native.rotate_heads(qkv, H, K, q_weight, k_weight, eps, rope)


def attend(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: AnyCache
) -> Tensor:
    """Attention.attend() in one kernel, for causal attention in bf16; others as written."""
    is_plain = attention.attn_logit_softcap is None and attention.sinks is None and cache is None
    if is_plain and _is_causal(mask) and tiles.has_causal_attention(q, k, v):
        return tiles.causal_attention(q, k, v, attention.scale)
    return type(attention).attend(attention, q, k, v, mask, cache)


def _is_causal(mask: AttentionMask) -> bool:
    """Whether each query attends to all keys up to its own position, whatever kernel may do so."""
    if not mask.is_causal or mask.allowed is not None or mask.content_mask is not None:
        return False
    return mask.kernel == "sdpa" or type(mask.compute) is BlockwiseAttention


def linear(module: Linear, x: Tensor) -> Tensor:
    """Linear.forward() by a kernel where it is faster; one sums the weight gradient in fp32."""
    if not tiles.has_linear(x, [module.weight]):
        return type(module).forward(module, x)
    bias = module.bias
    if bias is not None:
        bias = bias.to(x.dtype)
    return tiles.linear(x, module.cast_weight(x.dtype).detach(), bias, [module.weight])


def loss(model: Thinker, *arguments: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Thinker.forward() with the cross-entropy of a chunk of logits in one kernel, in bf16.

    In fp32, where runs keep their bits from one version to the next, the model's own function.
    """
    if model.dtype == torch.bfloat16 and options.get("chunk_loss") is None:
        options["chunk_loss"] = native.loss_and_gradient
    return type(model).forward(model, *arguments, **options)


def swiglu(mlp: MLP, x: Tensor) -> Tensor:
    """MLP.forward() with gate and up in one matrix product, followed by one kernel for SwiGLU, or
    with SwiGLU as the epilogue of the product."""
    matrices = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if all(map(_is_plain_linear, matrices)):
        weights = [matrix.weight for matrix in matrices]
        if tiles.has_swiglu_mlp(x, *weights):
            gate, up, down = (matrix.cast_weight(x.dtype).detach() for matrix in matrices)
            return tiles.swiglu_mlp(x, (torch.cat((gate, up)), down), weights)
    return mlp.down_proj(native.swiglu(project_jointly(x, mlp.gate_proj, mlp.up_proj)))


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether a form may leave out the call of this matrix, which may have its own form."""
    if type(module) is not Linear or module.bias is not None:
        return False
    forward = vars(module).get("forward")
    is_ours = forward is None or getattr(forward, "func", None) is linear
    return is_ours and _casts_once(module) and not _has_hooks(module)


def dropout(module: nn.Dropout, x: Tensor) -> Tensor:
    """nn.Dropout in one kernel; torch takes a fifth of a small model's step for it."""
    if not module.training or module.p == 0:
        return x
    return native.dropout(x, module.p)


def project_jointly(x: Tensor, *matrices: nn.Module) -> Tensor:
    """Apply each matrix to x in one product, or one by one if any is not a Linear. Returns all
    outputs, concatenated."""
    if any(type(matrix) is not Linear for matrix in matrices):
        return torch.cat([matrix(x) for matrix in matrices], dim=-1)
    weight = torch.cat([matrix.cast_weight(x.dtype) for matrix in matrices])
    biases = [matrix.bias.to(x.dtype) for matrix in matrices if matrix.bias is not None]
    bias = torch.cat(biases) if biases else None
    weights = [matrix.weight for matrix in matrices]
    if all(map(_casts_once, matrices)) and tiles.has_linear(x, weights):
        return tiles.linear(x, weight.detach(), bias, weights)
    return F.linear(x, weight, bias)


# The methods that are replaced in modules of exactly this type, and by what.
Forms = dict[type, dict[str, Callable[..., Tensor | tuple[Tensor, ...]]]]
NATIVE: Forms = {
    RMSNorm: {"forward": rms_norm},
    Attention: {"project": project, "attend": attend},
    LinearAttention: {"project": project},
    MLP: {"forward": swiglu},
    Linear: {"forward": linear},
    Thinker: {"forward": loss},
    nn.Dropout: {"forward": dropout},
}
OF_TORCH: Forms = {RMSNorm: {"forward": rms_norm_of_torch}}


@dataclass(frozen=True)
class Kernels:
    """Faster forms for the modules of a model. `is_native`: of native/, so that optimizers use its
    kernels, too."""

    forms: Forms
    is_native: bool = False
    problem: str = ""  # one line about forms that compute something else, or ""


def choose_kernels(
    model: Thinker, train: TrainSettings, device: torch.device
) -> tuple[Kernels, str]:
    """The faster forms that training may use, and why it does not use those of native/, or ""."""
    if train.kernels == "off":
        return Kernels({}), "train.kernels is off"
    if train.compile:  # the compiler fuses the modules as they are written
        return Kernels({}), "train.compile is on"
    if device.type != "cpu":
        forms = OF_TORCH if device.type == "cuda" else {}
        problem = f"they run only on CPUs; the device is {device.type}"
        return proven(Kernels(forms), model), problem
    try:
        native.load_training_library()
    except UserError as error:
        return Kernels({}), str(error)
    return proven(Kernels(NATIVE, is_native=True), model), ""


@contextlib.contextmanager
def fused_kernels(model: nn.Module, kernels: Kernels | None) -> Iterator[None]:
    """Context in which known modules of the model use their faster form; outside, it runs as
    written."""
    replaced: list[tuple[nn.Module, str]] = []
    try:
        # Hooks of all modules are to see each of them, and forms leave out the calls of some.
        if kernels is not None and kernels.forms and not _has_any_global_hook():
            for module in model.modules():
                for name, function in kernels.forms.get(type(module), {}).items():
                    if is_known(module, name):
                        vars(module)[name] = partial(function, module)
                        replaced.append((module, name))
        yield
    finally:
        for module, name in replaced:
            del vars(module)[name]


@contextlib.contextmanager
def without_kernels(model: nn.Module, kernels: Kernels) -> Iterator[None]:
    """Context in which the model runs as written, also within fused_kernels()."""
    removed: list[tuple[nn.Module, str, partial]] = []
    for module in model.modules():
        for name, function in kernels.forms.get(type(module), {}).items():
            replaced = vars(module).get(name)
            if isinstance(replaced, partial) and replaced.func is function:
                removed.append((module, name, replaced))
                del vars(module)[name]
    try:
        yield
    finally:
        for module, name, replaced in removed:
            vars(module)[name] = replaced


def is_known(module: nn.Module, method: str) -> bool:
    """Whether all that a form leaves out is of known types and unchanged on this instance."""
    if method in vars(module):
        return False
    if method == "attend":
        return True
    if isinstance(module, Linear):
        return _casts_once(module)
    if isinstance(module, Attention):
        matrices = (module.q_proj, module.k_proj, module.v_proj)
        norms = (module.q_norm, module.k_norm)
        if type(norms[0]) is not type(norms[1]):
            return False
        if type(norms[0]) is RMSNorm:
            if norms[0].eps != norms[1].eps:
                return False
        elif type(norms[0]) is not nn.Identity:
            return False
        return _are_unchanged(*matrices, *norms) and _are_alike(*matrices)
    if isinstance(module, MLP):
        matrices = (module.gate_proj, module.up_proj)
        is_silu = module.activation is F.silu
        return is_silu and _are_unchanged(*matrices) and _are_alike(*matrices)
    return True


def _are_unchanged(*parts: nn.Module) -> bool:
    """Whether a form may leave out the calls of these modules: no hooks, no forward() of an
    instance."""
    return not any(_has_hooks(part) or "forward" in vars(part) for part in parts)


def _has_hooks(module: nn.Module) -> bool:
    """Whether something is to be called before or after the module."""
    if module._forward_hooks or module._forward_pre_hooks:
        return True
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _casts_once(matrix: Linear) -> bool:
    """Whether its weight is cast as its class does it, perhaps before a step."""
    cast = vars(matrix).get("cast_weight")
    return cast is None or getattr(cast, "func", None) is _cast_once


def _are_alike(*matrices: nn.Module) -> bool:
    """Whether all or none of those that are Linear have a bias."""
    biases = [matrix.bias is None for matrix in matrices if isinstance(matrix, Linear)]
    return len(set(biases)) <= 1


@contextlib.contextmanager
def cached_weight_casts(model: Thinker) -> Iterator[None]:
    """Context in which Linear.cast_weight() of each matrix casts once; gradients accumulate in the
    fp32 weights."""
    dtype = model.dtype
    # FSDP2 gathers the weights of blocks in the activation dtype.
    is_cast = dtype != model.embedding.weight.dtype and not hasattr(model, "unshard")
    replaced: list[nn.Module] = []
    try:
        if is_cast:
            for module in model.modules():
                if isinstance(module, Linear) and "cast_weight" not in vars(module):
                    vars(module)["cast_weight"] = partial(
                        _cast_once, module.cast_weight, module.cast_weight(dtype)
                    )
                    replaced.append(module)
        yield
    finally:
        for module in replaced:
            del vars(module)["cast_weight"]


def _cast_once(
    plain: Callable[[torch.dtype], Tensor], weight: Tensor, dtype: torch.dtype
) -> Tensor:
    """The weight that was cast before, or what the module itself returns for another dtype."""
    return weight if weight.dtype == dtype else plain(dtype)


def proven(kernels: Kernels, model: Thinker) -> Kernels:
    """The kernels without those forms that compute something else than the model as it is written
    now."""
    if not kernels.forms or proof.is_fake(model):
        return kernels
    used = {type(module) for module in model.modules()} & set(kernels.forms)
    rates = {module.p for module in model.modules() if type(module) is nn.Dropout}
    key = ("training", *kernels.forms, *sorted(rates))
    wrong = proof.kept(key, model, partial(_disproved, kernels.forms, model, rates))
    if not wrong & used:
        return kernels
    forms = {kind: form for kind, form in kernels.forms.items() if kind not in wrong}
    problem = proof.describe_difference(wrong & used, "training")
    return Kernels(forms, kernels.is_native, problem)


def _disproved(forms: Forms, model: Thinker, rates: set[float]) -> frozenset[type]:
    """The types of modules for which a form computes something else."""
    with proof.own_random_numbers() as noise:
        wrong = set(forms) - {nn.Dropout, Thinker}
        with contextlib.suppress(Exception):  # of an edited model, which training as written shows
            wrong = _different_kinds(forms, model, noise)
        if nn.Dropout in forms and not all(map(keeps_contract, rates)):
            wrong.add(nn.Dropout)
        if Thinker in forms:
            wrong.add(Thinker)
            with contextlib.suppress(Exception):
                if has_same_loss(noise) and _accepts_a_loss(model):
                    wrong.remove(Thinker)
    return frozenset(wrong)


def _different_kinds(forms: Forms, model: Thinker, noise: proof.Noise) -> set[type]:
    """Compare modules with their faster form, in each layer of a twin, and in the real shape."""
    wrong: set[type] = set()
    twin = proof.narrow_twin(model, noise).to(model.device)
    block = proof.real_block(model, noise)
    positions = proof.positions_to_compare(model.config.max_seq_len).to(model.device)

    def compare(
        modules: nn.Module, chosen: Tensor, dtype: torch.dtype, gradients: bool, n_rows: int = 1
    ) -> None:
        for module in modules.modules():
            kind = type(module)
            if kind not in forms or kind in wrong or kind in (nn.Dropout, Thinker):
                continue
            method, form = next(iter(forms[kind].items()))
            if not is_known(module, method):
                continue
            if kind is Linear and not _casts_plainly(module):
                # The others give the weight the gradient of its cast, too.
                wrong.update({Linear, MLP, Attention, LinearAttention} & set(forms))
                continue
            plain, fast = getattr(module, method), partial(form, module)
            parameters = list(module.parameters())
            if isinstance(module, Attention):
                rope = None
                if twin.rope is not None:
                    rope = twin.rope(chosen, model.config.max_seq_len, dtype)
                plain, fast = partial(plain, rope=rope), partial(fast, rope=rope)
                parameters = [p for name, p in module.named_parameters() if _is_projected(name)]
            x = noise((n_rows, len(chosen), _width(module))).to(model.device, dtype)
            tolerance = FP32_TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
            if not gradients:
                parameters = None
            if not proof.agree(plain, fast, x, parameters, tolerance):
                wrong.add(kind)

    ends = torch.cat((positions[:GRADIENT_POSITIONS], positions[-GRADIENT_POSITIONS:])).unique()
    compare(twin, positions, torch.float32, gradients=False)
    compare(twin, ends, torch.float32, gradients=True)
    some = positions[:REAL_POSITIONS]
    n_rows = 1
    if Linear in forms and tiles.has_fast_linear():
        n_rows = -(-tiles.MIN_LINEAR_TOKENS // len(some))
    if block is not None:
        compare(block, some, torch.float32, gradients=True)
        compare(block, some, torch.bfloat16, gradients=True, n_rows=n_rows)
    else:  # comparing a block in the real shape would take too long
        compare(twin, some, torch.bfloat16, gradients=True, n_rows=n_rows)
    if "attend" in forms.get(Attention, {}) and not _attends_alike(twin, block, noise):
        wrong.add(Attention)
    return wrong


def _attends_alike(twin: Thinker, block: nn.Module | None, noise: proof.Noise) -> bool:
    """Compare attend() with each layer of a twin, and with a block in the real shape."""
    config = twin.config
    n_positions = min(config.max_seq_len, ATTENTION_POSITIONS)
    masks = MaskBuilder.of_model(config, torch.bfloat16, twin.device, "auto")
    query = TokenInfo(torch.arange(n_positions, device=twin.device))
    if masks.by_token or config.positions == "relative":
        return True  # such masks need a pass of the model, and the kernel computes none of them
    layers = list(twin.modules())
    if block is not None:
        layers += list(block.modules())
    causal = [mask for mask in masks.whole_sequence(query).masks if _is_causal(mask)]
    if not causal:
        return True
    for layer in layers:
        if type(layer) is Attention and not _agrees(layer, causal[0], n_positions, noise):
            return False
    return True


def _agrees(attention: Attention, mask: AttentionMask, T: int, noise: proof.Noise) -> bool:
    """Whether both forms of attend() have the same result and gradients."""
    H, K, D = attention.n_heads, attention.n_kv_heads, attention.head_dim

    def of_joined(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        heads = x.transpose(1, 2)  # (1, H + 2K, T, D)
        q, k, v = heads.split((H, K, K), dim=1)
        return function(q, k, v, mask, None)

    x = noise((1, T, H + 2 * K, D)).to(torch.bfloat16)
    plain = partial(of_joined, attention.attend)
    fast = partial(of_joined, partial(attend, attention))
    return proof.agree(plain, fast, x, [], BF16_TOLERANCE)


def _casts_plainly(module: Linear) -> bool:
    """Whether the matrix that is multiplied by is the weight, so that both have one gradient."""
    with torch.enable_grad():
        cast = module.cast_weight(torch.bfloat16)
        (grad,) = torch.autograd.grad(cast.float().sum(), module.weight)
    return torch.equal(cast, module.weight.to(torch.bfloat16)) and bool((grad == 1).all())


def _is_projected(name: str) -> bool:
    """Whether a parameter of Attention is one of project()."""
    return name.partition(".")[0] in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")


def _width(module: nn.Module) -> int:
    if isinstance(module, RMSNorm):
        return len(module.weight)
    if isinstance(module, MLP):
        return module.gate_proj.in_features
    if isinstance(module, Linear):
        return module.in_features
    return module.q_proj.in_features


def has_same_loss(noise: proof.Noise) -> bool:
    """Whether the kernel of the loss computes what the model's own function does."""
    logits = 4 * noise((LOSS_ROWS, LOSS_TOKENS))
    targets = torch.arange(LOSS_ROWS) * 7 % LOSS_TOKENS
    targets[3] = IGNORE_INDEX
    for dtype, tolerance in ((torch.float32, FP32_TOLERANCE), (torch.bfloat16, BF16_TOLERANCE)):
        for needs_gradient in (True, False):
            values = logits.to(dtype)
            known = loss_and_gradient(values.clone(), targets, needs_gradient)
            found = native.loss_and_gradient(values.clone(), targets, needs_gradient)
            if not proof.is_near(found[0], known[0], FP32_TOLERANCE):
                return False
            if needs_gradient and not proof.is_near(found[1], known[1], tolerance):
                return False
    return True


def _accepts_a_loss(model: Thinker) -> bool:
    """Whether forward(), which may be edited, takes the loss that loss() passes."""
    parameters = inspect.signature(type(model).forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes_any or "chunk_loss" in parameters


def keeps_contract(p: float) -> bool:
    """Whether the kernel drops this share, divides by the rest, and has the same mask in the
    backward pass."""
    if p == 0:
        return True
    with torch.enable_grad():
        x = torch.ones(DROPOUT_ELEMENTS, requires_grad=True)
        y = native.dropout(x, p)
        (grad,) = torch.autograd.grad(y.sum(), x)
    share = float((y == 0).float().mean())
    deviation = (p * (1 - p) / DROPOUT_ELEMENTS) ** 0.5
    kept = torch.tensor(1 / (1 - p))
    has_scale = bool(((y == 0) | ((y - kept).abs() <= 1e-6 * kept)).all())
    return abs(share - p) < 6 * deviation and has_scale and torch.equal(y, grad)
