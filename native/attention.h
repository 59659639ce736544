/* RMSNorm, RoPE and attention of a few rows over a KV cache. */
#pragma once
#include "linear.h"

/* 1 / sqrt(mean(x^2) + eps) */
INLINE float inverse_rms(const float *x, float eps, int64_t width) {
    vec squares = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) squares += load(x + i) * load(x + i);
    for (; i < width; i++) rest += x[i] * x[i];
    return 1 / sqrtf((sum(squares) + rest) / width + eps);
}

INLINE void scaled(const float *x, const float *weight, float scale, int64_t width, float *y) {
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) store(y + i, load(x + i) * scale * load(weight + i));
    for (; i < width; i++) y[i] = x[i] * scale * weight[i];
}

/* silu(gate) * up */
INLINE void swiglu(const float *gate, const float *up, int64_t width, float *y) {
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) {
        vec x = load(gate + i);
        store(y + i, x / (1 + exp_vec(-x)) * load(up + i));
    }
    for (; i < width; i++) y[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

/* Rotate the pairs (x[i], x[i + D/2]) by tables (cos, cos) and (-sin, sin) of D values each. */
INLINE void rotate(float *x, const float *cosines, const float *sines, int64_t D) {
    for (int64_t i = 0; i < D / 2; i++) {
        float a = x[i], b = x[i + D / 2];
        x[i] = a * cosines[i] + b * sines[i];
        x[i + D / 2] = b * cosines[i + D / 2] + a * sines[i + D / 2];
    }
}

/* Keys or values of a cache, (B, K, S, D) by strides in elements (that of D is 1), fp32 or bf16. */
typedef struct {
    void *data;
    int64_t is_bf16, row, head, slot;
} Cached;

INLINE int64_t cached_offset(Cached c, int64_t row, int64_t head, int64_t slot) {
    return row * c.row + head * c.head + slot * c.slot;
}

INLINE void write_cached(Cached c, int64_t offset, const float *x, int64_t D) {
    if (c.is_bf16) round_to_bf16(x, D, (uint16_t *)c.data + offset);
    else memcpy((float *)c.data + offset, x, D * sizeof(float));
}

INLINE vec load_cached(Cached c, int64_t offset) {
    return c.is_bf16 ? load_bf16((const uint16_t *)c.data + offset) : load((const float *)c.data + offset);
}

INLINE float cached_at(Cached c, int64_t offset) {
    return c.is_bf16 ? bf16_to_float(((const uint16_t *)c.data)[offset]) : ((const float *)c.data)[offset];
}

/* scores[s] = q key[s], for S keys. */
INLINE void dot_keys(Cached keys, int64_t base, const float *q, int64_t S, int64_t D, float *scores) {
    int64_t s = 0;
    for (; s + 4 <= S; s += 4) {
        vec total[4] = {};
        int64_t d = 0, offset = base + s * keys.slot;
        for (; d + WIDTH <= D; d += WIDTH) {
            vec x = load(q + d);
            UNROLLED
            for (int i = 0; i < 4; i++) total[i] += x * load_cached(keys, offset + i * keys.slot + d);
        }
        vec4 y = sum4(total[0], total[1], total[2], total[3]);
        for (; d < D; d++)
            for (int i = 0; i < 4; i++) y[i] += q[d] * cached_at(keys, offset + i * keys.slot + d);
        memcpy(scores + s, &y, sizeof y);
    }
    for (; s < S; s++) {
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
    int64_t *slots;        /* (n_rows,): where the new key of each row goes */
    int64_t *length;       /* (n_rows,) */
    const void *mask;      /* (B, H, T, S) by strides, NULL: none */
    int64_t is_bool, row, head, query, slot; /* bool: true is visible; fp32: added to the scores */
} Visible;

/* scores (S,), a work space */
INLINE void attend(const float *q, Cached keys, Cached values, int64_t row, int64_t head, int64_t group, int64_t S,
                   int64_t D, float scale, float softcap, const float *sinks, const Visible *visible, int64_t query,
                   float *scores, float *y) {
    dot_keys(keys, cached_offset(keys, row, head / group, 0), q, S, D, scores);
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
