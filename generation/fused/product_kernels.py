# ruff: noqa: ANN001, ANN201 - Triton takes pointers, and reads annotations: only constants have one
"""Triton kernels of one decoding step of a single text: the embedding, products, the LM head.

Sizes: C, the width of the model; F, of the MLP; V, of the vocabulary. Activations are in fp32.

A product has one row per output. A program computes ROWS outputs by multiply-adds, reads BLOCK
columns at once, and sums in fp32. HAS_SCALES: the weights are codes in 8 bits with a scale per 32
columns (see native.quantization).

OVERLAP: with programmatic dependent launch, a kernel starts before the previous one ends. It reads
its first weights and then waits, before it touches what other kernels read or write. Every kernel
waits, so that waiting for the previous one is waiting for all of them.
"""

from __future__ import annotations  # without Triton, tl.constexpr is only a text

from thinker.generation.fused.sampling_kernels import store_summary
from thinker.generation.fused.triton_names import gdc_launch_dependents, gdc_wait, jit, tl


@jit
def embed_kernel(
    tokens, embedding, x, C: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr
):
    """The row of each token: embedding (V, C), tokens (texts,) -> x (texts, C)."""
    text = tl.program_id(0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, PADDED)
    is_column = column < C
    row = tl.load(embedding + tl.load(tokens + text) * C + column, mask=is_column)
    tl.store(x + text * C + column, row.to(tl.float32), mask=is_column)


@jit
def dense_sums(
    v, gain, w, row, is_row,
    N_COLUMNS: tl.constexpr, HAS_NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of w (any, N_COLUMNS) times v (N_COLUMNS,), with HAS_NORM times gain: (ROWS,) of fp32.

    Also returns the sum of the squares of v.
    """
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, N_COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < N_COLUMNS
        mask = is_row[:, None] & is_column[None, :]
        row_w = tl.load(w + row[:, None] * N_COLUMNS + column[None, :], mask=mask, other=0)
        if OVERLAP and start == 0:
            gdc_wait()
        values = tl.load(v + column, mask=is_column, other=0)
        squares += values * values
        if HAS_NORM:
            values *= tl.load(gain + column, mask=is_column, other=0).to(tl.float32)
        sums += row_w.to(tl.float32) * values[None, :]
    return tl.sum(sums, 1), tl.sum(squares, 0)


@jit
def codes_to_floats(codes):
    """int8 to fp32 by two fast instructions: bits of 2^23 + 128 + code, and a subtraction.

    A GPU has few units for other conversions, which take longer than reading the codes.
    """
    bits = codes.to(tl.uint8, bitcast=True).to(tl.uint32) ^ 0x4B000080
    return bits.to(tl.float32, bitcast=True) - 8388736.0


@jit
def quantized_sums(
    v, gain, w, scales, row, is_row,
    N_COLUMNS: tl.constexpr, HAS_NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """As dense_sums(), for codes w (any, N_GROUPS, 32) in int8 with scales (any, N_GROUPS)."""
    N_GROUPS: tl.constexpr = (N_COLUMNS + 31) // 32
    sums = tl.zeros([ROWS, BLOCK // 32], tl.float32)
    squares = tl.zeros([BLOCK // 32, 32], tl.float32)
    for start in tl.static_range(0, N_GROUPS, BLOCK // 32):
        group = start + tl.arange(0, BLOCK // 32)
        is_group = is_row[:, None] & (group < N_GROUPS)[None, :]
        column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        is_column = column < N_COLUMNS
        at = row[:, None, None] * (N_GROUPS * 32) + column[None, :, :]
        codes = tl.load(w + at, mask=is_group[:, :, None], other=0)
        scale = tl.load(scales + row[:, None] * N_GROUPS + group[None, :], mask=is_group, other=0)
        if OVERLAP and start == 0:
            gdc_wait()
        values = tl.load(v + column, mask=is_column, other=0)
        squares += values * values
        if HAS_NORM:
            values *= tl.load(gain + column, mask=is_column, other=0).to(tl.float32)
        sums += tl.sum(codes_to_floats(codes) * values[None, :, :], 2) * scale.to(tl.float32)
    return tl.sum(sums, 1), tl.sum(tl.sum(squares, 1), 0)


@jit
def product(
    v, w, scales, row, is_row,
    N_COLUMNS: tl.constexpr, HAS_SCALES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of w (any, N_COLUMNS) times v (N_COLUMNS,): (ROWS,) of fp32."""
    if HAS_SCALES:
        sums, _ = quantized_sums(
            v, v, w, scales, row, is_row, N_COLUMNS, False, ROWS, BLOCK, OVERLAP
        )
    else:
        sums, _ = dense_sums(v, v, w, row, is_row, N_COLUMNS, False, ROWS, BLOCK, OVERLAP)
    return sums


@jit
def normed_product(
    x, norm, w, scales, row, is_row,
    C: tl.constexpr, EPS: tl.constexpr, HAS_SCALES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of w (any, C) times RMSNorm of x (C,): (ROWS,) of fp32.

    The norm divides by one number, so the division comes after the sums, and x is read only once.
    """
    if HAS_SCALES:
        sums, squares = quantized_sums(
            x, norm, w, scales, row, is_row, C, True, ROWS, BLOCK, OVERLAP
        )
    else:
        sums, squares = dense_sums(x, norm, w, row, is_row, C, True, ROWS, BLOCK, OVERLAP)
    return sums * tl.rsqrt(squares / C + EPS)


@jit
def normed_product_kernel(
    x, norm, w, scales, bias, out,
    N_ROWS: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """RMSNorm and a product: out (N_ROWS,) = w (N_ROWS, C) norm(x) + bias (N_ROWS,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < N_ROWS
    if OVERLAP:
        gdc_launch_dependents()
    y = normed_product(x, norm, w, scales, row, is_row, C, EPS, HAS_SCALES, ROWS, BLOCK, OVERLAP)
    if HAS_BIAS:
        y += tl.load(bias + row, mask=is_row, other=0).to(tl.float32)
    tl.store(out + row, y, mask=is_row)


@jit
def residual_kernel(
    v, w, scales, x,
    N_ROWS: tl.constexpr, N_COLUMNS: tl.constexpr, HAS_SCALES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add a product to the residual stream: x (N_ROWS,) += w (N_ROWS, N_COLUMNS) v (N_COLUMNS,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < N_ROWS
    if OVERLAP:
        gdc_launch_dependents()
    y = product(v, w, scales, row, is_row, N_COLUMNS, HAS_SCALES, ROWS, BLOCK, OVERLAP)
    before = tl.load(x + row, mask=is_row, other=0)
    tl.store(x + row, before + y, mask=is_row)


@jit
def gate_kernel(
    x, norm, w, scales, out,
    C: tl.constexpr, F: tl.constexpr, EPS: tl.constexpr, HAS_SCALES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm, product with gate and up, and SwiGLU's activation: out (F,) = silu(gate) * up.

    x, norm: (C,); w: (2 F, C), the rows of the gate first.
    """
    first = tl.program_id(0) * ROWS
    both = tl.arange(0, 2 * ROWS)  # the rows of gate and up in turns
    number = first + both // 2
    is_number = number < F
    if OVERLAP:
        gdc_launch_dependents()
    row = number + both % 2 * F
    y = normed_product(
        x, norm, w, scales, row, is_number, C, EPS, HAS_SCALES, 2 * ROWS, BLOCK, OVERLAP
    )
    gate, up = tl.split(tl.reshape(y, [ROWS, 2]))
    row = first + tl.arange(0, ROWS)
    tl.store(out + row, gate / (1 + tl.exp(-gate)) * up, mask=row < F)


@jit
def head_kernel(
    x, norm, w, scales, logits, summary, temperatures, n_ids,
    C: tl.constexpr, V: tl.constexpr, EPS: tl.constexpr, HAS_SCALES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm and product with the LM head, with a summary for sample_kernel().

    x, norm: (C,); w: (V, C); logits: (V,); summary: see summary_kernel().
    """
    part = tl.program_id(0)
    row = part * ROWS + tl.arange(0, ROWS)
    is_row = row < V
    if OVERLAP:
        gdc_launch_dependents()
    y = normed_product(x, norm, w, scales, row, is_row, C, EPS, HAS_SCALES, ROWS, BLOCK, OVERLAP)
    tl.store(logits + row, y, mask=is_row)
    is_id = row < tl.load(n_ids)
    store_summary(y, is_id, temperatures, summary, 0, part, tl.num_programs(0))
