/* Sampling of a token from logits, as generation/sampler.py does it, for a temperature without filters. */
#pragma once
#include "vectors.h"

typedef double double_vec __attribute__((vector_size(64)));
typedef double unaligned_double_vec __attribute__((vector_size(64), aligned(8)));
typedef int64_t long_vec __attribute__((vector_size(64)));
typedef float vec8_unaligned __attribute__((vector_size(32), aligned(4)));
enum { DOUBLES = 8 };

/* exp(x) for x <= 0, within 2 ulp: a Taylor series on [-ln 2 / 2, ln 2 / 2]. */
INLINE double_vec exp_double(double_vec x) {
    static const double factor[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                    1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1, 1};
    long_vec is_small = x < -700.0;
    x = (double_vec)(~is_small & (long_vec)x); /* 0 where exp is below the smallest float */
    double_vec n = (x * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0;
    double_vec r = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
    double_vec p = factor[0] - (double_vec){};
    for (int i = 1; i < 14; i++) p = p * r + factor[i];
    p *= (double_vec)((__builtin_convertvector(n, long_vec) + 1023) << 52);
    return (double_vec)(~is_small & (long_vec)p);
}

INLINE double_vec load_doubles(const float *p) { return __builtin_convertvector(*(const vec8_unaligned *)p, double_vec); }

/* The index of the first largest logit. */
INLINE int64_t argmax(const float *logits, int64_t n) {
    vec largest = fill(-INFINITY);
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        vec x = load(logits + i);
        largest = select_vec(x > largest, x, largest);
    }
    float value = maximum(largest);
    for (; i < n; i++) value = logits[i] > value ? logits[i] : value;
    for (i = 0; i < n; i++)
        if (logits[i] == value) return i;
    return 0; /* all are NaN, which is reported by its log-probability */
}

INLINE double sum_doubles(double_vec x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

/* Sum of exp((logits - largest) / temperature), whose terms go to `terms` (n, padded to 8) if it is not NULL. */
INLINE double exponentials_double(const float *logits, int64_t n, double largest, double temperature, double *terms) {
    double_vec total = {};
    for (int64_t i = 0; i < n; i += DOUBLES) {
        float padded[DOUBLES];
        const float *p = logits + i;
        if (i + DOUBLES > n) {
            for (int j = 0; j < DOUBLES; j++) padded[j] = i + j < n ? logits[i + j] : -INFINITY;
            p = padded;
        }
        double_vec e = exp_double(load_doubles(p) / temperature - largest / temperature);
        if (terms) *(unaligned_double_vec *)(terms + i) = e;
        total += e;
    }
    return sum_doubles(total);
}

/* Sample one token of each row of logits (n_rows, stride), of which n are valid. temperature 0: the likeliest one.
   `terms`: work space of n doubles, padded to a multiple of 8. logprobs: under the unmodified model. */
void sample(const float *logits, int64_t n_rows, int64_t stride, int64_t n, double temperature, const double *uniforms,
            double *terms, int64_t *tokens, float *logprobs) {
    for (int64_t row = 0; row < n_rows; row++, logits += stride) {
        int64_t best = argmax(logits, n), token = best;
        double largest = logits[best];
        double plain = exponentials_double(logits, n, largest, 1, NULL);
        if (temperature > 0) {
            double total = exponentials_double(logits, n, largest, temperature, terms), cumulative = 0;
            for (int64_t i = 0; i < n; i++) terms[i] = cumulative += (float)(terms[i] / total);
            double target = uniforms[row] * cumulative;
            for (token = 0; token < n - 1 && !(terms[token] > target) && terms[token] < cumulative; token++) {}
        }
        tokens[row] = token;
        logprobs[row] = logits[token] - largest - log(plain);
    }
}
