# ruff: noqa: ANN001, ANN201 - Triton takes pointers, and reads annotations: only constants have one
"""Triton kernels that choose the next token of each text from its logits.

V, the size of the vocabulary, is cut into parts of ROWS logits. A summary of the parts says in
which one the token lies, so that few logits are read twice. OVERLAP: as in product_kernels.py.
"""

from __future__ import annotations  # without Triton, tl.constexpr is only a text

from thinker.generation.fused.triton_names import gdc_launch_dependents, gdc_wait, jit, tl


@jit
def summarize(y, is_id, temperature):
    """Of some logits: their maximum, and the sums of exp(y - maximum) at temperature and at 1."""
    y = tl.where(is_id, y, -float("inf"))
    maximum = tl.max(y, 0)
    shifted = tl.where(is_id, y - tl.maximum(maximum, -1e30), -float("inf"))
    at_temperature = tl.sum(tl.exp(shifted / tl.maximum(temperature, 1e-6)), 0)
    return maximum, at_temperature, tl.sum(tl.exp(shifted), 0)


@jit
def store_summary(y, is_id, temperatures, summary, text, part, n_parts):
    """Write the summary of a part of the logits of a text: see summarize()."""
    maximum, at_temperature, at_one = summarize(y, is_id, tl.load(temperatures + text))
    at = summary + text * 3 * n_parts + part
    tl.store(at, maximum)
    tl.store(at + n_parts, at_temperature)
    tl.store(at + 2 * n_parts, at_one)


@jit
def summary_kernel(logits, summary, temperatures, n_ids, V: tl.constexpr, ROWS: tl.constexpr):
    """Summarize logits (texts, V), of which ids below n_ids (1,) may be sampled.

    summary: (texts, 3, parts), see summarize(). A program has one part of one text.
    """
    part = tl.program_id(0)
    text = tl.program_id(1)
    id = part * ROWS + tl.arange(0, ROWS)
    is_id = id < tl.load(n_ids)
    y = tl.load(logits + text * V + id, mask=is_id, other=-float("inf")).to(tl.float32)
    store_summary(y, is_id, temperatures, summary, text, part, tl.num_programs(0))


@jit
def sample_kernel(
    logits, summary, temperatures, uniforms, n_sampled, positions, tokens, sampled, logprobs,
    n_ids,
    V: tl.constexpr, N_PARTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sample a token by inverse transform from logits (texts, V) with a summary of them.

    At temperature 0, it is the likeliest; ties go to the lower id. uniforms: (texts, STEPS), in [0,
    1), of which n_sampled (texts,) were used. The token goes to tokens (texts,), and to `sampled`
    and `logprobs` (texts, STEPS) at n_sampled, which advances like positions (texts,), but -1 stays
    (see attention_kernel()). A program has one text, of which it reads ROWS logits.
    """
    text = tl.program_id(0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.arange(0, PADDED)
    is_part = part < N_PARTS
    summary += text * 3 * N_PARTS
    maxima = tl.load(summary + part, mask=is_part, other=-float("inf"))
    maximum = tl.max(maxima, 0)
    at_one = tl.load(summary + 2 * N_PARTS + part, mask=is_part, other=0)
    logsumexp = maximum + tl.log(tl.sum(at_one * tl.exp(maxima - maximum), 0))
    step = tl.load(n_sampled + text)
    temperature = tl.load(temperatures + text)
    divisor = tl.maximum(temperature, 1e-6)
    at_temperature = tl.load(summary + N_PARTS + part, mask=is_part, other=0)
    weights = (at_temperature * tl.exp((maxima - maximum) / divisor)).to(tl.float64)
    cumulative = tl.cumsum(weights, 0)
    point = tl.load(uniforms + text * STEPS + step) * tl.sum(weights, 0)
    # The first part whose sum is above the point; rounding may leave none.
    chosen = tl.min(tl.where((cumulative > point) & (weights > 0), part, PADDED), 0)
    last = tl.max(tl.where(weights > 0, part, 0), 0)
    chosen = tl.minimum(chosen, last)
    before = tl.sum(tl.where(part < chosen, weights, 0.0), 0)
    likeliest = tl.min(tl.where(maxima == maximum, part, PADDED), 0)
    chosen = tl.where(temperature > 0, chosen, likeliest)
    id = chosen * ROWS + tl.arange(0, ROWS)
    y = tl.load(logits + text * V + id, mask=id < tl.load(n_ids), other=-float("inf"))
    y = y.to(tl.float32)
    weights = tl.exp((y - maximum) / divisor).to(tl.float64)
    cumulative = before + tl.cumsum(weights, 0)
    token = tl.min(tl.where((cumulative > point) & (weights > 0), id, 1 << 30), 0)
    last = tl.max(tl.where(weights > 0, id, 0), 0)
    token = tl.minimum(token, last)
    likeliest = tl.min(tl.where(y == maximum, id, 1 << 30), 0)
    token = tl.where(temperature > 0, token, likeliest)
    # Of NaN none is the likeliest. The next step would read beyond the embedding.
    token = tl.minimum(token, tl.load(n_ids) - 1)
    tl.store(tokens + text, token)
    tl.store(sampled + text * STEPS + step, token)
    logprob = tl.sum(tl.where(id == token, y, 0.0), 0) - logsumexp
    tl.store(logprobs + text * STEPS + step, logprob)
    tl.store(n_sampled + text, step + 1)
    position = tl.load(positions + text)
    tl.store(positions + text, tl.where(position < 0, position, position + 1))
