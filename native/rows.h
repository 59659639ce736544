/* Rows of tensors in fp32 or bf16 for train.c: cut into parts, read as fp32 and written. */
#pragma once
#include "vectors.h"

#define PARTS 48
#define PART(n, part, begin, end) int64_t begin = (n) * (part) / PARTS, end = (n) * ((part) + 1) / PARTS
#define COLUMNS 512 /* of a row at a time */

INLINE void *at(const void *data, int64_t is_bf16, int64_t i) { return (char *)data + i * (is_bf16 ? 2 : 4); }

/* n numbers in fp32: those at `from`, or in `space` if they are converted. */
INLINE const float *read_row(const void *from, int64_t is_bf16, int64_t n, float *restrict space) {
    if (!is_bf16) return from;
    const uint16_t *halves = from;
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) space[i] = bf16_to_float(halves[i]);
    return space;
}

/* Where to write n numbers in fp32; write_row() then converts them if they are in `space`. */
INLINE float *row_to_write(void *to, int64_t is_bf16, float *space) { return is_bf16 ? space : to; }

INLINE void write_row(void *to, int64_t is_bf16, int64_t n, const float *restrict space) {
    uint16_t *restrict halves = to;
    if (!is_bf16) return;
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) halves[i] = float_to_bf16(space[i]);
}

/* Queries, keys or values of attention, by their strides in elements; that of D is 1. */
typedef struct { void *data; int64_t batch, head, position; } Heads;
