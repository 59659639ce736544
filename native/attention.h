/* RMSNorm, RoPE and attention of a few rows over a KV cache. */
#pragma once
#include "cached.h"

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

/* A tile is a few queries of one head whose keys are in the same row of the cache. Each query is computed alike in any
   tile: the order of its additions depends only on its number of keys. */
#if defined(__AVX512F__)
#define TILE_QUERIES 4
#else /* too few registers */
#define TILE_QUERIES 1
#endif

/* scores[i][s] = q[i] key[s], for keys [begin, end) and n queries; begin is a multiple of 4. */
INLINE void dot_keys(int n, Vectors keys, int64_t format, const float *q, int64_t q_stride, int64_t begin, int64_t end,
                     int64_t D, float *scores, int64_t scores_stride) {
    int64_t s = begin;
    for (; s + 4 <= end; s += 4) {
        vec total[TILE_QUERIES][4] = {};
        int64_t d = 0, offset = (s & keys.ring) * keys.slot;
        for (; d + WIDTH <= D; d += WIDTH) {
            vec key[4];
            UNROLLED
            for (int j = 0; j < 4; j++) key[j] = load_cached(keys, format, offset + j * keys.slot, d);
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
                for (int j = 0; j < 4; j++)
                    y[j] += q[i * q_stride + rest] * cached_at(keys, format, offset + j * keys.slot, rest);
            memcpy(scores + i * scores_stride + s, &y, sizeof y);
        }
    }
    for (; s < end; s++)
        for (int i = 0; i < n; i++) {
            vec total = {};
            float rest = 0;
            int64_t d = 0, offset = (s & keys.ring) * keys.slot;
            for (; d + WIDTH <= D; d += WIDTH)
                total += load(q + i * q_stride + d) * load_cached(keys, format, offset, d);
            for (; d < D; d++) rest += q[i * q_stride + d] * cached_at(keys, format, offset, d);
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

/* total[i] += weights[i][s] values[s], for two vectors from the d-th number. */
INLINE void add_value(int n, Vectors values, int64_t format, int64_t s, int64_t d, const float *weights, int64_t stride,
                      vec total[][4], int first) {
    int64_t offset = (s & values.ring) * values.slot;
    vec a = load_cached(values, format, offset, d), b = load_cached(values, format, offset, d + WIDTH);
    UNROLLED
    for (int i = 0; i < n; i++) {
        total[i][first] += weights[i * stride + s] * a;
        total[i][first + 1] += weights[i * stride + s] * b;
    }
}

/* y[i] = factor[i] times the sum over s of weights[i][s] values[s], for n queries, s from `begin`, which is even, to
   end[i], in ascending order. */
INLINE void weighted_sum(int n, Vectors values, int64_t format, const float *weights, int64_t stride, int64_t begin,
                         const int64_t *end, int64_t D, const float *factor, float *y, int64_t y_stride) {
    int64_t d = 0, shared = end[0] / 2 * 2;
    for (; d + 2 * WIDTH <= D; d += 2 * WIDTH) {
        vec total[TILE_QUERIES][4] = {}; /* two vectors for even, and two for odd keys */
        for (int64_t s = begin; s < shared; s += 2) {
            add_value(n, values, format, s, d, weights, stride, total, 0);
            add_value(n, values, format, s + 1, d, weights, stride, total, 2);
        }
        UNROLLED
        for (int i = 0; i < n; i++) {
            for (int64_t s = shared; s < end[i]; s++)
                add_value(1, values, format, s, d, weights + i * stride, stride, total + i, s % 2 * 2);
            store(y + i * y_stride + d, (total[i][0] + total[i][2]) * factor[i]);
            store(y + i * y_stride + d + WIDTH, (total[i][1] + total[i][3]) * factor[i]);
        }
    }
    for (; d < D; d++)
        for (int i = 0; i < n; i++) {
            float total = 0;
            for (int64_t s = begin; s < end[i]; s++)
                total += weights[i * stride + s] * cached_at(values, format, (s & values.ring) * values.slot, d);
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

/* The scores of one query for the keys in a ring, and y += its weighted sum of the values there. Not inlined, because
   the compiler would take several times as long. */
static __attribute__((noinline)) void dot_newest(Vectors keys, int64_t format, const float *q, int64_t begin,
                                                 int64_t end, int64_t D, float *scores) {
    dot_keys(1, keys, format, q, 0, begin, end, D, scores, 0);
}

static __attribute__((noinline)) void add_newest(Vectors values, int64_t format, const float *weights, int64_t begin,
                                                 int64_t end, int64_t D, float factor, float *y) {
    float sum[D];
    weighted_sum(1, values, format, weights, 0, begin, &end, D, &factor, sum, 0);
    for (int64_t d = 0; d < D; d++) y[d] += sum[d];
}

/* Attention of a tile of n queries q[i], which attend to the first S[i] keys of cache row `row`, in ascending order.
   query: index of the first, which is also its row of the mask. scores: work space, (TILE_QUERIES, stride). */
INLINE void attend(int n, int64_t format, const float *q, int64_t q_stride, const Cached *keys, const Cached *values,
                   int64_t row, int64_t head, int64_t group, const int64_t *S, int64_t D, float scale, float softcap,
                   const float *sinks, const Visible *visible, int64_t query, float *scores, int64_t stride,
                   float *y, int64_t y_stride) {
    int64_t kv_head = head / group, is_quantized = format == INT8 || format == INT4;
    int64_t has_ring = keys->n_newest > 0, end[TILE_QUERIES];
    /* A mask hides what follows a query, such as the end of a longer row. So S[0] does not tell its position. */
    int64_t exact = has_ring ? first_exact(visible->slots[query]) : S[0], shared = exact / 4 * 4;
    Vectors all_keys = vectors_of(keys, row, kv_head), all_values = vectors_of(values, row, kv_head);
    float factor[TILE_QUERIES];
    dot_keys(n, all_keys, format, q, q_stride, 0, shared, D, scores, stride);
    UNROLLED
    for (int i = 0; i < n; i++) {
        float *own = scores + i * stride, largest = sinks ? sinks[head] : -INFINITY;
        end[i] = has_ring ? exact : S[i];
        dot_keys(1, all_keys, format, q + i * q_stride, q_stride, shared, end[i], D, own, stride);
        if (is_quantized) multiply_scales(own, all_keys.scale, end[i]);
        if (has_ring)
            dot_newest(newest_of(keys, D, row, kv_head), keys->newest_format, q + i * q_stride, exact, S[i], D, own);
        int64_t mask_base = query * visible->row + head * visible->head;
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
        if (is_quantized) multiply_scales(own, all_values.scale, end[i]);
    }
    weighted_sum(n, all_values, format, scores, stride, 0, end, D, factor, y, y_stride);
    for (int i = 0; i < n && has_ring; i++)
        add_newest(newest_of(values, D, row, kv_head), values->newest_format, scores + i * stride, exact, S[i], D,
                   factor[i], y + i * y_stride);
}
