/* The gradient of a weight matrix in fp32: the transposed gradient of the outputs times the inputs, both in bf16.
   native/tiles/tile_kernels.py calls this function. */
#pragma once
#include "products.h"

/* Rows of the result that a thread computes at a time; the most tokens of a step of its sums, and the most bytes of
   their inputs. Measured with each form of product(); see docs/development/experiments.md. */
#if HAS_TILES && HAS_AMX
#define GRADIENT_ROWS 256
#define MAX_TOKENS 512
#define INPUT_BYTES (512 * 1024)
#else
#define GRADIENT_ROWS 128
#define MAX_TOKENS 2048
#define INPUT_BYTES (4 * 1024 * 1024)
#endif

typedef struct {
    int64_t n_tokens, n_out, n_in; /* the latter two are multiples of 32 */
    const void *y_grad;            /* (n_tokens, n_out) */
    const void *x;                 /* (n_tokens, n_in) */
    int64_t y_grad_stride, x_stride;
    float *w_grad;                 /* (n_out, n_in) */
} WeightGradient;

#if HAS_TILES
/* Numbers from one panel of n_rows tokens to the next: not a power of two, whose caches would evict each other. */
INLINE int64_t panel_stride(int64_t n_rows) { return n_rows / 2 * PANEL + PANEL; }

/* Tokens of a step of the sums, a multiple of 32. */
INLINE int64_t tokens_per_step(int64_t n_in) {
    int64_t n = INPUT_BYTES / (2 * n_in) / 32 * 32;
    if (n < 32) n = 32;
    return n < MAX_TOKENS ? n : MAX_TOKENS;
}

/* Row t of a matrix whose rows from n_tokens on are zeros. */
INLINE const uint16_t *token_row(const void *x, int64_t stride, int64_t n_tokens, int64_t t, const uint16_t *zeros) {
    return t < n_tokens ? (const uint16_t *)x + t * stride : zeros;
}

/* Two rows of the inputs as pairs, in all panels. A panel has PANEL columns of all tokens, (n_rows / 2, PANEL). */
static void pack_rows(const WeightGradient *g, int64_t t, int64_t n_rows, const uint16_t *zeros, uint32_t *panels) {
    const uint16_t *even = token_row(g->x, g->x_stride, g->n_tokens, t, zeros);
    const uint16_t *odd = token_row(g->x, g->x_stride, g->n_tokens, t + 1, zeros);
    for (int64_t i = 0; i < g->n_in; i += 16) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(even + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(odd + i));
        _mm512_storeu_si512(panels + i / PANEL * panel_stride(n_rows) + t / 2 * PANEL + i % PANEL, pairs_of(a, b));
    }
}

/* n columns of y_grad from `column` on, of the tokens of a step, as rows (n, n_step) with `stride`. */
static void transpose_columns(const WeightGradient *g, int64_t column, int64_t n, int64_t token, int64_t n_step,
                              const uint16_t *zeros, uint32_t *pairs, uint16_t *out, int64_t stride) {
    for (int64_t t = 0; t < n_step; t += 32) {
        for (int64_t p = 0; p < 16; p++) {
            int64_t row = token + t + 2 * p;
            const uint16_t *even = token_row(g->y_grad, g->y_grad_stride, g->n_tokens, row, zeros) + column;
            const uint16_t *odd = token_row(g->y_grad, g->y_grad_stride, g->n_tokens, row + 1, zeros) + column;
            for (int64_t i = 0; i < n; i += 16) {
                __m256i a = _mm256_loadu_si256((const __m256i *)(even + i));
                __m256i b = _mm256_loadu_si256((const __m256i *)(odd + i));
                _mm512_storeu_si512(pairs + p * GRADIENT_ROWS + i, pairs_of(a, b));
            }
        }
        for (int64_t i = 0; i < n; i += 16)
            transpose_16(pairs + i, GRADIENT_ROWS, (uint32_t *)(out + i * stride + t), stride / 2);
    }
}

/* Rows [begin, end) of the gradient. */
static void gradient_rows(const WeightGradient *g, int64_t begin, int64_t end, int64_t n_rows, const uint32_t *panels,
                          const uint16_t *zeros, char *mine) {
    int64_t n_step = tokens_per_step(g->n_in), stride = n_step + 32;
    uint32_t *pairs = take(&mine, 4 * 16 * GRADIENT_ROWS);
    uint16_t *columns = take(&mine, 2 * GRADIENT_ROWS * stride);
    for (int64_t row = begin; row < end; row += GRADIENT_ROWS) {
        int64_t n = end - row < GRADIENT_ROWS ? end - row : GRADIENT_ROWS;
        for (int64_t token = 0; token < n_rows; token += n_step) {
            int64_t count = n_rows - token < n_step ? n_rows - token : n_step;
            transpose_columns(g, row, n, token, count, zeros, pairs, columns, stride);
            for (int64_t panel = 0; panel < g->n_in / PANEL; panel++)
                product(columns, stride, panels + panel * panel_stride(n_rows) + token / 2 * PANEL, PANEL,
                        g->w_grad + row * g->n_in + panel * PANEL, g->n_in, n, PANEL, count, token > 0);
        }
    }
}
#endif

/* w_grad. Returns 0 if there is no memory. */
int64_t weight_gradient(const WeightGradient *g, int64_t n_threads) {
#if HAS_TILES
    int64_t n_rows = (g->n_tokens + 31) / 32 * 32, stride = tokens_per_step(g->n_in) + 32;
    int64_t widest = g->n_out > g->n_in ? g->n_out : g->n_in;
    int64_t panel_bytes = 4 * panel_stride(n_rows) * (g->n_in / PANEL), zero_bytes = (2 * widest + 63) / 64 * 64;
    int64_t n_bytes = (4 * 16 * GRADIENT_ROWS + 2 * GRADIENT_ROWS * stride + 4095) / 4096 * 4096;
    char *space = aligned_alloc(64, (panel_bytes + zero_bytes + n_bytes * n_threads + 63) / 64 * 64);
    if (!space) return 0;
    char *at = space;
    uint32_t *panels = take(&at, panel_bytes);
    uint16_t *zeros = take(&at, zero_bytes);
    memset(zeros, 0, zero_bytes);
    #pragma omp parallel num_threads(n_threads)
    {
        TileConfig before;
        set_tiles(&before);
        #pragma omp for schedule(static)
        for (int64_t t = 0; t < n_rows; t += 2) pack_rows(g, t, n_rows, zeros, panels);
        int64_t n_blocks = g->n_out / 32, thread = omp_get_thread_num(), n = omp_get_num_threads();
        int64_t begin = n_blocks * thread / n * 32, end = n_blocks * (thread + 1) / n * 32;
        gradient_rows(g, begin, end, n_rows, panels, zeros, at + thread * n_bytes);
        restore_tiles(&before);
    }
    free(space);
    return 1;
#else
    return 0;
#endif
}
