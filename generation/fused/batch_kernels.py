# ruff: noqa: ANN001, ANN201 - Triton takes pointers, and reads annotations: only constants have one
"""Triton kernels of one decoding step of a batch, between products that cuBLAS computes.

Sizes: C, the width of the model; F, of the MLP. The residual stream is in fp32, the factors of
products have the dtype of the weights. A program has one text, or a part of it.
"""

from __future__ import annotations  # without Triton, tl.constexpr is only a text

from thinker.generation.fused.triton_names import jit, tl


@jit
def embed_and_norm_kernel(
    tokens, embedding, x, norm, normed,
    C: tl.constexpr, EPS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The row of each token, embedding (V, C) -> x (texts, C), and its RMSNorm `normed`."""
    text = tl.program_id(0)
    column = tl.arange(0, PADDED)
    is_column = column < C
    row = embedding + tl.load(tokens + text) * C
    values = tl.load(row + column, mask=is_column, other=0).to(tl.float32)
    tl.store(x + text * C + column, values, mask=is_column)
    store_norm(values, norm, normed, text, column, C, EPS)


@jit
def residual_and_norm_kernel(
    y, x, norm, normed, C: tl.constexpr, EPS: tl.constexpr, PADDED: tl.constexpr
):
    """Add a product to the residual stream, x (texts, C) += y, and write its RMSNorm `normed`."""
    text = tl.program_id(0)
    column = tl.arange(0, PADDED)
    is_column = column < C
    at = text * C + column
    values = tl.load(x + at, mask=is_column, other=0)
    values += tl.load(y + at, mask=is_column, other=0).to(tl.float32)
    tl.store(x + at, values, mask=is_column)
    store_norm(values, norm, normed, text, column, C, EPS)


@jit
def store_norm(values, norm, normed, text, column, C: tl.constexpr, EPS: tl.constexpr):
    """Write the RMSNorm of the values of a text."""
    is_column = column < C
    factor = tl.rsqrt(tl.sum(values * values, 0) / C + EPS)
    gain = tl.load(norm + column, mask=is_column, other=0).to(tl.float32)
    result = (values * factor * gain).to(normed.dtype.element_ty)
    tl.store(normed + text * C + column, result, mask=is_column)


@jit
def activation_kernel(gate_up, hidden, F: tl.constexpr, BLOCK: tl.constexpr):
    """SwiGLU's activation: gate_up (texts, 2 F) -> hidden (texts, F) = silu(gate) * up."""
    text = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < F
    at = gate_up + text * 2 * F + column
    gate = tl.load(at, mask=is_column, other=0).to(tl.float32)
    up = tl.load(at + F, mask=is_column, other=0).to(tl.float32)
    values = gate / (1 + tl.exp(-gate)) * up
    tl.store(hidden + text * F + column, values.to(hidden.dtype.element_ty), mask=is_column)
