/* Products of a few rows with a matrix: y[n][o] = sum over k of x[n][k] w[o][k]. Each row is computed alike in any
   batch: the order of its additions does not depend on the number of rows. */
#pragma once
#include "vectors.h"

enum { FP32, BF16, INT8, INT4 };       /* formats of a matrix */
enum { PIECE = 2 * WIDTH, TILE_OUT = 4, TILE_ROWS = 4, BLOCK = 16, GROUP = 32, QUANTIZED_ROWS = 8 };

typedef struct {
    float *y; /* (n_rows, stride) */
    int64_t stride;
    const float *bias; /* (n_out,), or NULL */
    int64_t adds;      /* add to y instead of replacing it */
} Output;

INLINE void put(Output out, int64_t row, int64_t o, float value) {
    float *y = out.y + row * out.stride + o;
    if (out.bias) value += out.bias[o];
    *y = out.adds ? *y + value : value;
}

/* Matrices in fp32 and bf16 are row-major, (n_out, n_in). Activations have the same format, in rows of 4 n_in bytes.
   Both are read in pieces of 32 numbers: two vectors of fp32, or one of bf16 in `a`. */

typedef struct {
    vec a, b;
} Piece;

INLINE int64_t size_of(int format) { return format == BF16 ? 2 : 4; }

INLINE Piece load_piece(const char *p, int format, int64_t k) {
    p += k * size_of(format);
    Piece piece = {load((const float *)p), {}};
    if (format == FP32) piece.b = load((const float *)p + WIDTH);
    IN_REGISTER(piece.a);
    if (format == FP32) IN_REGISTER(piece.b);
    return piece;
}

INLINE float number_at(const char *p, int format, int64_t k) {
    return format == BF16 ? bf16_to_float(((const uint16_t *)p)[k]) : ((const float *)p)[k];
}

/* total + the products of two pieces, in any 16 sums. */
INLINE vec multiply_add(int format, vec total, Piece x, Piece w) {
    if (format == FP32) return total + x.a * w.a + x.b * w.b;
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)x.a, (__m512bh)w.a);
#else /* the even and the odd numbers are the halves of 32-bit words */
    uint_vec a = (uint_vec)x.a, b = (uint_vec)w.a;
    return total + (vec)(a << 16) * (vec)(b << 16) + (vec)(a & 0xffff0000) * (vec)(b & 0xffff0000);
#endif
}

/* n_out outputs of n_rows rows; both are constants where this is inlined. A single row reads the matrix from start to
   end, which the hardware foresees. Several rows read TILE_OUT outputs at once and fetch the next ones in order. */
INLINE void dot_tile(int format, int n_out, int n_rows, const char *w, const char *x, int64_t n_in,
                     float result[TILE_ROWS][TILE_OUT]) {
    vec total[TILE_ROWS][TILE_OUT] = {};
    int64_t k = 0, size = size_of(format), stride = n_in * size, pitch = n_in * sizeof(float);
    for (; k + PIECE <= n_in; k += PIECE) {
        Piece weights[TILE_OUT];
        UNROLLED
        for (int o = 0; o < n_out; o++) {
            weights[o] = load_piece(w + o * stride, format, k);
            if (n_out == 1) continue;
            __builtin_prefetch(w + n_out * stride + (k * n_out + o * PIECE) * size);
            if (format == FP32) __builtin_prefetch(w + n_out * stride + (k * n_out + o * PIECE + WIDTH) * size);
        }
        UNROLLED
        for (int n = 0; n < n_rows; n++) {
            Piece values = load_piece(x + n * pitch, format, k);
            UNROLLED
            for (int o = 0; o < n_out; o++) total[n][o] = multiply_add(format, total[n][o], values, weights[o]);
        }
    }
    UNROLLED
    for (int n = 0; n < n_rows; n++) {
        vec4 y = sum4(total[n][0], total[n][1], total[n][2], total[n][3]); /* of n_out, and zeros */
        for (int64_t rest = k; rest < n_in; rest++)
            for (int o = 0; o < n_out; o++) {
                float a = number_at(x + n * pitch, format, rest), b = number_at(w + o * stride, format, rest);
#ifdef FP_FAST_FMAF /* the compiler could otherwise round the product for one number of rows and not for another */
                y[o] = fmaf(a, b, y[o]);
#else
                y[o] += a * b;
#endif
            }
        memcpy(result[n], &y, sizeof y);
    }
}

/* Outputs first to first + n_out of all rows. */
INLINE void dot_tiles(int format, int n_out, const char *weight, const char *x, int64_t n_rows, int64_t n_in,
                      int64_t first, Output out) {
    const char *w = weight + first * n_in * size_of(format);
    for (int64_t n = 0; n < n_rows; n += TILE_ROWS) {
        float result[TILE_ROWS][TILE_OUT];
        const char *rows = x + n * n_in * sizeof(float);
        int count = n_rows - n < TILE_ROWS ? n_rows - n : TILE_ROWS;
        switch (count) {
        case 1: dot_tile(format, n_out, 1, w, rows, n_in, result); break;
        case 2: dot_tile(format, n_out, 2, w, rows, n_in, result); break;
        case 3: dot_tile(format, n_out, 3, w, rows, n_in, result); break;
        default: dot_tile(format, n_out, 4, w, rows, n_in, result);
        }
        for (int r = 0; r < count; r++)
            for (int o = 0; o < n_out; o++) put(out, n + r, first + o, result[r][o]);
    }
}

/* Outputs [begin, end). */
INLINE void plain_product(int format, const void *weight, const void *x, int64_t n_rows, int64_t n_in, int64_t begin,
                          int64_t end, Output out) {
    int64_t o = begin;
    if (n_rows > 1)
        for (; o + TILE_OUT <= end; o += TILE_OUT) dot_tiles(format, TILE_OUT, weight, x, n_rows, n_in, o, out);
    for (; o < end; o++) dot_tiles(format, 1, weight, x, n_rows, n_in, o, out);
}

/* Quantized matrices: blocks of 16 outputs, each a sequence of groups of 32 inputs. A group holds 8 vectors of 16
   outputs x 4 inputs, one byte per weight plus 128 (int8), or 4 such vectors with a nibble per weight plus 8 (int4: the
   low nibbles are the first 16 inputs). Each group of each output has a bf16 scale, and each group of an activation has
   an fp32 scale. Activations are int8, too, so that sums within a group are exact integers. */

typedef struct {
    int8_t *codes;   /* (n_rows, n_groups * 32) */
    float *scale;    /* (n_rows, n_groups) */
    int32_t *offset; /* (n_rows, n_groups): what the offset of the weights adds to each sum, negated */
} Activations;

INLINE int64_t groups_of(int64_t n_in) { return (n_in + GROUP - 1) / GROUP; }

INLINE void quantize_group(const float *x, int bits, int8_t *codes, float *scale, int32_t *offset) {
    vec low = load(x), high = load(x + WIDTH);
    vec a = select_vec(low < 0, -low, low), b = select_vec(high < 0, -high, high);
    float unit = maximum(select_vec(a > b, a, b)) / 127;
    unit = unit > 1e-30f ? unit : 1e-30f;
    int_vec first = __builtin_convertvector(round_vec(low / unit), int_vec);
    int_vec second = __builtin_convertvector(round_vec(high / unit), int_vec);
    *(byte_vec *)codes = __builtin_convertvector(first, byte_vec);
    *(byte_vec *)(codes + WIDTH) = __builtin_convertvector(second, byte_vec);
    *scale = unit;
    *offset = (bits == 8 ? -128 : -8) * sum_int(first + second);
}

/* total + the products of 16 x 4 unsigned bytes with 4 signed bytes, summed over each 4. */
INLINE int_vec dot_bytes(int_vec total, uint_vec weights, const int8_t *codes) {
    int32_t quad;
    memcpy(&quad, codes, 4);
#if defined(__AVX512VNNI__)
    return (int_vec)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, _mm512_set1_epi32(quad));
#else
    for (int j = 0; j < 4; j++) total += (int_vec)((weights >> (8 * j)) & 255) * (int32_t)codes[j];
    return total;
#endif
}

INLINE void quantized_tile(int bits, int n_rows, const uint8_t *block, const uint16_t *scales, Activations x,
                           int64_t n_groups, vec result[QUANTIZED_ROWS]) {
    UNROLLED
    for (int n = 0; n < n_rows; n++) result[n] = (vec){};
    for (int64_t g = 0; g < n_groups; g++) {
        const uint_vec *bytes = (const uint_vec *)(block + g * BLOCK * GROUP * bits / 8);
        int_vec total[QUANTIZED_ROWS];
        UNROLLED
        for (int n = 0; n < n_rows; n++) total[n] = x.offset[n * n_groups + g] - (int_vec){};
        UNROLLED
        for (int j = 0; j < bits; j++) {
            uint_vec weights = bytes[j];
            if (n_rows >= 4) __builtin_prefetch((const char *)(bytes + j) + 2048); /* read too slowly to be foreseen */
            UNROLLED
            for (int n = 0; n < n_rows; n++) {
                const int8_t *codes = x.codes + (n * n_groups + g) * GROUP + 4 * j;
                if (bits == 8) {
                    total[n] = dot_bytes(total[n], weights, codes);
                } else {
                    total[n] = dot_bytes(total[n], weights & 0x0f0f0f0f, codes);
                    total[n] = dot_bytes(total[n], (weights >> 4) & 0x0f0f0f0f, codes + GROUP / 2);
                }
            }
        }
        vec scale = load_bf16(scales + g * BLOCK);
        UNROLLED
        for (int n = 0; n < n_rows; n++)
            result[n] += __builtin_convertvector(total[n], vec) * (scale * x.scale[n * n_groups + g]);
    }
}

/* Blocks [begin, end) of 16 outputs, of which n_out outputs exist. */
INLINE void quantized_product(int bits, const uint8_t *weight, const uint16_t *scales, Activations x, int64_t n_rows,
                              int64_t n_in, int64_t n_out, int64_t begin, int64_t end, Output out) {
    int64_t n_groups = groups_of(n_in);
    for (int64_t b = begin; b < end; b++) {
        const uint8_t *block = weight + b * n_groups * BLOCK * GROUP * bits / 8;
        const uint16_t *scale = scales + b * n_groups * BLOCK;
        int64_t n_valid = n_out - b * BLOCK < BLOCK ? n_out - b * BLOCK : BLOCK;
        for (int64_t n = 0; n < n_rows; n += QUANTIZED_ROWS) {
            vec result[QUANTIZED_ROWS];
            Activations rows = {x.codes + n * n_groups * GROUP, x.scale + n * n_groups, x.offset + n * n_groups};
            int count = n_rows - n < QUANTIZED_ROWS ? n_rows - n : QUANTIZED_ROWS;
            switch (count) {
            case 1: quantized_tile(bits, 1, block, scale, rows, n_groups, result); break;
            case 2: quantized_tile(bits, 2, block, scale, rows, n_groups, result); break;
            case 3: quantized_tile(bits, 3, block, scale, rows, n_groups, result); break;
            case 4: quantized_tile(bits, 4, block, scale, rows, n_groups, result); break;
            case 5: quantized_tile(bits, 5, block, scale, rows, n_groups, result); break;
            case 6: quantized_tile(bits, 6, block, scale, rows, n_groups, result); break;
            case 7: quantized_tile(bits, 7, block, scale, rows, n_groups, result); break;
            default: quantized_tile(bits, 8, block, scale, rows, n_groups, result);
            }
            for (int r = 0; r < count; r++)
                for (int64_t o = 0; o < n_valid; o++) put(out, n + r, b * BLOCK + o, result[r][o]);
        }
    }
}
