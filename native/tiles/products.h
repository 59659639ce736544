/* Products of small tiles of matrices in bf16 with sums in fp32: by AMX, or by the dot products of AVX512-BF16.

   A product A B reads A by rows and B as pairs: B's rows 2p and 2p + 1 lie in one row of 32-bit numbers. */
#pragma once
#include "../rows.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif
#if HAS_TILES
#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#define omp_get_num_threads() 1
#endif

#define PANEL 32      /* columns of a packed matrix that lie together */
#define ROWS_AHEAD 32 /* of a head, that are fetched into the cache */
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

#if HAS_AMX
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) TileConfig;

/* All eight tiles have 16 rows of 64 bytes. Another library may use the tiles, too: it gets back what it had set. */
INLINE void set_tiles(TileConfig *before) {
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.bytes_per_row[tile] = 64;
        config.rows[tile] = 16;
    }
    _tile_storeconfig(before);
    _tile_loadconfig(&config);
}

INLINE void restore_tiles(const TileConfig *before) {
    if (before->palette) _tile_loadconfig(before);
    else _tile_release();
}

/* C (m, n) = A (m, k) B (k, n), or C + A B; m and n are multiples of 32, as is k. Strides in elements. */
static void product(const uint16_t *a, int64_t a_stride, const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride,
                    int64_t m, int64_t n, int64_t k, int adds) {
    for (int64_t i = 0; i < m; i += 32) {
        for (int64_t j = 0; j < n; j += 32) {
            float *c0 = c + i * c_stride + j, *c1 = c0 + 16 * c_stride;
            if (adds) {
                _tile_loadd(0, c0, 4 * c_stride);
                _tile_loadd(1, c0 + 16, 4 * c_stride);
                _tile_loadd(2, c1, 4 * c_stride);
                _tile_loadd(3, c1 + 16, 4 * c_stride);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t s = 0; s < k; s += 32) {
                const uint16_t *rows = a + i * a_stride + s;
                const uint32_t *pairs = b + s / 2 * b_stride + j;
                _tile_loadd(4, rows, 2 * a_stride);
                _tile_loadd(5, rows + 16 * a_stride, 2 * a_stride);
                _tile_loadd(6, pairs, 4 * b_stride);
                _tile_loadd(7, pairs + 16, 4 * b_stride);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, c0, 4 * c_stride);
            _tile_stored(1, c0 + 16, 4 * c_stride);
            _tile_stored(2, c1, 4 * c_stride);
            _tile_stored(3, c1 + 16, 4 * c_stride);
        }
    }
}
#else
typedef struct { int unused; } TileConfig;
INLINE void set_tiles(TileConfig *before) { (void)before; }
INLINE void restore_tiles(const TileConfig *before) { (void)before; }

static void product(const uint16_t *a, int64_t a_stride, const uint32_t *b, int64_t b_stride, float *c, int64_t c_stride,
                    int64_t m, int64_t n, int64_t k, int adds) {
    for (int64_t i = 0; i < m; i += 8) {
        for (int64_t j = 0; j < n; j += 32) {
            __m512 total[8][2];
            UNROLLED
            for (int r = 0; r < 8; r++) {
                for (int half = 0; half < 2; half++) {
                    const float *from = c + (i + r) * c_stride + j + 16 * half;
                    total[r][half] = adds ? _mm512_loadu_ps(from) : _mm512_setzero_ps();
                }
            }
            for (int64_t p = 0; p < k / 2; p++) {
                __m512bh left = (__m512bh)_mm512_loadu_si512(b + p * b_stride + j);
                __m512bh right = (__m512bh)_mm512_loadu_si512(b + p * b_stride + j + 16);
                UNROLLED
                for (int r = 0; r < 8; r++) {
                    int32_t pair;
                    memcpy(&pair, a + (i + r) * a_stride + 2 * p, 4);
                    __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
                    total[r][0] = _mm512_dpbf16_ps(total[r][0], row, left);
                    total[r][1] = _mm512_dpbf16_ps(total[r][1], row, right);
                }
            }
            UNROLLED
            for (int r = 0; r < 8; r++)
                for (int half = 0; half < 2; half++)
                    _mm512_storeu_ps(c + (i + r) * c_stride + j + 16 * half, total[r][half]);
        }
    }
}
#endif

INLINE uint16_t *row_of(const Heads *x, int64_t batch, int64_t head, int64_t position) {
    return (uint16_t *)x->data + batch * x->batch + head * x->head + position * x->position;
}

/* Fetch the row of a head that is read or written soon: rows of D lie too far apart for the processor to guess. */
INLINE void fetch_row(const Heads *x, int64_t batch, int64_t head, int64_t t, int64_t T, int64_t D) {
    if (t + ROWS_AHEAD >= T) return;
    const uint16_t *row = row_of(x, batch, head, t + ROWS_AHEAD);
    for (int64_t d = 0; d < D; d += 32) __builtin_prefetch(row + d);
}

/* The rows of a head, one after the other: (n_rows, D). */
static void copy_rows(const Heads *x, int64_t batch, int64_t head, int64_t T, int64_t n_rows, int64_t D, uint16_t *out) {
    for (int64_t t = 0; t < T; t++) {
        fetch_row(x, batch, head, t, T, D);
        memcpy(out + t * D, row_of(x, batch, head, t), 2 * D);
    }
    memset(out + T * D, 0, 2 * (n_rows - T) * D);
}

/* Two vectors of 16 bf16 as pairs. */
INLINE __m512i pairs_of(__m256i even, __m256i odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

/* rows (n_rows, D) as the second factor of a product over positions: (n_rows / 2, D) pairs. */
static void pair_rows(const uint16_t *rows, int64_t n_rows, int64_t D, uint32_t *out) {
    for (int64_t p = 0; p < n_rows / 2; p++) {
        const uint16_t *even = rows + 2 * p * D, *odd = even + D;
        for (int64_t d = 0; d < D; d += 16) {
            __m256i a = _mm256_loadu_si256((const __m256i *)(even + d));
            __m256i b = _mm256_loadu_si256((const __m256i *)(odd + d));
            _mm512_storeu_si512(out + p * D + d, pairs_of(a, b));
        }
    }
}

/* Transpose 16 x 16 numbers of 32 bits; strides in numbers. */
INLINE void transpose_16(const uint32_t *x, int64_t x_stride, uint32_t *y, int64_t y_stride) {
    __m512i a[16], b[16];
    UNROLLED
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(x + i * x_stride);
    UNROLLED
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLLED
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    /* a[4 g + i] has, in each of its four lanes l, column 4 l + i of rows 4 g to 4 g + 3. */
    UNROLLED
    for (int i = 0; i < 4; i++) {
        __m512i low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88), high = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
        _mm512_storeu_si512(y + i * y_stride, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(y + (8 + i) * y_stride, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_storeu_si512(y + (4 + i) * y_stride, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(y + (12 + i) * y_stride, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}

/* rows (n_rows, D) as the second factor of a product over D, transposed: (D / 2, n_rows) pairs. */
static void pair_columns(const uint16_t *rows, int64_t n_rows, int64_t D, uint32_t *out) {
    for (int64_t t = 0; t < n_rows; t += 16)
        for (int64_t p = 0; p < D / 2; p += 16)
            transpose_16((const uint32_t *)(rows + t * D) + p, D / 2, out + p * n_rows + t, n_rows);
}

/* A part of `space`, which begins at a multiple of 64 bytes. */
INLINE void *take(char **space, int64_t n_bytes) {
    void *part = *space;
    *space += (n_bytes + 63) / 64 * 64;
    return part;
}
#endif

#define NO_TILES 0
#define DOT_PRODUCTS 1
#define AMX 2

/* What this processor computes these products by, if the system lets this process use it. */
int64_t tile_support(void) {
#if HAS_TILES && HAS_AMX
    static int64_t known = -1;
    if (known < 0) known = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 ? AMX : NO_TILES;
    return known;
#else
    return HAS_TILES ? DOT_PRODUCTS : NO_TILES;
#endif
}
