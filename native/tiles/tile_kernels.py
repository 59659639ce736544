"""Matrix products and causal attention of a training step in bf16 on a CPU; see tiles/."""

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from thinker.native.training import Heads, load_training_library, place_heads

DOT_PRODUCTS, AMX = 1, 2  # in tiles/products.h
NO_EPILOGUE, SWIGLU, SWIGLU_BACKWARD = 0, 1, 2  # in tiles/activation_product.h
MIN_LINEAR_TOKENS = 256  # of linear(): the fewest with which it was measured to be faster
# Elements of a weight; with three times as many, activation_product() was slower than torch's.
MAX_WEIGHT_ELEMENTS = 6 << 20


class _TileAttention(Structure):
    """The arguments of attend() and attend_backward(); see tiles/causal_attention.h."""

    _fields_ = [
        *[(name, c_int64) for name in ("B", "H", "K", "T", "D")],
        ("scale", c_double),
        *[(name, Heads) for name in ("q", "k", "v", "y")],
        ("log_sums", c_void_p),
        *[(name, Heads) for name in ("y_grad", "q_grad", "k_grad", "v_grad")],
    ]


class _ActivationProduct(Structure):
    """The arguments of activation_product(); see tiles/activation_product.h."""

    _fields_ = [
        *[(name, c_int64) for name in ("n_tokens", "n_in", "n_out", "epilogue")],
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("w", c_void_p),
        ("is_transposed", c_int64),
        *[(name, c_void_p) for name in ("gate_up", "y")],
    ]


class _WeightGradient(Structure):
    """The arguments of weight_gradient(); see tiles/weight_gradient.h."""

    _fields_ = [
        *[(name, c_int64) for name in ("n_tokens", "n_out", "n_in")],
        *[(name, c_void_p) for name in ("y_grad", "x")],
        *[(name, c_int64) for name in ("y_grad_stride", "x_stride")],
        ("w_grad", c_void_p),
    ]


def has_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether causal_attention() can compute with these on this processor, and is worth it."""
    if any(x.dtype != torch.bfloat16 or x.device.type != "cpu" for x in (q, k, v)):
        return False
    if q.shape[2] != k.shape[2] or k.shape != v.shape or q.shape[-1] % 32 != 0:
        return False
    if q.numel() == 0:
        return False
    return load_training_library().tile_support() > 0


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal softmax(scale · q kᵀ) v: q (B, H, T, D), k, v (B, K, T, D) -> (B, H, T, D), in bf16.

    The result lies in memory as (B, T, H, D).
    """
    return _CausalAttention.apply(q, k, v, scale)


def has_linear(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether linear() can compute with these on this processor, and is worth it."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return False
    if x.shape[-1] % 32 != 0 or x.numel() < MIN_LINEAR_TOKENS * x.shape[-1]:
        return False
    for weight in weights:
        if not _is_plain_weight(weight) or weight.shape[1] != x.shape[-1]:
            return False
    if sum(map(len, weights)) % 32 != 0:
        return False
    return has_fast_linear()


def _is_plain_weight(weight: Tensor) -> bool:
    """Whether it is a matrix in fp32 that is not sharded, nor without values as in estimates."""
    return weight.dtype == torch.float32 and type(weight) is torch.nn.Parameter


def has_fast_linear() -> bool:
    """Whether this processor has AMX or AVX512-BF16, with which linear() was measured to be
    faster."""
    return load_training_library().tile_support() > 0


def has_fast_activation_product(n_elements: int) -> bool:
    """Whether activation_product() with a weight of so many elements is faster than torch's
    product. With AMX, that was not measured."""
    if n_elements > MAX_WEIGHT_ELEMENTS:
        return False
    return load_training_library().tile_support() == DOT_PRODUCTS


def linear(
    x: Tensor, cast_weight: Tensor, bias: Tensor | None, weights: Sequence[Tensor]
) -> Tensor:
    """x · cast_weightᵀ + bias, (..., n_in) -> (..., n_out), in bf16; the gradients of the weights
    are summed in fp32.

    `weights` in fp32, whose rows together are those of cast_weight, which needs no gradient.
    """
    return _Linear.apply(x, cast_weight, bias, *weights)


def has_swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> bool:
    """Whether swiglu_mlp() can compute with these weights on this processor, and is worth it."""
    width = len(gate)
    if len(up) != width or down.shape[1] != width or width % 32 != 0:
        return False
    if not _is_plain_weight(down) or len(down) % 32 != 0:
        return False
    return has_linear(x, [gate, up]) and has_fast_activation_product(2 * gate.numel())


def swiglu_mlp(x: Tensor, cast_weights: tuple[Tensor, Tensor], weights: Sequence[Tensor]) -> Tensor:
    """(silu(x gateᵀ) · x upᵀ) downᵀ, (..., C) -> (..., C), in bf16; the gradients of the weights
    are summed in fp32.

    cast_weights: gate and up as one matrix (2 d_ff, C), and down (C, d_ff), in bf16. They need no
    gradient. `weights`: gate, up and down in fp32.
    """
    return _SwiGLUMLP.apply(x, *cast_weights, *weights)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = map(_with_unit_stride, (q, k, v))
        B, H, T, _ = q.shape
        y = _new_heads(q)
        log_sums = torch.empty(B, H, T, dtype=torch.float32, device="cpu")
        heads = {"q": q, "k": k, "v": v, "y": y}
        _attend("attend", heads, log_sums, scale)
        ctx.save_for_backward(q, k, v, y, log_sums)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, log_sums = ctx.saved_tensors
        grads = (_new_heads(q), _new_heads(k), _new_heads(v))
        heads = {"q": q, "k": k, "v": v, "y": y, "y_grad": _with_unit_stride(y_grad)}
        heads |= zip(("q_grad", "k_grad", "v_grad"), grads)
        _attend("attend_backward", heads, log_sums, ctx.scale)
        return *grads, None


def _with_unit_stride(x: Tensor) -> Tensor:
    """x, or a copy of it whose last dimension lies together."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _new_heads(x: Tensor) -> Tensor:
    """A new tensor of the shape of x (B, heads, T, D), in memory as (B, T, heads, D)."""
    B, n_heads, T, D = x.shape
    return x.new_empty(B, T, n_heads, D).transpose(1, 2)


def _attend(name: str, heads: dict[str, Tensor], log_sums: Tensor, scale: float) -> None:
    """Call attend() or attend_backward() of tiles/causal_attention.h. heads: by field."""
    q = heads["q"]
    if isinstance(q, FakeTensor):
        return
    B, H, T, D = q.shape
    arguments = _TileAttention(B=B, H=H, K=heads["k"].shape[1], T=T, D=D, scale=scale)
    arguments.log_sums = log_sums.data_ptr()
    for field, tensor in heads.items():
        place_heads(getattr(arguments, field), tensor)
    _call(name, arguments)


def _call(name: str, arguments: Structure) -> None:
    """Call a function that returns 0 if it finds no memory."""
    function = getattr(load_training_library(), name)
    if not function(ctypes.byref(arguments), torch.get_num_threads()):
        raise MemoryError(f"no memory for {name}()")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cast_weight: Tensor, bias: Tensor | None, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, cast_weight)
        ctx.n_rows = [len(weight) for weight in weights]
        if bias is None and has_fast_activation_product(cast_weight.numel()):
            return activation_product(x, cast_weight.T)
        return F.linear(x, cast_weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: Tensor) -> tuple[Tensor | None, ...]:
        x, cast_weight = ctx.saved_tensors
        needs_x_grad, _, needs_bias_grad, *need_grads = ctx.needs_input_grad
        x_grad = bias_grad = None
        grads: Sequence[Tensor | None] = [None] * len(need_grads)
        if needs_x_grad:
            x_grad = input_gradient(y_grad, cast_weight)
        if needs_bias_grad:
            bias_grad = y_grad.flatten(0, -2).sum(0)
        if any(need_grads):
            grads = weight_gradient(y_grad, x).split(ctx.n_rows)
        return x_grad, None, bias_grad, *grads


class _SwiGLUMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, *weights: Tensor
    ) -> Tensor:
        gate_up = x.new_empty(*x.shape[:-1], len(gate_up_weight))
        hidden = activation_product(x, gate_up_weight.T, SWIGLU, gate_up)
        ctx.save_for_backward(x, gate_up_weight, down_weight, gate_up, hidden)
        return activation_product(hidden, down_weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up_weight, down_weight, gate_up, hidden = ctx.saved_tensors
        needs_x_grad, _, _, *need_grads = ctx.needs_input_grad
        gate_up_grad = activation_product(y_grad, down_weight, SWIGLU_BACKWARD, gate_up)
        x_grad = None
        if needs_x_grad:
            x_grad = activation_product(gate_up_grad, gate_up_weight)
        gate_grad = up_grad = down_grad = None
        if need_grads[0] or need_grads[1]:
            gate_grad, up_grad = weight_gradient(gate_up_grad, x).chunk(2)
        if need_grads[2]:
            down_grad = weight_gradient(y_grad, hidden)
        return x_grad, None, None, gate_grad, up_grad, down_grad


def input_gradient(y_grad: Tensor, weight: Tensor) -> Tensor:
    """y_grad weight: (..., n_out) and (n_out, n_in) -> (..., n_in)."""
    if has_fast_activation_product(weight.numel()):
        return activation_product(y_grad, weight)
    return y_grad @ weight


def activation_product(
    x: Tensor, w: Tensor, epilogue: int = NO_EPILOGUE, gate_up: Tensor | None = None
) -> Tensor:
    """x w: (..., n_in) and (n_in, n_out) -> (..., n_out), in bf16.

    What follows the product is computed with it, as its epilogue. SWIGLU: x w is gate and up, which
    `gate_up` receives, (..., 2 width). Returns silu(gate) · up, (..., width). SWIGLU_BACKWARD: x w
    is the gradient of that. Returns that of `gate_up`.
    """
    rows = _with_unit_stride(x.flatten(0, -2))
    n_in, n_out = w.shape
    width = {NO_EPILOGUE: n_out, SWIGLU: n_out // 2, SWIGLU_BACKWARD: 2 * n_out}[epilogue]
    y = x.new_empty(*x.shape[:-1], width)
    is_transposed = w.T.is_contiguous()
    if not is_transposed:
        w = w.contiguous()
    if rows.shape[1] != n_in or x.dtype != torch.bfloat16 or w.dtype != torch.bfloat16:
        raise RuntimeError(f"no product of {x.dtype} {(*x.shape,)} and {w.dtype} {(*w.shape,)}")
    arguments = _ActivationProduct(n_tokens=len(rows), n_in=n_in, n_out=n_out, epilogue=epilogue)
    arguments.x = rows.data_ptr()
    arguments.x_stride = rows.stride(0)
    arguments.w = w.data_ptr()
    arguments.is_transposed = is_transposed
    arguments.y = y.data_ptr()
    if epilogue != NO_EPILOGUE:
        gate_up_width = n_out if epilogue == SWIGLU else 2 * n_out
        assert gate_up.shape == (*x.shape[:-1], gate_up_width)
        assert gate_up.is_contiguous()
        assert gate_up.dtype == torch.bfloat16
        arguments.gate_up = gate_up.data_ptr()
    _call("activation_product", arguments)
    return y


def weight_gradient(y_grad: Tensor, x: Tensor) -> Tensor:
    """y_gradᵀ x over all tokens: (..., n_out) and (..., n_in) -> (n_out, n_in) in fp32."""
    y_grad = _with_unit_stride(y_grad.flatten(0, -2))
    x = _with_unit_stride(x.flatten(0, -2))
    n_tokens, n_out = y_grad.shape
    w_grad = x.new_empty(n_out, x.shape[1], dtype=torch.float32)
    if n_tokens == 0:
        return w_grad.zero_()
    arguments = _WeightGradient(n_tokens=n_tokens, n_out=n_out, n_in=x.shape[1])
    arguments.y_grad = y_grad.data_ptr()
    arguments.x = x.data_ptr()
    arguments.y_grad_stride = y_grad.stride(0)
    arguments.x_stride = x.stride(0)
    arguments.w_grad = w_grad.data_ptr()
    _call("weight_gradient", arguments)
    return w_grad
