/* Products of activations (n_tokens, n_in) and a weight matrix in bf16, with sums in fp32: of a linear layer, forward and
   for the gradient of its input, and those around SwiGLU together with it. native/tiles/tile_kernels.py calls these functions.

   The columns of the weight are packed into panels of PANEL columns, which stay in the cache nearest to the core if they
   have at most 768 rows, while the rows of a block pass by. The epilogue is what follows the product: it is computed while
   the result of a panel is in that cache. */
#pragma once
#include "../swiglu.h"
#include "products.h"

#define TOKEN_BLOCK 64 /* rows of the result that are computed together */
#define PANEL_GROUP 8  /* panels of a piece of work */

/* What becomes of the result: the epilogue. */
#define NO_EPILOGUE 0     /* y (n_tokens, n_out) */
#define SWIGLU 1          /* gate and up, (n_tokens, n_out), and y (n_tokens, n_out / 2) = silu(gate) up */
#define SWIGLU_BACKWARD 2 /* the result is the gradient of that y: y (n_tokens, 2 n_out), of gate and up */

typedef struct {
    int64_t n_tokens, n_in, n_out; /* the latter two are multiples of 32; with SWIGLU, n_out of 64 */
    int64_t epilogue;
    const void *x;                 /* (n_tokens, n_in) */
    int64_t x_stride;
    const void *w;
    int64_t is_transposed;         /* w is (n_out, n_in), as of a linear layer; or else (n_in, n_out) */
    void *gate_up;                 /* with SWIGLU, to be written; with SWIGLU_BACKWARD, to be read */
    void *y;
} ActivationProduct;

#if HAS_TILES
INLINE int64_t panel_numbers(int64_t n_in) { return n_in / 2 * PANEL; }

/* A panel of the weight as pairs, (n_in / 2, PANEL). */
static void pack_panel(const ActivationProduct *a, int64_t panel, uint32_t *out) {
    const uint16_t *w = a->w;
    int64_t column = panel * PANEL;
    if (a->is_transposed) {
        for (int64_t p = 0; p < a->n_in / 2; p += 16)
            for (int64_t i = 0; i < PANEL; i += 16)
                transpose_16((const uint32_t *)(w + (column + i) * a->n_in) + p, a->n_in / 2, out + p * PANEL + i, PANEL);
        return;
    }
    for (int64_t p = 0; p < a->n_in / 2; p++) {
        const uint16_t *even = w + 2 * p * a->n_out + column, *odd = even + a->n_out;
        for (int64_t i = 0; i < PANEL; i += 16) {
            __m256i first = _mm256_loadu_si256((const __m256i *)(even + i));
            __m256i second = _mm256_loadu_si256((const __m256i *)(odd + i));
            _mm512_storeu_si512(out + p * PANEL + i, pairs_of(first, second));
        }
    }
}

INLINE void write_bf16(const float *x, uint16_t *y) {
    for (int64_t i = 0; i < PANEL; i += 16)
        _mm256_storeu_si256((__m256i *)(y + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i)));
}

INLINE void read_bf16(const uint16_t *x, float *y) {
    for (int64_t i = 0; i < PANEL; i += 16) {
        __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + i)));
        _mm512_storeu_si512(y + i, _mm512_slli_epi32(bits, 16));
    }
}

/* Columns of gate and up of a token, from fp32, and of SwiGLU of what was rounded. */
INLINE void write_swiglu(const float *gate, const float *up, uint16_t *gate_out, uint16_t *up_out, uint16_t *y) {
    float rounded_gate[PANEL], rounded_up[PANEL], product[PANEL];
    write_bf16(gate, gate_out);
    write_bf16(up, up_out);
    read_bf16(gate_out, rounded_gate);
    read_bf16(up_out, rounded_up);
    swiglu_row(rounded_gate, rounded_up, PANEL, product);
    write_bf16(product, y);
}

INLINE void write_swiglu_backward(const float *grad, const uint16_t *gate_in, const uint16_t *up_in, uint16_t *gate_out,
                                  uint16_t *up_out) {
    float gate[PANEL], up[PANEL], gate_grad[PANEL], up_grad[PANEL];
    read_bf16(gate_in, gate);
    read_bf16(up_in, up);
    swiglu_row_backward(grad, gate, up, PANEL, gate_grad, up_grad);
    write_bf16(gate_grad, gate_out);
    write_bf16(up_grad, up_out);
}

/* The columns of one panel of y, for n tokens from t on, whose inputs are `rows`. */
static void multiply_block(const ActivationProduct *a, int64_t t, int64_t n, const uint16_t *rows, int64_t stride,
                           int64_t panel, const uint32_t *panels) {
    float sums[2][TOKEN_BLOCK * PANEL] __attribute__((aligned(64)));
    int64_t size = panel_numbers(a->n_in), column = panel * PANEL, width = a->n_out;
    product(rows, stride, panels + panel * size, PANEL, sums[0], PANEL, TOKEN_BLOCK, PANEL, a->n_in, 0);
    if (a->epilogue == SWIGLU) {
        width = a->n_out / 2;
        product(rows, stride, panels + (panel + width / PANEL) * size, PANEL, sums[1], PANEL, TOKEN_BLOCK, PANEL, a->n_in,
                0);
    }
    uint16_t *y = a->y, *gate_up = a->gate_up;
    for (int64_t i = 0; i < n; i++) {
        const float *sum = sums[0] + i * PANEL;
        int64_t place = (t + i) * width + column;
        int64_t gate = 2 * (t + i) * width + column, up = gate + width;
        if (a->epilogue == NO_EPILOGUE) {
            write_bf16(sum, y + place);
        } else if (a->epilogue == SWIGLU) {
            write_swiglu(sum, sums[1] + i * PANEL, gate_up + gate, gate_up + up, y + place);
        } else {
            write_swiglu_backward(sum, gate_up + gate, gate_up + up, y + gate, y + up);
        }
    }
}
#endif

/* y. Returns 0 if there is no memory. */
int64_t activation_product(const ActivationProduct *a, int64_t n_threads) {
#if HAS_TILES
    int64_t n_panels = a->n_out / PANEL, n_blocks = (a->n_tokens + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    int64_t n_left = a->n_tokens % TOKEN_BLOCK, n_results = a->epilogue == SWIGLU ? n_panels / 2 : n_panels;
    int64_t n_groups = (n_results + PANEL_GROUP - 1) / PANEL_GROUP;
    int64_t panel_bytes = 4 * panel_numbers(a->n_in) * n_panels, last_bytes = 2 * TOKEN_BLOCK * a->n_in;
    char *space = aligned_alloc(64, panel_bytes + last_bytes);
    if (!space) return 0;
    uint32_t *panels = (uint32_t *)space;
    uint16_t *last = (uint16_t *)(space + panel_bytes); /* the inputs of the last block, if it is not full */
    const uint16_t *x = a->x;
    if (n_left) {
        memset(last, 0, last_bytes);
        for (int64_t i = 0; i < n_left; i++)
            memcpy(last + i * a->n_in, x + (a->n_tokens - n_left + i) * a->x_stride, 2 * a->n_in);
    }
    #pragma omp parallel num_threads(n_threads)
    {
        TileConfig before;
        set_tiles(&before);
        #pragma omp for schedule(static)
        for (int64_t panel = 0; panel < n_panels; panel++) pack_panel(a, panel, panels + panel * panel_numbers(a->n_in));
        #pragma omp for collapse(2) schedule(static)
        for (int64_t block = 0; block < n_blocks; block++) {
            for (int64_t group = 0; group < n_groups; group++) {
                int64_t t = block * TOKEN_BLOCK, end = (group + 1) * PANEL_GROUP, n = TOKEN_BLOCK;
                const uint16_t *rows = x + t * a->x_stride;
                int64_t stride = a->x_stride;
                if (n_left && block == n_blocks - 1) {
                    n = n_left;
                    rows = last;
                    stride = a->n_in;
                }
                if (end > n_results) end = n_results;
                for (int64_t panel = group * PANEL_GROUP; panel < end; panel++)
                    multiply_block(a, t, n, rows, stride, panel, panels);
            }
        }
        restore_tiles(&before);
    }
    free(space);
    return 1;
#else
    return 0;
#endif
}
