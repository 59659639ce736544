/* Sampling of a token from logits, as generation/sampler.py does it, for a temperature without filters. */
#pragma once
#include "vectors.h"

typedef double double_vec __attribute__((vector_size(64)));
typedef double unaligned_double_vec __attribute__((vector_size(64), aligned(8)));
typedef int64_t long_vec __attribute__((vector_size(64)));
typedef float vec8_unaligned __attribute__((vector_size(32), aligned(4)));
enum { DOUBLES = 8 };

/* exp(x) for four vectors of x <= 0, within 2 ulp: a Taylor series on [-ln 2 / 2, ln 2 / 2]. */
INLINE void exp_doubles(double_vec x[4]) {
    static const double factor[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                    1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1, 1};
    long_vec is_small[4];
    double_vec n[4], r[4], p[4];
    for (int u = 0; u < 4; u++) {
        is_small[u] = x[u] < -700.0; /* exp is below the smallest float, and becomes 0 */
        x[u] = (double_vec)(~is_small[u] & (long_vec)x[u]);
        n[u] = (x[u] * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0;
        r[u] = x[u] - n[u] * 6.93147180369123816490e-01 - n[u] * 1.90821492927058770002e-10;
        p[u] = factor[0] - (double_vec){};
    }
    for (int i = 1; i < 14; i++)
        for (int u = 0; u < 4; u++) p[u] = p[u] * r[u] + factor[i];
    for (int u = 0; u < 4; u++) {
        p[u] *= (double_vec)((__builtin_convertvector(n[u], long_vec) + 1023) << 52);
        x[u] = (double_vec)(~is_small[u] & (long_vec)p[u]);
    }
}

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

/* Sum of exp((logits - largest) / temperature), whose terms go to `terms` (n, padded to 32) if it is not NULL. */
INLINE double sum_of_exponentials(const float *logits, int64_t n, double largest, double temperature, double *terms) {
    double_vec total = {};
    for (int64_t i = 0; i < n; i += 4 * DOUBLES) {
        float padded[4 * DOUBLES];
        const float *p = logits + i;
        if (i + 4 * DOUBLES > n) {
            for (int j = 0; j < 4 * DOUBLES; j++) padded[j] = i + j < n ? logits[i + j] : -INFINITY;
            p = padded;
        }
        double_vec x[4];
        for (int u = 0; u < 4; u++) {
            vec8_unaligned eight = *(const vec8_unaligned *)(p + u * DOUBLES);
            x[u] = __builtin_convertvector(eight, double_vec) / temperature - largest / temperature;
        }
        exp_doubles(x);
        for (int u = 0; u < 4; u++) {
            if (terms) *(unaligned_double_vec *)(terms + i + u * DOUBLES) = x[u];
            total += x[u];
        }
    }
    return sum_doubles(total);
}

/* ln P of a token, among n. Not inlined, so that it has the same bits wherever it is computed. */
static __attribute__((noinline)) float log_prob(const float *logits, int64_t n, double largest, int64_t token) {
    return logits[token] - largest - log(sum_of_exponentials(logits, n, largest, 1, NULL));
}

/* ln P of one token of each row of logits (n_rows, stride), as sample() has it for the tokens that it samples. */
void log_probs(const float *logits, int64_t n_rows, int64_t stride, int64_t n, const int64_t *tokens, float *logprobs) {
    for (int64_t row = 0; row < n_rows; row++, logits += stride)
        logprobs[row] = log_prob(logits, n, logits[argmax(logits, n)], tokens[row]);
}

/* Sample one token of each row of logits (n_rows, stride), of which n are valid. temperature 0: the likeliest one.
   `terms`: work space of n doubles, padded to a multiple of 32. logprobs: under the unmodified model. `allowed`: NULL,
   or a bit per token of each row (n / 32 numbers, rounded up); others are not sampled. `masked`: work space for n
   logits, if `allowed` is not NULL. */
void sample(const float *logits, int64_t n_rows, int64_t stride, int64_t n, const double *temperatures,
            const double *uniforms, double *terms, int64_t *tokens, float *logprobs, const uint32_t *allowed,
            float *masked) {
    for (int64_t row = 0; row < n_rows; row++, logits += stride) {
        int64_t best = argmax(logits, n), token = best;
        double largest = logits[best], temperature = temperatures[row];
        const float *choices = logits;
        double largest_choice = largest;
        if (allowed) {
            for (int64_t i = 0; i < n; i++) masked[i] = allowed[i / 32] >> (i % 32) & 1 ? logits[i] : -INFINITY;
            allowed += (n + 31) / 32;
            choices = masked;
            token = argmax(masked, n);
            largest_choice = masked[token];
        }
        if (temperature > 0) {
            double total = sum_of_exponentials(choices, n, largest_choice, temperature, terms), cumulative = 0;
            for (int64_t i = 0; i < n; i++) terms[i] = cumulative += (float)(terms[i] / total);
            double target = uniforms[row] * cumulative;
            for (token = 0; token < n - 1 && !(terms[token] > target) && terms[token] < cumulative; token++) {}
        }
        tokens[row] = token;
        logprobs[row] = log_prob(logits, n, largest, token);
    }
}
