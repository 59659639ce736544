/* Keys or values in a KV cache: plain or quantized numbers, and the newest ones unrounded. */
#pragma once
#include "linear.h"

/* (B, K, S, D) by strides in elements (that of D is 1), in FP32, BF16, INT8 or INT4. A quantized vector is `scale` times
   its codes. In INT4, an element is a byte with two codes plus 8: of 16 codes, byte i has code i in its lower half and
   code i + 8 in its upper half. The newest vectors are also in a ring, (B, K, n_newest, D), from which a query reads
   those of its own block of EXACT positions, and of the block before. */
typedef struct {
    void *data;
    int64_t format, row, head, slot;
    uint16_t *scale; /* bf16, (B, K, S) by strides; that of S is 1 */
    int64_t scale_row, scale_head;
    void *newest;
    int64_t newest_format, newest_row, newest_head, n_newest; /* 0 or a power of 2 */
} Cached;

enum { EXACT = 16 };

/* The vectors of one head in one row of the cache; that of position s is in slot s & ring. */
typedef struct {
    char *data;
    int64_t slot, ring;
    uint16_t *scale;
} Vectors;

INLINE int64_t bytes_of(int64_t format) { return format == FP32 ? 4 : format == BF16 ? 2 : 1; }

INLINE Vectors vectors_of(const Cached *c, int64_t row, int64_t head) {
    char *data = (char *)c->data + (row * c->row + head * c->head) * bytes_of(c->format);
    return (Vectors){data, c->slot, -1, c->scale ? c->scale + row * c->scale_row + head * c->scale_head : NULL};
}

INLINE Vectors newest_of(const Cached *c, int64_t D, int64_t row, int64_t head) {
    char *data = (char *)c->newest + (row * c->newest_row + head * c->newest_head) * bytes_of(c->newest_format);
    return (Vectors){data, D, c->n_newest - 1, NULL};
}

/* The first position that the query at `position` reads from the ring, a multiple of EXACT. */
INLINE int64_t first_exact(int64_t position) {
    int64_t block = position / EXACT;
    return block > 0 ? (block - 1) * EXACT : 0;
}

/* Round D numbers to codes. Returns their scale. */
INLINE uint16_t quantize_vector(const float *x, int64_t D, int64_t format, int8_t *codes) {
    float largest = 0, lowest = format == INT8 ? -127 : -8, highest = format == INT8 ? 127 : 7, not_finite = 0;
    for (int64_t d = 0; d < D; d++) {
        largest = fabsf(x[d]) > fabsf(largest) ? x[d] : largest;
        not_finite += 0 * x[d]; /* NaN, if one is not finite */
    }
    float scale = largest / lowest; /* the largest number becomes the lowest code */
    scale = bf16_to_float(float_to_bf16((fabsf(scale) < 1e-30f ? 1e-30f : scale) + not_finite));
    for (int64_t d = 0; d < D; d++) {
        float code = rintf(x[d] / scale);
        codes[d] = code > lowest ? code < highest ? code : highest : lowest;
    }
    return float_to_bf16(scale);
}

INLINE void write_numbers(char *to, int64_t format, const float *x, int64_t D) {
    if (format == BF16) round_to_bf16(x, D, (uint16_t *)to);
    else memcpy(to, x, D * sizeof(float));
}

INLINE void write_cached(const Cached *c, int64_t row, int64_t head, int64_t position, const float *x, int64_t D) {
    Vectors all = vectors_of(c, row, head);
    char *to = all.data + position * all.slot * bytes_of(c->format);
    if (c->format == FP32 || c->format == BF16) {
        write_numbers(to, c->format, x, D);
        return;
    }
    int8_t codes[D];
    all.scale[position] = quantize_vector(x, D, c->format, codes);
    if (c->format == INT8) memcpy(to, codes, D);
    for (int64_t d = 0; d < D && c->format == INT4; d += 16)
        for (int64_t i = 0; i < 8; i++) to[d / 2 + i] = (codes[d + i] + 8) | (codes[d + i + 8] + 8) << 4;
    if (!c->n_newest) return;
    Vectors newest = newest_of(c, D, row, head);
    write_numbers(newest.data + (position & newest.ring) * D * bytes_of(c->newest_format), c->newest_format, x, D);
}

/* 16 numbers, or codes, from the d-th of the vector of a slot at `offset`; d is a multiple of 16. */
INLINE vec load_cached(Vectors from, int64_t format, int64_t offset, int64_t d) {
    if (format == FP32) return load((const float *)from.data + offset + d);
    if (format == BF16) return load_bf16((const uint16_t *)from.data + offset + d);
    if (format == INT8) return floats_of(*(const byte_vec *)(from.data + offset + d));
    return floats_of_halves(from.data + offset + d / 2);
}

INLINE float cached_at(Vectors from, int64_t format, int64_t offset, int64_t d) {
    if (format == FP32) return ((const float *)from.data)[offset + d];
    if (format == BF16) return bf16_to_float(((const uint16_t *)from.data)[offset + d]);
    if (format == INT8) return ((const int8_t *)from.data)[offset + d]; /* char has no sign on some processors */
    uint8_t pair = from.data[offset + d / 16 * 8 + d % 8];
    return (d % 16 < 8 ? pair & 15 : pair >> 4) - 8;
}

/* x[s] *= scale[s] */
INLINE void multiply_scales(float *x, const uint16_t *scale, int64_t n) {
    int64_t s = 0;
    for (; s + WIDTH <= n; s += WIDTH) store(x + s, load(x + s) * load_bf16(scale + s));
    for (; s < n; s++) x[s] *= bf16_to_float(scale[s]);
}
