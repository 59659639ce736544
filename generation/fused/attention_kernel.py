# ruff: noqa: ANN001, ANN201 - Triton takes pointers, and reads annotations: only constants have one
"""The Triton kernel of attention over a cache, for one new token per text.

Sizes: D, of a head; N_HEADS query heads, N_KV heads of keys and values. OVERLAP: as in
product_kernels.py.
"""

from __future__ import annotations  # without Triton, tl.constexpr is only a text

from thinker.generation.fused.triton_names import gdc_launch_dependents, gdc_wait, jit, tl


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
    values = tl.load(heads + at + d[None, :]).to(tl.float32)
    rolled = tl.load(heads + at + other[None, :]).to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(values * values, 1) / D + EPS)[:, None]
        at = number[:, None] * D
        values = values * factor * tl.load(gain + at + d[None, :]).to(tl.float32)
        rolled = rolled * factor * tl.load(gain + at + other[None, :]).to(tl.float32)
    return values * tl.load(cos + d)[None, :] + rolled * tl.load(sin + d)[None, :]


@jit
def attention_kernel(
    qkv, gain, cos, sin, keys, values, out, maxima, sums, parts, n_done, positions, rows,
    capacity, scale,
    N_HEADS: tl.constexpr, N_KV: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr,
    HAS_NORM: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Norm and rotary embedding of queries and keys, the cache's new entry, and attention.

    qkv: (texts, N_HEADS + 2 N_KV, D); gain: (N_HEADS + N_KV, D), for HAS_NORM; cos, sin: (capacity,
    D); keys, values: the cache, (any, N_KV, capacity, D), of which a text has one of `rows`
    (texts,) and writes at its one of `positions` (texts,); out: (texts, N_HEADS, D). A text at
    position -1 is padding: nothing is read or written of the cache.

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
    position = tl.load(positions + text)
    at = tl.maximum(position, 0)  # also the number of earlier keys
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
    cache = (tl.load(rows + text) * N_KV + head).to(tl.int64) * capacity * D
    maximum = tl.full([PADDED], -1e30, tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    mixed = tl.zeros([PADDED, D], tl.float32)
    if split == 0:
        entry = cache + at * D + d[None, :]
        is_stored = d[None, :] < tl.where(position < 0, 0, D)
        tl.store(keys + entry, new_key, mask=is_stored)
        tl.store(values + entry, new_value, mask=is_stored)
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
