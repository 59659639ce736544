/* Dropout for train.c. The random bits of an element are a hash of its index and the seed, so that the backward pass can
   compute the mask again, whatever the number of threads. */
#pragma once
#include "vectors.h"

/* The hash "lowbias32" of Wellons' hash-prospector (https://nullprogram.com/blog/2018/07/31), in which each bit of the
   input changes each bit of the output with a probability near one half. */
INLINE uint32_t hash_bits(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352dU;
    x = (x ^ x >> 15) * 0x846ca68bU;
    return x ^ x >> 16;
}

/* y[i] = x[i] / (1 - p), or 0 with probability p; the elements have the indices from `begin`. */
INLINE void dropout_row(const float *restrict x, uint64_t begin, int64_t n, uint64_t seed, double p,
                        float *restrict y) {
    uint32_t low = (uint32_t)(seed + begin), high = hash_bits((uint32_t)(seed >> 32) + (uint32_t)(begin >> 32));
    uint32_t threshold = (uint32_t)(p * 4294967296.0); /* p < 1 in double, so this fits */
    float scale = (float)(1 / (1 - p));
    #pragma omp simd
    for (int64_t i = 0; i < n; i++)
        y[i] = hash_bits(hash_bits(low + (uint32_t)i) ^ high) >= threshold ? x[i] * scale : 0.0f;
}
