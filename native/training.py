"""Fused operations of a training step on a CPU; see train.c. For fp32 and bf16 activations, with
fp32 inside."""

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from thinker.native.compiler import compiled

N_PARTS = 48  # PARTS in rows.h
# Without it GCC does not vectorize loops that choose between two numbers.
FLAG = "-fno-trapping-math"
# By function of train.c, a letter of compiler.TYPES for each argument; the last one is the number
# of threads.
SIGNATURES = {
    "rms_norm": "pipdiipi",
    "rms_norm_backward": "ppipdiipppi",
    "rotate_heads": "pi",
    "rotate_heads_backward": "pi",
    "swiglu": "piiipi",
    "swiglu_backward": "ppiiipi",
    "dropout": "piipdpi",
    "cross_entropy": "piiippii",
    "tile_support": "",
    "attend": "pi",
    "attend_backward": "pi",
    "activation_product": "pi",
    "weight_gradient": "pi",
    "muon_momentum": "ppiiidipii",
    "muon_update": "pippiiidddipi",
}
WITH_RESULT = ("tile_support", "attend", "attend_backward", "activation_product", "weight_gradient")


@cache
def load_training_library() -> ctypes.CDLL:
    """The compiled train.c, which takes a few seconds, not half a minute.

    Raises UserError as compiler.load_library() does.
    """
    library = compiled("train.c", SIGNATURES, FLAG)
    for name in WITH_RESULT:
        getattr(library, name).restype = c_int64
    return library


class Heads(Structure):
    """Heads (B, heads, T, D) by strides in elements; that of D is 1."""

    _fields_ = [("data", c_void_p), *[(name, c_int64) for name in ("batch", "head", "position")]]


class _Rotation(Structure):
    """The arguments of rotate_heads(); see train.c."""

    _fields_ = [
        *[(name, c_int64) for name in ("is_bf16", "B", "T", "H", "K", "D")],
        ("x", c_void_p),
        ("norms", c_void_p * 2),
        ("eps", c_double),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("table_batch", c_int64),
        ("heads", Heads * 3),
        ("x_grad", c_void_p),
        ("norm_grads", c_void_p * 2),
        ("partial", c_void_p),
    ]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight: x (..., width), weight (width,)."""
    return _RMSNorm.apply(x, weight, eps)


def rotate_heads(
    qkv: Tensor,
    H: int,
    K: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    rope: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv (B, T, (H + 2K) · D) into q (B, H, T, D), k and v (B, K, T, D), with RMSNorm and
    RoPE of q and k.

    The norms have weights (D,), or None: no norm. rope: the tables of model.positions.Rope in qkv's
    dtype, or None.
    """
    return _RotateHeads.apply(qkv, H, K, q_weight, k_weight, eps, rope)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, for (..., 2 · width) with gate first -> (..., width)."""
    return _SwiGLU.apply(gate_up)


def dropout(x: Tensor, p: float) -> Tensor:
    """Set elements to zero with probability p and divide the others by 1 - p; uses torch's default
    generator."""
    return _Dropout.apply(x, p)


def loss_and_gradient(
    logits: Tensor, targets: Tensor, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy of logits (n, V) with targets (n,): in nats (n,), fp32, and the gradient, which
    replaces the logits. As the function of this name in model/kernels/linear_cross_entropy.py."""
    logits = logits.contiguous()
    losses = torch.empty(len(logits), dtype=torch.float32, device="cpu")
    inputs = (logits, _is_bf16(logits), *logits.shape, targets.contiguous())
    _run("cross_entropy", *inputs, losses, needs_gradient)
    return losses, logits if needs_gradient else None


def muon_momentum(
    grads: list[Tensor], momenta: list[Tensor], momentum: float, nesterov: bool, dtype: torch.dtype
) -> Tensor:
    """Update the momenta of matrices of one shape, fp32. Returns their updates (n, rows, columns)
    in fp32 or bf16."""
    grads = [grad.contiguous() for grad in grads]
    updates = grads[0].new_empty(len(grads), *grads[0].shape, dtype=dtype)
    _run(
        "muon_momentum",
        grads,
        momenta,
        *updates.shape,
        momentum,
        nesterov,
        updates,
        _is_bf16(updates),
    )
    return updates


def muon_update(
    updates: Tensor,
    row_second_moments: list[Tensor],
    weights: list[Tensor],
    weight: float,
    lr: float,
    decay: float,
    is_cautious: bool,
) -> None:
    """Normalize the rows of updates (n, rows, columns), decay the weights and move them, as
    training.muon.Muon does.

    row_second_moments (rows, 1) and weights (rows, columns) of each matrix, fp32; `weight`: of the
    new squares.
    """
    updates = updates.contiguous()
    factors = updates.new_empty(updates.shape[:2], dtype=torch.float32)
    _run(
        "muon_update",
        updates,
        _is_bf16(updates),
        row_second_moments,
        weights,
        *updates.shape,
        weight,
        lr,
        decay,
        is_cautious,
        factors,
    )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        w = weight.float().contiguous()
        width = x.shape[-1]
        _run("rms_norm", x, _is_bf16(x), w, eps, x.numel() // width, width, y)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        w = weight.float().contiguous()
        width = x.shape[-1]
        n_rows = x.numel() // width
        x_grad = torch.empty_like(x)
        w_grad = torch.empty_like(w)
        inputs = (grad, x, _is_bf16(x), w, ctx.eps, n_rows, width)
        _run("rms_norm_backward", *inputs, x_grad, w_grad, _partial(width))
        return x_grad, w_grad.to(weight.dtype), None


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        H: int,
        K: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        rope: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.contiguous()
        B, T, width = qkv.shape
        D = width // (H + 2 * K)
        # Rows of heads in memory, as in qkv.
        q, k, v = (qkv.new_empty(B, T, n, D).transpose(1, 2) for n in (H, K, K))
        cos = sin = None
        if rope is not None:
            cos, sin = rope
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.H = H
        ctx.K = K
        ctx.eps = eps
        _rotate("rotate_heads", qkv, H, K, (q_weight, k_weight), eps, (cos, sin), (q, k, v))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        weights = (q_weight, k_weight)
        heads = []
        for grad in grads:
            if grad.stride(-1) != 1:
                grad = grad.contiguous()
            heads.append(grad)
        results = _Gradients(torch.empty_like(qkv), [])
        for weight in weights:
            like = None
            if weight is not None:
                like = torch.empty_like(weight, dtype=torch.float32)
            results.weights.append(like)
        shape = (ctx.H, ctx.K)
        _rotate("rotate_heads_backward", qkv, *shape, weights, ctx.eps, (cos, sin), heads, results)
        weight_grads = []
        for weight, grad in zip(weights, results.weights):
            if weight is not None:
                grad = grad.to(weight.dtype)
            weight_grads.append(grad)
        return results.qkv, None, None, *weight_grads, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        _run("swiglu", gate_up, _is_bf16(gate_up), out.numel() // width, width, out)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad = grad.contiguous()
        width = grad.shape[-1]
        n_rows = grad.numel() // width
        out = torch.empty_like(gate_up)
        _run("swiglu_backward", grad, gate_up, _is_bf16(gate_up), n_rows, width, out)
        return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), device="cpu")
        ctx.save_for_backward(seed)
        ctx.p = p
        return _drop(x, seed, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (seed,) = ctx.saved_tensors
        return _drop(grad, seed, ctx.p), None


def _drop(x: Tensor, seed: Tensor, p: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _run("dropout", x, _is_bf16(x), x.numel(), seed, p, out)
    return out


class _Gradients(NamedTuple):
    """What the backward pass of _RotateHeads fills, by its input."""

    qkv: Tensor
    weights: list[Tensor | None]


def _rotate(
    name: str,
    qkv: Tensor,
    H: int,
    K: int,
    weights: tuple[Tensor | None, Tensor | None],
    eps: float,
    rope: tuple[Tensor | None, Tensor | None],
    heads: Sequence[Tensor],
    results: _Gradients | None = None,
) -> None:
    """Call rotate_heads() of train.c, or rotate_heads_backward(), which fills `results`."""
    B, T, width = qkv.shape
    D = width // (H + 2 * K)
    cos, sin = (None if table is None else table.contiguous() for table in rope)
    weights = [None if weight is None else weight.float().contiguous() for weight in weights]
    assert all(table is None or table.dtype == qkv.dtype for table in (cos, sin))
    if isinstance(qkv, FakeTensor):
        return
    rotation = _Rotation(
        is_bf16=_is_bf16(qkv),
        B=B,
        T=T,
        H=H,
        K=K,
        D=D,
        x=qkv.data_ptr(),
        norms=_pointers(weights),
        eps=eps,
        cosines=_pointer(cos),
        sines=_pointer(sin),
    )
    if cos is not None and cos.dim() == 4 and len(cos) > 1:
        rotation.table_batch = T * D
    if results is not None:
        partial = _partial(2 * D)
        rotation.partial = partial.data_ptr()
        rotation.x_grad = results.qkv.data_ptr()
        rotation.norm_grads = _pointers(results.weights)
    for place, tensor in zip(rotation.heads, heads):
        place_heads(place, tensor)
    getattr(load_training_library(), name)(ctypes.byref(rotation), torch.get_num_threads())


def place_heads(place: Heads, tensor: Tensor) -> None:
    """Say where the heads of a tensor (B, heads, T, D) are."""
    place.data = tensor.data_ptr()
    place.batch, place.head, place.position, _ = tensor.stride()


def _run(name: str, *arguments: Tensor | list[Tensor] | int | float) -> None:
    """Call a function of train.c, whose last argument is the number of threads.

    Fake tensors have no data to read.
    """
    if any(isinstance(argument, FakeTensor) for argument in arguments):
        return
    values = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            argument = argument.data_ptr()
        elif isinstance(argument, list):
            for tensor in argument:
                assert tensor.is_contiguous()
                assert tensor.dtype == torch.float32
            argument = _pointers(argument)
        values.append(argument)
    getattr(load_training_library(), name)(*values, torch.get_num_threads())


def _partial(width: int) -> Tensor:
    """Space for the sums of each part of the rows, zeros (N_PARTS, width)."""
    return torch.zeros(N_PARTS, width, dtype=torch.float32, device="cpu")


def _is_bf16(x: Tensor) -> bool:
    assert x.dtype in (torch.float32, torch.bfloat16), x.dtype
    return x.dtype == torch.bfloat16


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointers(tensors: list[Tensor | None]) -> ctypes.Array:
    return (c_void_p * len(tensors))(*map(_pointer, tensors))
