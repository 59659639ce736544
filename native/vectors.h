/* Vectors of 16 floats, which the compiler maps to AVX-512, AVX2 or NEON registers. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define WIDTH 16
#define UNROLLED _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64)));
typedef float unaligned_vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t int_vec __attribute__((vector_size(64)));
typedef uint32_t uint_vec __attribute__((vector_size(64)));
typedef int8_t byte_vec __attribute__((vector_size(16), aligned(1), may_alias));
typedef int16_t short_vec __attribute__((vector_size(32)));
typedef uint16_t half_vec __attribute__((vector_size(32), aligned(2), may_alias));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));

INLINE vec load(const float *p) { return *(const unaligned_vec *)p; }
INLINE void store(float *p, vec x) { *(unaligned_vec *)p = x; }
/* Load once, where the compiler would repeat the load in each use. */
#if defined(__AVX512F__)
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define IN_REGISTER(x) (void)(x)
#endif

INLINE vec fill(float x) { return x - (vec){}; }

/* bf16 is the upper half of fp32. */
INLINE vec load_bf16(const uint16_t *p) { return (vec)(__builtin_convertvector(*(const half_vec *)p, uint_vec) << 16); }

/* GCC converts bytes to floats one by one, unless that is done in steps or by intrinsics. */
INLINE vec floats_of(byte_vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
#else
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(x, short_vec), int_vec), vec);
#endif
}

/* 16 numbers less 8: those of the lower halves of 8 bytes, then those of the upper halves. */
INLINE vec floats_of_halves(const char *p) {
    uint64_t pairs;
    memcpy(&pairs, p, 8);
#if defined(__AVX512F__)
    __m128i both = _mm_cvtsi64_si128(pairs), lower = _mm_set1_epi8(15);
    both = _mm_and_si128(_mm_unpacklo_epi64(both, _mm_srli_epi64(both, 4)), lower);
    return (vec)_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_cvtepi8_epi32(both), _mm512_set1_epi32(8)));
#else
    byte_vec numbers;
    uint64_t halves[2] = {pairs & 0x0f0f0f0f0f0f0f0f, pairs >> 4 & 0x0f0f0f0f0f0f0f0f};
    memcpy(&numbers, halves, 16);
    return floats_of(numbers) - 8;
#endif
}

INLINE float bf16_to_float(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE uint16_t float_to_bf16(float x) { /* to the nearest, ties to even, as in torch */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

INLINE vec select_vec(int_vec mask, vec a, vec b) { return (vec)((mask & (int_vec)a) | (~mask & (int_vec)b)); }

/* Round n numbers. y may be the memory of x. */
INLINE void round_to_bf16(const float *x, int64_t n, uint16_t *y) {
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        vec value = load(x + i);
        uint_vec bits = (uint_vec)value;
        bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        bits = (uint_vec)select_vec(value == value, (vec)bits, (vec)(bits * 0 + 0x7fc0)); /* keep NaN */
        *(half_vec *)(y + i) = __builtin_convertvector(bits, half_vec);
    }
    for (; i < n; i++) {
        float value = x[i];
        y[i] = float_to_bf16(value);
    }
}

INLINE float sum(vec x) {
    vec8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    vec4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

/* The sums of four vectors, by shuffles within lanes of four, which are the fastest. */
INLINE vec4 sum4(vec a, vec b, vec c, vec d) {
    vec ab = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
             __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    vec cd = __builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
             __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    vec abcd = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    vec8 e = __builtin_shufflevector(abcd, abcd, 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(abcd, abcd, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(e, e, 0, 1, 2, 3) + __builtin_shufflevector(e, e, 4, 5, 6, 7);
}

INLINE float maximum(vec x) {
    vec8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
    vec8 b = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    float y = -INFINITY;
    for (int i = 0; i < 8; i++) {
        float larger = a[i] > b[i] ? a[i] : b[i];
        y = larger > y ? larger : y;
    }
    return y;
}

INLINE int32_t sum_int(int_vec x) {
    int32_t y = 0;
    for (int i = 0; i < WIDTH; i++) y += x[i];
    return y;
}

/* Round to the nearest integer, ties to even, for |x| < 2^22. */
INLINE vec round_vec(vec x) { return (x + 12582912.0f) - 12582912.0f; }

/* exp(x), within 2 ulp: 2^n exp(r), with r in [-ln 2 / 2, ln 2 / 2] and a polynomial (Cephes, expf). */
INLINE vec exp_vec(vec x) {
    x = select_vec(x < -87.0f, fill(-87.0f), x);
    x = select_vec(x > 88.0f, fill(88.0f), x);
    vec n = round_vec(x * 1.44269504f);
    vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vec p = fill(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((__builtin_convertvector(n, int_vec) + 127) << 23);
}
