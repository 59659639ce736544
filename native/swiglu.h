/* SwiGLU of rows in fp32, forward and backward, and the exponential it needs. */
#pragma once
#include "vectors.h"

/* exp(x) as exp_vec(), in a form that compilers turn into vectors. */
INLINE float exponential(float x) {
    x = x > 87.0f ? 87.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = x - n * 0.693359375f - n * -2.12194440e-4f, p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { uint32_t bits; float value; } power = {(uint32_t)((int32_t)n + 127) << 23};
    return p * power.value;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

INLINE void swiglu_row(const float *restrict gate, const float *restrict up, int64_t n, float *restrict out) {
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

INLINE void swiglu_row_backward(const float *restrict grad, const float *restrict gate, const float *restrict up,
                                int64_t n, float *restrict gate_grad, float *restrict up_grad) {
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float s = sigmoid(gate[i]), g = grad[i] * s;
        gate_grad[i] = g * up[i] * (1.0f + gate[i] * (1.0f - s));
        up_grad[i] = g * gate[i];
    }
}
