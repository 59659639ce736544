# ruff: noqa: ANN001, ANN201 - Triton takes pointers, and reads annotations: only constants have one
"""Triton kernels that decode one token: five per layer, then the LM head and the choice of a token.

Sizes: C, the width of the model; D, of a head; F, of the MLP; V, of the vocabulary; N_HEADS query
heads, N_KV heads of keys and values. A cache holds (texts, N_KV, capacity, D) keys or values.

A product has one row per output. A program computes ROWS outputs by multiply-adds, reads BLOCK
columns at once, and sums in fp32. SCALED: weights are int8, with one fp32 scale per row.

OVERLAP: with programmatic dependent launch, a kernel starts before the previous one ends. It reads
its first weights and then waits, before it touches what other kernels read or write. Every kernel
waits, so that waiting for the previous one is waiting for all of them.
"""

from __future__ import annotations  # without Triton, tl.constexpr is only a text

try:
    from triton import jit
    from triton import language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ModuleNotFoundError:  # the module can be imported, but no kernel can be launched

    def jit(function):
        """Leave the function as it is."""
        return function


@jit
def normed_products(
    x, norm, w, first, second, is_row, scales,
    C: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """RMSNorm of x (C,) times two sets of rows of w (any, C): two (ROWS,) of fp32.

    `first`, `second`: indices of the rows, (ROWS,); `is_row`: which of them exist. The norm divides
    by one number, so the division comes after the sums, and x is read only once.
    """
    first_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    second_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < C
        mask = is_row[:, None] & is_column[None, :]
        first_w = tl.load(w + first[:, None] * C + column[None, :], mask=mask, other=0)
        second_w = tl.load(w + second[:, None] * C + column[None, :], mask=mask, other=0)
        if OVERLAP and start == 0:
            gdc_wait()
        values = tl.load(x + column, mask=is_column, other=0).to(tl.float32)
        gain = tl.load(norm + column, mask=is_column, other=0).to(tl.float32)
        scaled = (values * gain)[None, :]
        first_sums += first_w.to(tl.float32) * scaled
        second_sums += second_w.to(tl.float32) * scaled
        squares += values * values
    factor = tl.rsqrt(tl.sum(squares, 0) / C + EPS)
    first_y = tl.sum(first_sums, 1) * factor
    second_y = tl.sum(second_sums, 1) * factor
    if SCALED:
        first_y = first_y * tl.load(scales + first, mask=is_row, other=0)
        second_y = second_y * tl.load(scales + second, mask=is_row, other=0)
    return first_y, second_y


@jit
def qkv_kernel(
    x, norm, w, scales, cos, sin, q, keys, values, position, capacity,
    C: tl.constexpr, D: tl.constexpr, N_HEADS: tl.constexpr, N_KV: tl.constexpr, EPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Norm, product with queries, keys and values, rotary embedding, and the cache's new entry.

    x, norm: (C,); w: ((N_HEADS + 2 N_KV) D, C); cos, sin: (capacity, D / 2); q: (N_HEADS, D); keys,
    values: (N_KV, capacity, D), written at `position` (1,). A program has ROWS pairs of outputs i
    and i + D / 2 of a head, which the rotary embedding turns together.
    """
    HALF: tl.constexpr = D // 2
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = pair // HALF
    i = pair % HALF
    is_row = head < N_HEADS + 2 * N_KV
    first = head * D + i
    second = first + HALF
    if OVERLAP:
        gdc_launch_dependents()
    first_y, second_y = normed_products(
        x, norm, w, first, second, is_row, scales, C, EPS, ROWS, BLOCK, OVERLAP, SCALED
    )
    at = tl.load(position)
    is_query = head < N_HEADS
    is_key = (head >= N_HEADS) & (head < N_HEADS + N_KV)
    is_value = (head >= N_HEADS + N_KV) & is_row
    cosine = tl.where(is_value, 1.0, tl.load(cos + at * HALF + i))
    sine = tl.where(is_value, 0.0, tl.load(sin + at * HALF + i))
    first_out = first_y * cosine - second_y * sine
    second_out = second_y * cosine + first_y * sine
    tl.store(q + first, first_out, mask=is_query)
    tl.store(q + second, second_out, mask=is_query)
    key = keys + (head - N_HEADS) * capacity * D + at * D + i
    tl.store(key, first_out, mask=is_key)
    tl.store(key + HALF, second_out, mask=is_key)
    value = values + (head - N_HEADS - N_KV) * capacity * D + at * D + i
    tl.store(value, first_out, mask=is_value)
    tl.store(value + HALF, second_out, mask=is_value)


@jit
def attention_kernel(
    q, keys, values, out, maxima, sums, parts, n_done, positions, capacity, scale,
    N_KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
    KEYS: tl.constexpr, SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attention of one query per head to the keys that are there: `positions` (texts,) plus one.

    q, out: (texts, N_KV GROUP, D). A program has one text, one head of keys with its GROUP query
    heads, and one of SPLITS shares of the keys, KEYS at once. GROUP is padded to PADDED rows: 1, or
    16 for tl.dot. The program that ends last joins the shares, which are in maxima and sums (texts,
    N_KV, SPLITS, PADDED) and in parts (the same, D); n_done (texts, N_KV) counts those that ended.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    text = tl.program_id(2)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    n_keys = tl.load(positions + text) + 1
    per_split = tl.cdiv(tl.cdiv(n_keys, KEYS), SPLITS) * KEYS
    begin = split * per_split
    end = tl.minimum(n_keys, begin + per_split)
    row = tl.arange(0, PADDED)
    d = tl.arange(0, D)
    is_row = row < GROUP
    text_and_head = text * N_KV + head
    at = (text_and_head * GROUP + row)[:, None] * D + d[None, :]  # of a query and of its output
    query = tl.load(q + at, mask=is_row[:, None], other=0)
    cache = text_and_head.to(tl.int64) * capacity * D
    maximum = tl.full([PADDED], -1e30, tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    mixed = tl.zeros([PADDED, D], tl.float32)
    for start in range(begin, end, KEYS):
        number = start + tl.arange(0, KEYS)
        exists = number < end
        entry = cache + number[:, None] * D + d[None, :]
        key = tl.load(keys + entry, mask=exists[:, None], other=0)
        value = tl.load(values + entry, mask=exists[:, None], other=0)
        if PADDED == 1:
            scores = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)[None, :] * scale
        else:
            scores = tl.dot(query, tl.trans(key)) * scale
        scores = tl.where(exists[None, :], scores, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp(maximum - new_maximum)
        weights = tl.exp(scores - new_maximum[:, None])
        weights = tl.where(exists[None, :], weights, 0.0)
        if PADDED == 1:
            product = tl.sum(tl.trans(weights) * value.to(tl.float32), 0)[None, :]
        else:
            product = tl.dot(weights.to(value.dtype), value)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + product
        maximum = new_maximum
    if SPLITS == 1:
        tl.store(out + at, mixed / total[:, None], mask=is_row[:, None])
    else:
        share = (text_and_head * SPLITS + split) * PADDED + row
        tl.store(maxima + share, maximum)
        tl.store(sums + share, total)
        tl.store(parts + share[:, None] * D + d[None, :], mixed)
        tl.debug_barrier()  # all threads have stored before one of them counts
        n_before = tl.atomic_add(n_done + text_and_head, 1, sem="acq_rel")
        if n_before == SPLITS - 1:
            tl.store(n_done + text_and_head, 0)  # for the next launch
            maximum = tl.full([PADDED], -1e30, tl.float32)
            total = tl.zeros([PADDED], tl.float32)
            mixed = tl.zeros([PADDED, D], tl.float32)
            for other in range(SPLITS):
                share = (text_and_head * SPLITS + other) * PADDED + row
                other_maximum = tl.load(maxima + share, volatile=True)
                other_total = tl.load(sums + share, volatile=True)
                other_mixed = tl.load(parts + share[:, None] * D + d[None, :], volatile=True)
                new_maximum = tl.maximum(maximum, other_maximum)
                shrink = tl.exp(maximum - new_maximum)
                grow = tl.exp(other_maximum - new_maximum)
                total = total * shrink + other_total * grow
                mixed = mixed * shrink[:, None] + other_mixed * grow[:, None]
                maximum = new_maximum
            tl.store(out + at, mixed / total[:, None], mask=is_row[:, None])


@jit
def residual_kernel(
    v, w, scales, x,
    N_ROWS: tl.constexpr, N_COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Add a product to the residual stream: x (N_ROWS,) += w (N_ROWS, N_COLUMNS) v (N_COLUMNS,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < N_ROWS
    if OVERLAP:
        gdc_launch_dependents()
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, N_COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < N_COLUMNS
        mask = is_row[:, None] & is_column[None, :]
        row_w = tl.load(w + row[:, None] * N_COLUMNS + column[None, :], mask=mask, other=0)
        if OVERLAP and start == 0:
            gdc_wait()
        values = tl.load(v + column, mask=is_column, other=0).to(tl.float32)
        sums += row_w.to(tl.float32) * values[None, :]
    y = tl.sum(sums, 1)
    if SCALED:
        y = y * tl.load(scales + row, mask=is_row, other=0)
    before = tl.load(x + row, mask=is_row, other=0).to(tl.float32)
    tl.store(x + row, before + y, mask=is_row)


@jit
def gate_kernel(
    x, norm, w, scales, out,
    C: tl.constexpr, F: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Norm, product with gate and up, and SwiGLU's activation: out (F,) = silu(gate) * up.

    x, norm: (C,); w: (2 F, C), the rows of the gate first.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < F
    if OVERLAP:
        gdc_launch_dependents()
    gate, up = normed_products(
        x, norm, w, row, row + F, is_row, scales, C, EPS, ROWS, BLOCK, OVERLAP, SCALED
    )
    tl.store(out + row, gate / (1 + tl.exp(-gate)) * up, mask=is_row)


@jit
def head_kernel(
    x, norm, w, scales, logits, best_values, best_tokens, position, temperature,
    C: tl.constexpr, V: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Norm, product with the LM head, and the best token of each program.

    x, norm: (C,); w: (V, C); logits: (V,); best_values, best_tokens: one per program. A positive
    temperature divides the logits and adds Gumbel noise, so that the best is a sample; the position
    is the seed. Zero: the largest logit.
    """
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    is_row = row < V
    if OVERLAP:
        gdc_launch_dependents()
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < C
        mask = is_row[:, None] & is_column[None, :]
        row_w = tl.load(w + row[:, None] * C + column[None, :], mask=mask, other=0)
        if OVERLAP and start == 0:
            gdc_wait()
        values = tl.load(x + column, mask=is_column, other=0).to(tl.float32)
        gain = tl.load(norm + column, mask=is_column, other=0).to(tl.float32)
        sums += row_w.to(tl.float32) * (values * gain)[None, :]
        squares += values * values
    y = tl.sum(sums, 1) * tl.rsqrt(tl.sum(squares, 0) / C + EPS)
    if SCALED:
        y = y * tl.load(scales + row, mask=is_row, other=0)
    tl.store(logits + row, y, mask=is_row)
    uniform = tl.rand(tl.load(position), row)
    noise = -tl.log(-tl.log(uniform + 1e-9) + 1e-9)
    score = tl.where(temperature > 0, y / tl.maximum(temperature, 1e-6) + noise, y)
    score = tl.where(is_row, score, -float("inf"))
    value, index = tl.max(score, 0, return_indices=True)
    tl.store(best_values + program, value)
    tl.store(best_tokens + program, program * ROWS + index)


@jit
def sample_kernel(
    best_values, best_tokens, tokens, embedding, x, position,
    N_BEST: tl.constexpr, PADDED_BEST: tl.constexpr, C: tl.constexpr, PADDED_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Choose the best of the N_BEST programs' tokens, and prepare the next step; one program.

    The token goes to `tokens` at `position` (1,), which advances, and its embedding to x (C,).
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.arange(0, PADDED_BEST)
    values = tl.load(best_values + number, mask=number < N_BEST, other=-float("inf"))
    _, index = tl.max(values, 0, return_indices=True)
    token = tl.load(best_tokens + index)
    at = tl.load(position)
    tl.store(tokens + at, token)
    tl.store(position, at + 1)
    column = tl.arange(0, PADDED_C)
    row = tl.load(embedding + token * C + column, mask=column < C)
    tl.store(x + column, row, mask=column < C)
