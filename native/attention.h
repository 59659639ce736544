/* RMSNorm, RoPE and attention of a few rows over a KV cache. */
#pragma once
#include "linear.h"

INLINE void rms_norm(const float *x, const float *weight, float eps, int64_t width, float *y) {
    vec squares = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) squares += load(x + i) * load(x + i);
    for (; i < width; i++) rest += x[i] * x[i];
    float scale = 1 / sqrtf((sum(squares) + rest) / width + eps);
    for (i = 0; i + WIDTH <= width; i += WIDTH) store(y + i, load(x + i) * scale * load(weight + i));
    for (; i < width; i++) y[i] = x[i] * scale * weight[i];
}

/* silu(gate) * up, for x = (gate, up), of `width` values each. */
INLINE void swiglu(const float *x, int64_t width, float *y) {
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) {
        vec gate = load(x + i);
        store(y + i, gate / (1 + exp_vec(-gate)) * load(x + width + i));
    }
    for (; i < width; i++) y[i] = x[i] / (1 + expf(-x[i])) * x[width + i];
}

/* Rotate the pairs (x[i], x[i + D/2]) by tables (cos, cos) and (-sin, sin) of D values each. */
INLINE void rotate(float *x, const float *cosines, const float *sines, int64_t D) {
    for (int64_t i = 0; i < D / 2; i++) {
        float a = x[i], b = x[i + D / 2];
        x[i] = a * cosines[i] + b * sines[i];
        x[i + D / 2] = b * cosines[i + D / 2] + a * sines[i + D / 2];
    }
}

/* Keys or values of a cache, (B, K, S, D) with any strides (in elements), fp32 or bf16. */
typedef struct {
    void *data;
    int64_t is_bf16, row, head, slot, dim;
} Cached;

INLINE int64_t cached_offset(Cached c, int64_t row, int64_t head, int64_t slot) {
    return row * c.row + head * c.head + slot * c.slot;
}

INLINE void write_cached(Cached c, int64_t offset, const float *x, int64_t D) {
    for (int64_t d = 0; d < D; d++) {
        if (c.is_bf16) ((uint16_t *)c.data)[offset + d * c.dim] = float_to_bf16(x[d]);
        else ((float *)c.data)[offset + d * c.dim] = x[d];
    }
}

INLINE vec load_cached(Cached c, int64_t offset) {
    return c.is_bf16 ? load_bf16((const uint16_t *)c.data + offset) : load((const float *)c.data + offset);
}

INLINE float cached_at(Cached c, int64_t offset) {
    return c.is_bf16 ? bf16_to_float(((const uint16_t *)c.data)[offset]) : ((const float *)c.data)[offset];
}

/* Scores of S keys whose slots are contiguous: 16 keys at a time. */
INLINE void scores_by_slot(Cached keys, int64_t base, const float *q, int64_t S, int64_t D, float *scores) {
    int64_t s = 0;
    for (; s + 4 * WIDTH <= S; s += 4 * WIDTH) {
        vec total[4] = {};
        for (int64_t d = 0; d < D; d++)
            for (int i = 0; i < 4; i++) total[i] += q[d] * load_cached(keys, base + d * keys.dim + s + i * WIDTH);
        for (int i = 0; i < 4; i++) store(scores + s + i * WIDTH, total[i]);
    }
    for (; s + WIDTH <= S; s += WIDTH) {
        vec total = {};
        for (int64_t d = 0; d < D; d++) total += q[d] * load_cached(keys, base + d * keys.dim + s);
        store(scores + s, total);
    }
    for (; s < S; s++) {
        float total = 0;
        for (int64_t d = 0; d < D; d++) total += q[d] * cached_at(keys, base + d * keys.dim + s);
        scores[s] = total;
    }
}

/* Scores of S keys whose dimensions are contiguous. */
INLINE void scores_by_dim(Cached keys, int64_t base, const float *q, int64_t S, int64_t D, float *scores) {
    for (int64_t s = 0; s < S; s++) {
        vec total = {};
        float rest = 0;
        int64_t d = 0, offset = base + s * keys.slot;
        for (; d + WIDTH <= D; d += WIDTH) total += load(q + d) * load_cached(keys, offset + d);
        for (; d < D; d++) rest += q[d] * cached_at(keys, offset + d);
        scores[s] = sum(total) + rest;
    }
}

/* Replace scores by exp(score - largest). Returns their sum. */
INLINE float exponentials(float *scores, int64_t S, float largest) {
    vec total = {};
    float rest = 0;
    int64_t s = 0;
    for (; s + WIDTH <= S; s += WIDTH) {
        vec x = load(scores + s), e = exp_vec(x - largest);
        e = select_vec(x == -INFINITY, (vec){}, e);
        store(scores + s, e);
        total += e;
    }
    for (; s < S; s++) rest += scores[s] = expf(scores[s] - largest);
    return sum(total) + rest;
}

/* y = the sum over s of weights[s] values[s]; dimensions are contiguous. */
INLINE void weighted_sum(Cached values, int64_t base, const float *weights, int64_t S, int64_t D, float factor,
                         float *y) {
    int64_t d = 0;
    for (; d + 2 * WIDTH <= D; d += 2 * WIDTH) {
        vec a = {}, b = {}, a2 = {}, b2 = {};
        int64_t s = 0;
        for (; s + 2 <= S; s += 2) {
            int64_t offset = base + s * values.slot + d, next = offset + values.slot;
            a += weights[s] * load_cached(values, offset);
            b += weights[s] * load_cached(values, offset + WIDTH);
            a2 += weights[s + 1] * load_cached(values, next);
            b2 += weights[s + 1] * load_cached(values, next + WIDTH);
        }
        if (s < S) {
            a += weights[s] * load_cached(values, base + s * values.slot + d);
            b += weights[s] * load_cached(values, base + s * values.slot + d + WIDTH);
        }
        store(y + d, (a + a2) * factor);
        store(y + d + WIDTH, (b + b2) * factor);
    }
    for (; d < D; d++) {
        float total = 0;
        for (int64_t s = 0; s < S; s++) total += weights[s] * cached_at(values, base + s * values.slot + d);
        y[d] = total * factor;
    }
}

/* Which keys a row may attend to: slots [0, length), of which a mask may hide some. */
typedef struct {
    const int64_t *slots;  /* (n_rows,): where the new key of each row goes */
    const int64_t *length; /* (n_rows,) */
    const void *mask;      /* (B, H, T, S) by strides, NULL: none */
    int64_t is_bool, row, head, query, slot; /* bool: true is visible; fp32: added to the scores */
} Visible;

/* scores (S,), a work space */
INLINE void attend(const float *q, Cached keys, Cached values, int64_t row, int64_t head, int64_t group, int64_t S,
                   int64_t D, float scale, float softcap, const float *sinks, const Visible *visible, int64_t query,
                   float *scores, float *y) {
    int64_t key_base = cached_offset(keys, row, head / group, 0);
    if (keys.slot == 1) scores_by_slot(keys, key_base, q, S, D, scores);
    else scores_by_dim(keys, key_base, q, S, D, scores);
    int64_t mask_base = row * visible->row + head * visible->head + query * visible->query;
    float largest = sinks ? sinks[head] : -INFINITY;
    for (int64_t s = 0; s < S; s++) {
        float score = scores[s] * scale;
        if (softcap > 0) score = softcap * tanhf(score / softcap);
        if (visible->mask) {
            int64_t i = mask_base + s * visible->slot;
            if (!visible->is_bool) score += ((const float *)visible->mask)[i];
            else if (!((const uint8_t *)visible->mask)[i]) score = -INFINITY;
        }
        scores[s] = score;
        largest = score > largest ? score : largest;
    }
    if (largest == -INFINITY) { /* nothing is visible */
        memset(y, 0, D * sizeof(float));
        return;
    }
    float total = exponentials(scores, S, largest) + (sinks ? expf(sinks[head] - largest) : 0);
    weighted_sum(values, cached_offset(values, row, head / group, 0), scores, S, D, 1 / total, y);
}
