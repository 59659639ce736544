"""Fused LM head and cross-entropy in chunks: the logits, the largest tensor of a step, are never
stored as a whole."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinker.model.layers import LogitTransform
from thinker.runtime.constants import IGNORE_INDEX

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**27}  # logits per chunk: fit a core's cache or fill a GPU
# bf16 only: as many bytes as 2**27 in bf16 with two fp32 copies.
COMPILED_CHUNK_ELEMENTS = 5 * 2**27
MIN_CHUNK_ROWS = 256  # because each chunk reads and writes the whole weight gradient

# A loss of the next n positions, in order: logits (n, V), targets (n,), whether a gradient is
# needed -> losses (n,) in fp32, and the gradient in the logits' dtype.
ChunkLoss = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


def _sum_dtype(x: Tensor) -> torch.dtype:
    """fp32, or fp64 if x is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def loss_and_gradient(
    logits: Tensor, targets: Tensor, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy of logits (n, V) with targets (n,): in nats (n,), fp32, and the gradient in the
    logits' dtype."""
    is_counted = targets != IGNORE_INDEX  # (n,)
    target = targets.clamp(min=0)[:, None]  # (n, 1)
    log_probs = logits.to(_sum_dtype(logits)).log_softmax(dim=-1)  # (n, V)
    losses = -(log_probs.gather(1, target)[:, 0] * is_counted)
    if not needs_gradient:
        return losses, None
    grad = log_probs.exp_()  # (n, V): softmax − one-hot, and 0 at ignored targets
    grad.scatter_add_(1, target, grad.new_full((), -1.0).expand(target.shape))
    if logits.is_cuda:
        return losses, torch.mul(grad, is_counted[:, None], out=logits)  # one pass, in their dtype
    return losses, grad.mul_(is_counted[:, None]).to(logits.dtype)


def fused_loss_and_gradient(
    logits: Tensor, targets: Tensor, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """loss_and_gradient() in a form that compiles to one kernel, which reads and writes only the
    bf16 logits."""
    ids = torch.arange(logits.shape[1], device=logits.device)  # (V,)
    is_target = ids == targets[:, None]  # (n, V), all False if ignored
    log_probs = logits.to(_sum_dtype(logits)).log_softmax(dim=-1)  # (n, V)
    losses = -torch.where(is_target, log_probs, 0.0).sum(dim=1)
    if not needs_gradient:
        return losses, None
    probs = log_probs.exp()
    grad = torch.where(is_target, probs - 1, probs)
    is_counted = (targets != IGNORE_INDEX)[:, None]  # (n, 1)
    return losses, logits.copy_(grad.where(is_counted, 0.0))


@cache
def _compiled() -> Callable:
    """Compile the fused form once per process, at first use, because importing the compiler takes
    seconds."""
    compiled = torch.compile(fused_loss_and_gradient, fullgraph=True)

    def call(logits: Tensor, targets: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
        for tensor in (logits, targets):  # one program for any number of rows
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(logits, targets, needs_gradient)

    return call


class _LinearCrossEntropy(torch.autograd.Function):
    """Compute gradients in the forward pass, while the logits exist; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        cast_weight: Tensor | None,
        is_compiled: bool,
        target_losses: Tensor | None,
        chunk_loss: ChunkLoss | None,
        bias: Tensor | None,
        transform: LogitTransform | None,
    ) -> Tensor:
        """The sum of the losses of x (N, C) with targets (N,)."""
        w = cast_weight  # (V, C)
        if w is None:
            w = weight.to(x.dtype)
        needs_x_grad, needs_w_grad = ctx.needs_input_grad[:2]
        needs_bias_grad = ctx.needs_input_grad[7]
        needs_gradient = needs_x_grad or needs_w_grad or needs_bias_grad
        cast_bias = None
        bias_grad = None  # (V,)
        if bias is not None:
            cast_bias = bias.to(x.dtype)
        if needs_bias_grad:
            bias_grad = torch.zeros_like(bias, dtype=_sum_dtype(x))
        x_grad = None  # (N, C)
        if needs_x_grad:
            x_grad = torch.empty_like(x)
        w_grad = None  # (V, C)
        total = x.new_zeros((), dtype=_sum_dtype(x))
        n_elements = CHUNK_ELEMENTS.get(x.device.type, 2**24)
        if x.dtype == torch.bfloat16 and x.device.type == "cpu":
            n_elements *= 4  # whose products are so fast that adding them takes longer
        rows = max(MIN_CHUNK_ROWS, n_elements // w.shape[0])
        if is_compiled:
            n_chunks = -(-len(x) * w.shape[0] // COMPILED_CHUNK_ELEMENTS)
            rows = -(-len(x) // n_chunks)
        if chunk_loss is None:
            chunk_loss = _compiled() if is_compiled else loss_and_gradient
        if transform is not None:
            chunk_loss = partial(_transformed, chunk_loss, transform)
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            # Without a name, so that the logits are freed before the next chunk.
            losses, grad = chunk_loss(
                F.linear(x[part], w, cast_bias), targets[part], needs_gradient
            )
            total += losses.sum()
            if target_losses is not None:
                target_losses[part] = losses
            if needs_x_grad:
                torch.mm(grad, w, out=x_grad[part])
            if needs_w_grad:
                w_grad = _add_product(w_grad, grad.T, x[part])
            if needs_bias_grad:
                bias_grad += grad.sum(0, dtype=bias_grad.dtype)
            del losses, grad  # before the logits of the next chunk need memory
        ctx.save_for_backward(x_grad, w_grad, bias_grad)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias, which stand among the arguments of forward()."""
        x_grad, w_grad, bias_grad = ctx.saved_tensors
        if x_grad is not None:
            x_grad = (x_grad * grad).to(x_grad.dtype)  # a loss scale would overflow fp16
        if w_grad is not None:
            w_grad = (w_grad * grad).to(ctx.weight_dtype)
        if bias_grad is not None:
            bias_grad = (bias_grad * grad).to(ctx.weight_dtype)
        return x_grad, w_grad, None, None, None, None, None, bias_grad, None


def _transformed(
    chunk_loss: ChunkLoss,
    transform: LogitTransform,
    logits: Tensor,
    targets: Tensor,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """A chunk_loss of logits that are scaled or capped first."""
    transformed = transform(logits)
    # The loss may write its gradient into the logits that it is given.
    kept = transformed
    if needs_gradient:
        kept = transformed.clone()
    losses, grad = chunk_loss(transformed, targets, needs_gradient)
    if grad is not None:
        grad = transform.gradient(kept, grad)
    return losses, grad


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a·b in fp32 (fp64 for fp64 matrices), for matrices of any dtype; may modify
    `total`."""
    if a.is_cuda and a.dtype.itemsize == 2:
        # Not addmm, which would add in place: torch 2.11 lacks its fake version, which memory
        # estimates need.
        product = torch.mm(a, b, out_dtype=torch.float32)
        if total is None:
            return product
        return total.add_(product)
    if total is None:
        total = a.new_zeros((len(a), b.shape[1]), dtype=_sum_dtype(a))
    if a.dtype == total.dtype:
        return torch.addmm(total, a, b, out=total)
    return total.add_(a @ b)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    cast_weight: Tensor | None = None,
    is_compiled: bool = False,
    target_losses: Tensor | None = None,
    chunk_loss: ChunkLoss | None = None,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of softmax(x · weightᵀ + bias) with `targets`, (B, T) int64: (sum in nats,
    number of targets).

    The sum is in fp32, or fp64 if x is fp64. IGNORE_INDEX is not counted.

    x (B, T, C), whose dtype the products use; weight (V, C); cast_weight: the weight in x's dtype,
    without a gradient. is_compiled: compile softmax, loss and gradient of a chunk; matrix products
    always call the library. target_losses: (B, T) fp32, contiguous; is filled with the loss of each
    target, 0 for IGNORE_INDEX. chunk_loss: replaces the cross-entropy. bias: (V,). transform: of
    the logits, before the loss.
    """
    if not torch.is_grad_enabled():
        # A Function ignores this and would compute the weight's gradient.
        weight = weight.detach()
        if bias is not None:
            bias = bias.detach()
    losses = None
    if target_losses is not None:
        losses = target_losses.view(-1)
    options = (cast_weight, is_compiled, losses, chunk_loss, bias, transform)
    total = _LinearCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), *options)
    return total, (targets != IGNORE_INDEX).sum()
