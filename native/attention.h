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

/* A tile is a few queries of one head whose keys are in the same row of the cache. Each query is computed alike in any
   tile: the order of its additions depends only on its number of keys. */
#if defined(__AVX512F__)
#define TILE_QUERIES 4
#else /* too few registers */
#define TILE_QUERIES 1
#endif

/* scores[i][s] = q[i] key[s], for keys [begin, end) and n queries; begin is a multiple of 4. */
INLINE void dot_keys(int n, Cached keys, int64_t base, const float *q, int64_t q_stride, int64_t begin, int64_t end,
                     int64_t D, float *scores, int64_t scores_stride) {
    int64_t s = begin;
    for (; s + 4 <= end; s += 4) {
        vec total[TILE_QUERIES][4] = {};
        int64_t d = 0, offset = base + s * keys.slot;
        for (; d + WIDTH <= D; d += WIDTH) {
            vec key[4];
            UNROLLED
            for (int j = 0; j < 4; j++) key[j] = load_cached(keys, offset + j * keys.slot + d);
            UNROLLED
            for (int i = 0; i < n; i++) {
                vec x = load(q + i * q_stride + d);
                UNROLLED
                for (int j = 0; j < 4; j++) total[i][j] += x * key[j];
            }
        }
        UNROLLED
        for (int i = 0; i < n; i++) {
            vec4 y = sum4(total[i][0], total[i][1], total[i][2], total[i][3]);
            for (int64_t rest = d; rest < D; rest++)
                for (int j = 0; j < 4; j++) y[j] += q[i * q_stride + rest] * cached_at(keys, offset + j * keys.slot + rest);
            memcpy(scores + i * scores_stride + s, &y, sizeof y);
        }
    }
    for (; s < end; s++)
        for (int i = 0; i < n; i++) {
            vec total = {};
            float rest = 0;
            int64_t d = 0, offset = base + s * keys.slot;
            for (; d + WIDTH <= D; d += WIDTH) total += load(q + i * q_stride + d) * load_cached(keys, offset + d);
            for (; d < D; d++) rest += q[i * q_stride + d] * cached_at(keys, offset + d);
            scores[i * scores_stride + s] = sum(total) + rest;
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

/* total[i] += weights[i][s] values[s], for two vectors at `offset`. */
INLINE void add_value(int n, Cached values, int64_t offset, const float *weights, int64_t stride, vec total[][4],
                      int first) {
    vec a = load_cached(values, offset), b = load_cached(values, offset + WIDTH);
    UNROLLED
    for (int i = 0; i < n; i++) {
        total[i][first] += weights[i * stride] * a;
        total[i][first + 1] += weights[i * stride] * b;
    }
}

/* y[i] = factor[i] times the sum over s of weights[i][s] values[s], for n queries with S[i] keys, in ascending order. */
INLINE void weighted_sum(int n, Cached values, int64_t base, const float *weights, int64_t stride, const int64_t *S,
                         int64_t D, const float *factor, float *y, int64_t y_stride) {
    int64_t d = 0, shared = S[0] / 2 * 2;
    for (; d + 2 * WIDTH <= D; d += 2 * WIDTH) {
        vec total[TILE_QUERIES][4] = {}; /* two vectors for even, and two for odd keys */
        for (int64_t s = 0; s < shared; s += 2) {
            add_value(n, values, base + s * values.slot + d, weights + s, stride, total, 0);
            add_value(n, values, base + (s + 1) * values.slot + d, weights + s + 1, stride, total, 2);
        }
        UNROLLED
        for (int i = 0; i < n; i++) {
            for (int64_t s = shared; s < S[i]; s++)
                add_value(1, values, base + s * values.slot + d, weights + i * stride + s, stride, total + i, s % 2 * 2);
            store(y + i * y_stride + d, (total[i][0] + total[i][2]) * factor[i]);
            store(y + i * y_stride + d + WIDTH, (total[i][1] + total[i][3]) * factor[i]);
        }
    }
    for (; d < D; d++)
        for (int i = 0; i < n; i++) {
            float total = 0;
            for (int64_t s = 0; s < S[i]; s++)
                total += weights[i * stride + s] * cached_at(values, base + s * values.slot + d);
            y[i * y_stride + d] = total * factor[i];
        }
}

/* Which keys a row may attend to: slots [0, length), of which a mask may hide some. */
typedef struct {
    int64_t *slots;        /* (n_rows,): where the new key of each row goes */
    int64_t *length;       /* (n_rows,) */
    const void *mask;      /* (n_rows, H, S) by strides, NULL: none */
    int64_t is_bool, row, head, slot; /* bool: true is visible; fp32: added to the scores */
} Visible;

/* Score of key s, with soft cap and mask. */
INLINE float final_score(float score, float scale, float softcap, const Visible *visible, int64_t mask_base, int64_t s) {
    score *= scale;
    if (softcap > 0) score = softcap * tanhf(score / softcap);
    if (visible->mask) {
        int64_t i = mask_base + s * visible->slot;
        if (!visible->is_bool) score += ((const float *)visible->mask)[i];
        else if (!((const uint8_t *)visible->mask)[i]) score = -INFINITY;
    }
    return score;
}

/* Attention of a tile of n queries q[i], which attend to the first S[i] keys of cache row `row`, in ascending order.
   mask_row: row of the mask, for a single query. scores: work space, (TILE_QUERIES, stride). */
INLINE void attend(int n, const float *q, int64_t q_stride, Cached keys, Cached values, int64_t row, int64_t head,
                   int64_t group, const int64_t *S, int64_t D, float scale, float softcap, const float *sinks,
                   const Visible *visible, int64_t mask_row, float *scores, int64_t stride, float *y, int64_t y_stride) {
    int64_t base = cached_offset(keys, row, head / group, 0), shared = S[0] / 4 * 4;
    float factor[TILE_QUERIES];
    dot_keys(n, keys, base, q, q_stride, 0, shared, D, scores, stride);
    UNROLLED
    for (int i = 0; i < n; i++) {
        float *own = scores + i * stride, largest = sinks ? sinks[head] : -INFINITY;
        dot_keys(1, keys, base, q + i * q_stride, q_stride, shared, S[i], D, own, stride);
        int64_t mask_base = mask_row * visible->row + head * visible->head;
        for (int64_t s = 0; s < S[i]; s++) {
            own[s] = final_score(own[s], scale, softcap, visible, mask_base, s);
            largest = own[s] > largest ? own[s] : largest;
        }
        if (largest == -INFINITY) { /* nothing is visible */
            for (int64_t s = 0; s < S[i]; s++) own[s] = 0;
            factor[i] = 0;
        } else {
            factor[i] = 1 / (exponentials(own, S[i], largest) + (sinks ? expf(sinks[head] - largest) : 0));
        }
    }
    weighted_sum(n, values, cached_offset(values, row, head / group, 0), scores, stride, S, D, factor, y, y_stride);
}
