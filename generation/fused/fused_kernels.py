# ruff: noqa: ANN001, ANN201 - Triton takes pointers, and reads annotations: only constants have one
"""Triton kernels of one decoding step: five per layer, the embedding, the LM head, a choice.

Sizes: C, the width of the model; D, of a head; F, of the MLP; V, of the vocabulary; N_HEADS query
heads, N_KV heads of keys and values. Activations are in fp32. A cache holds (texts, N_KV, capacity,
D) keys or values.

A product has one row per output. A program computes ROWS outputs by multiply-adds, reads BLOCK
columns at once, and sums in fp32.

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
def normed_product(
    x, norm, w, row, is_row,
    C: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """RMSNorm of x (C,) times rows of w (any, C): (ROWS,) of fp32.

    The norm divides by one number, so the division comes after the sums, and x is read only once.
    """
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < C
        mask = is_row[:, None] & is_column[None, :]
        row_w = tl.load(w + row[:, None] * C + column[None, :], mask=mask, other=0)
        if OVERLAP and start == 0:
            gdc_wait()
        values = tl.load(x + column, mask=is_column, other=0)
        gain = tl.load(norm + column, mask=is_column, other=0).to(tl.float32)
        sums += row_w.to(tl.float32) * (values * gain)[None, :]
        squares += values * values
    return tl.sum(sums, 1) * tl.rsqrt(tl.sum(squares, 0) / C + EPS)


@jit
def normed_product_kernel(
    x, norm, w, bias, out,
    N_ROWS: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """RMSNorm and a product: out (N_ROWS,) = w (N_ROWS, C) norm(x) + bias (N_ROWS,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < N_ROWS
    if OVERLAP:
        gdc_launch_dependents()
    y = normed_product(x, norm, w, row, is_row, C, EPS, ROWS, BLOCK, OVERLAP)
    if HAS_BIAS:
        y += tl.load(bias + row, mask=is_row, other=0).to(tl.float32)
    tl.store(out + row, y, mask=is_row)


@jit
def rotated(
    heads, gain, cos, sin, head, number,
    D: tl.constexpr, EPS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """RMSNorm and rotary embedding of heads (any, D) with the given numbers: (len(number), D).

    cos, sin: (D,) of the position, as Rope returns them: x cos + roll(x, D / 2) sin. gain: (any,
    D), one row per head.
    """
    d = tl.arange(0, D)
    other = (d + D // 2) % D
    at = head[:, None] * D
    values = tl.load(heads + at + d[None, :])
    rolled = tl.load(heads + at + other[None, :])
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(values * values, 1) / D + EPS)[:, None]
        at = number[:, None] * D
        values = values * factor * tl.load(gain + at + d[None, :]).to(tl.float32)
        rolled = rolled * factor * tl.load(gain + at + other[None, :]).to(tl.float32)
    return values * tl.load(cos + d)[None, :] + rolled * tl.load(sin + d)[None, :]


@jit
def attention_kernel(
    qkv, gain, cos, sin, keys, values, out, maxima, sums, parts, n_done, positions,
    capacity, scale,
    N_HEADS: tl.constexpr, N_KV: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr,
    HAS_NORM: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm and rotary embedding of queries and keys, the cache's new entry, and attention.

    qkv: (texts, N_HEADS + 2 N_KV, D); gain: (N_HEADS + N_KV, D), for HAS_NORM; cos, sin: (capacity,
    D); keys, values: the cache, written at `positions` (texts,); out: (texts, N_HEADS, D).

    A program has one text, one head of keys with its query heads, which are padded to PADDED rows
    (1, or at least 16 for tl.dot), and one of SPLITS shares of the keys, KEYS at once. The program
    that ends last joins the shares, which are in maxima and sums (texts, N_KV, SPLITS, PADDED) and
    in parts (the same, D); n_done (texts, N_KV) counts those that ended.
    """
    GROUP: tl.constexpr = N_HEADS // N_KV
    head = tl.program_id(0)
    split = tl.program_id(1)
    text = tl.program_id(2)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.load(positions + text)  # also the number of earlier keys
    d = tl.arange(0, D)
    row = tl.arange(0, PADDED)
    is_row = row < GROUP
    heads = qkv + text * (N_HEADS + 2 * N_KV) * D
    cos += at * D
    sin += at * D
    query_head = head * GROUP + tl.minimum(row, GROUP - 1)  # padding repeats the last one
    query = rotated(heads, gain, cos, sin, query_head, query_head, D, EPS, HAS_NORM)
    key_head = N_HEADS + head + tl.arange(0, 1)
    new_key = rotated(heads, gain, cos, sin, key_head, key_head, D, EPS, HAS_NORM)
    new_key = new_key.to(keys.dtype.element_ty)  # (1, D), as the cache will have it
    value_at = (N_HEADS + N_KV + head) * D + d
    new_value = tl.load(heads + value_at)[None, :].to(values.dtype.element_ty)
    text_and_head = text * N_KV + head
    cache = text_and_head.to(tl.int64) * capacity * D
    maximum = tl.full([PADDED], -1e30, tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    mixed = tl.zeros([PADDED, D], tl.float32)
    if split == 0:
        entry = cache + at * D + d[None, :]
        tl.store(keys + entry, new_key)
        tl.store(values + entry, new_value)
        maximum = tl.sum(query * new_key.to(tl.float32), 1) * scale
        total += 1
        mixed += new_value.to(tl.float32)
    per_split = tl.cdiv(tl.cdiv(at, KEYS), SPLITS) * KEYS
    begin = split * per_split
    end = tl.minimum(at, begin + per_split)
    narrow_query = query.to(keys.dtype.element_ty)
    for start in range(begin, end, KEYS):
        number = start + tl.arange(0, KEYS)
        exists = number < end
        entry = cache + number[:, None] * D + d[None, :]
        key = tl.load(keys + entry, mask=exists[:, None], other=0)
        value = tl.load(values + entry, mask=exists[:, None], other=0)
        if PADDED == 1:
            scores = tl.sum(query * key.to(tl.float32), 1)[None, :] * scale
        else:
            scores = tl.dot(narrow_query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(exists[None, :], scores, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp(maximum - new_maximum)
        weights = tl.exp(scores - new_maximum[:, None])
        weights = tl.where(exists[None, :], weights, 0.0)
        if PADDED == 1:
            product = tl.sum(tl.trans(weights) * value.to(tl.float32), 0)[None, :]
        else:
            product = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + product
        maximum = new_maximum
    out_at = (text * N_HEADS + query_head)[:, None] * D + d[None, :]
    if SPLITS == 1:
        tl.store(out + out_at, mixed / total[:, None], mask=is_row[:, None])
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
            tl.store(out + out_at, mixed / total[:, None], mask=is_row[:, None])


@jit
def residual_kernel(
    v, w, x,
    N_ROWS: tl.constexpr, N_COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
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
        values = tl.load(v + column, mask=is_column, other=0)
        sums += row_w.to(tl.float32) * values[None, :]
    before = tl.load(x + row, mask=is_row, other=0)
    tl.store(x + row, before + tl.sum(sums, 1), mask=is_row)


@jit
def gate_kernel(
    x, norm, w, out,
    C: tl.constexpr, F: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm, product with gate and up, and SwiGLU's activation: out (F,) = silu(gate) * up.

    x, norm: (C,); w: (2 F, C), the rows of the gate first.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < F
    if OVERLAP:
        gdc_launch_dependents()
    gate_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    up_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < C
        mask = is_row[:, None] & is_column[None, :]
        gate_w = tl.load(w + row[:, None] * C + column[None, :], mask=mask, other=0)
        up_w = tl.load(w + (row + F)[:, None] * C + column[None, :], mask=mask, other=0)
        if OVERLAP and start == 0:
            gdc_wait()
        values = tl.load(x + column, mask=is_column, other=0)
        gain = tl.load(norm + column, mask=is_column, other=0).to(tl.float32)
        scaled = (values * gain)[None, :]
        gate_sums += gate_w.to(tl.float32) * scaled
        up_sums += up_w.to(tl.float32) * scaled
        squares += values * values
    factor = tl.rsqrt(tl.sum(squares, 0) / C + EPS)
    gate = tl.sum(gate_sums, 1) * factor
    up = tl.sum(up_sums, 1) * factor
    tl.store(out + row, gate / (1 + tl.exp(-gate)) * up, mask=is_row)


@jit
def summarize(y, is_id, temperature):
    """Of some logits: their maximum, and the sums of exp(y - maximum) at temperature and at 1."""
    y = tl.where(is_id, y, -float("inf"))
    maximum = tl.max(y, 0)
    shifted = tl.where(is_id, y - tl.maximum(maximum, -1e30), -float("inf"))
    at_temperature = tl.sum(tl.exp(shifted / tl.maximum(temperature, 1e-6)), 0)
    return maximum, at_temperature, tl.sum(tl.exp(shifted), 0)


@jit
def head_kernel(
    x, norm, w, logits, summary, temperatures, n_ids,
    C: tl.constexpr, V: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm and product with the LM head, with a summary for sample_kernel.

    x, norm: (C,); w: (V, C); logits: (V,); summary: (3, programs), see summarize(), of the ids
    below n_ids (1,).
    """
    program = tl.program_id(0)
    n_programs = tl.num_programs(0)
    row = program * ROWS + tl.arange(0, ROWS)
    is_row = row < V
    if OVERLAP:
        gdc_launch_dependents()
    y = normed_product(x, norm, w, row, is_row, C, EPS, ROWS, BLOCK, OVERLAP)
    tl.store(logits + row, y, mask=is_row)
    is_id = row < tl.load(n_ids)
    maximum, at_temperature, at_one = summarize(y, is_id, tl.load(temperatures))
    tl.store(summary + program, maximum)
    tl.store(summary + n_programs + program, at_temperature)
    tl.store(summary + 2 * n_programs + program, at_one)


@jit
def summary_kernel(logits, summary, temperatures, n_ids, ROWS: tl.constexpr):
    """The summary of head_kernel() for logits (V,) that another pass has computed."""
    program = tl.program_id(0)
    n_programs = tl.num_programs(0)
    row = program * ROWS + tl.arange(0, ROWS)
    is_id = row < tl.load(n_ids)
    y = tl.load(logits + row, mask=is_id, other=-float("inf"))
    maximum, at_temperature, at_one = summarize(y, is_id, tl.load(temperatures))
    tl.store(summary + program, maximum)
    tl.store(summary + n_programs + program, at_temperature)
    tl.store(summary + 2 * n_programs + program, at_one)


@jit
def sample_kernel(
    logits, summary, temperatures, uniforms, n_sampled, positions, tokens, sampled, logprobs,
    n_ids,
    N_PARTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sample a token by inverse transform from logits (V,) with a summary (3, N_PARTS) of them.

    At temperature 0, it is the likeliest; ties go to the lower id. uniforms: in [0, 1), of which
    n_sampled (1,) were used. The token goes to tokens (1,), and to `sampled` and `logprobs` at
    n_sampled, which advances like positions (1,). One program, which reads ROWS logits.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.arange(0, PADDED)
    is_part = part < N_PARTS
    maxima = tl.load(summary + part, mask=is_part, other=-float("inf"))
    maximum = tl.max(maxima, 0)
    at_one = tl.load(summary + 2 * N_PARTS + part, mask=is_part, other=0)
    logsumexp = maximum + tl.log(tl.sum(at_one * tl.exp(maxima - maximum), 0))
    step = tl.load(n_sampled)
    temperature = tl.load(temperatures)
    divisor = tl.maximum(temperature, 1e-6)
    at_temperature = tl.load(summary + N_PARTS + part, mask=is_part, other=0)
    weights = (at_temperature * tl.exp((maxima - maximum) / divisor)).to(tl.float64)
    cumulative = tl.cumsum(weights, 0)
    point = tl.load(uniforms + step) * tl.sum(weights, 0)
    # The first part whose sum is above the point; rounding may leave none.
    chosen = tl.min(tl.where((cumulative > point) & (weights > 0), part, PADDED), 0)
    last = tl.max(tl.where(weights > 0, part, 0), 0)
    chosen = tl.minimum(chosen, last)
    before = tl.sum(tl.where(part < chosen, weights, 0.0), 0)
    likeliest = tl.min(tl.where(maxima == maximum, part, PADDED), 0)
    chosen = tl.where(temperature > 0, chosen, likeliest)
    id = chosen * ROWS + tl.arange(0, ROWS)
    y = tl.load(logits + id, mask=id < tl.load(n_ids), other=-float("inf"))
    weights = tl.exp((y - maximum) / divisor).to(tl.float64)
    cumulative = before + tl.cumsum(weights, 0)
    token = tl.min(tl.where((cumulative > point) & (weights > 0), id, 1 << 30), 0)
    last = tl.max(tl.where(weights > 0, id, 0), 0)
    token = tl.minimum(token, last)
    likeliest = tl.min(tl.where(y == maximum, id, 1 << 30), 0)
    token = tl.where(temperature > 0, token, likeliest)
    tl.store(tokens, token)
    tl.store(sampled + step, token)
    tl.store(logprobs + step, tl.sum(tl.where(id == token, y, 0.0), 0) - logsumexp)
    tl.store(n_sampled, step + 1)
    tl.store(positions, tl.load(positions) + 1)
