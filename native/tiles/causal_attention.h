/* Causal softmax attention in bf16, forward and backward. Scores and sums are in fp32. The scores of a block stay in the
   cache; the backward pass computes them again from the logarithm of each query's sum. native/tiles/tile_kernels.py calls these
   functions; in plain PyTorch, they are in model/kernels/blockwise_attention.py.

   A head is a matrix of T rows (positions) and D columns. `n_rows` is T rounded up to whole blocks; rows from T on are
   zeros. */
#pragma once
#include "products.h"

/* Queries of a block in the forward pass, keys of one in the backward pass: what was fastest with each form. */
#if HAS_TILES && HAS_AMX
#define BLOCK 64
#else
#define BLOCK 32
#endif
#define CHUNK 128 /* queries of a block in the backward pass */

typedef struct {
    int64_t B, H, K, T, D;
    double scale;
    Heads q, k, v, y;             /* queries, keys, values and the result */
    float *log_sums;             /* (B, H, T): ln of the sum of the exponentials of a query's scores */
    Heads y_grad;                 /* the rest: in the backward pass only */
    Heads q_grad, k_grad, v_grad;
} TileAttention;

#if HAS_TILES
/* exp(x) for x <= 0 within 2 ulp, and about 1e-38 from -87 on; NaN stays NaN. */
INLINE __m512 exp_negative(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* The first n of 16 numbers, for any n. */
INLINE __mmask16 first(int64_t n) {
    if (n >= 16) return 0xffff;
    return n <= 0 ? 0 : (1 << n) - 1;
}

/* exp(scale scores - largest) of a query's visible keys, in bf16; 0 for the others up to n_keys. Returns their sum. */
INLINE float exponentials(const float *scores, int64_t n_visible, int64_t n_keys, float scale, float *largest,
                          uint16_t *out) {
    __m512 factor = _mm512_set1_ps(scale), maximum = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int64_t s = 0; s < n_visible; s += 16) {
        __m512 x = _mm512_mul_ps(_mm512_loadu_ps(scores + s), factor);
        maximum = _mm512_mask_max_ps(maximum, first(n_visible - s), maximum, x);
    }
    *largest = _mm512_reduce_max_ps(maximum);
    maximum = _mm512_set1_ps(*largest);
    for (int64_t s = 0; s < n_keys; s += 16) {
        __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(scores + s), factor, maximum);
        __m512 p = _mm512_maskz_mov_ps(first(n_visible - s), exp_negative(x));
        total = _mm512_add_ps(total, p);
        _mm256_storeu_si256((__m256i *)(out + s), (__m256i)_mm512_cvtneps_pbh(p));
    }
    return _mm512_reduce_add_ps(total);
}

typedef struct {
    uint16_t *rows, *p;          /* (n_rows, D) of the head at hand; (BLOCK, n_rows) */
    uint32_t *k_columns, *v_rows; /* pairs */
    float *scores, *sums;        /* (BLOCK, n_rows); (BLOCK, D) */
} ForwardSpace;

/* One query head, whose keys and values are already in pairs. */
static void attend_head(const TileAttention *a, int64_t batch, int64_t head, int64_t n_rows, ForwardSpace *s) {
    int64_t D = a->D, T = a->T;
    copy_rows(&a->q, batch, head, T, n_rows, D, s->rows);
    for (int64_t t = 0; t < T; t += BLOCK) {
        int64_t n_keys = t + BLOCK;
        float inverse[BLOCK];
        product(s->rows + t * D, D, s->k_columns, n_rows, s->scores, n_rows, BLOCK, n_keys, D, 0);
        for (int64_t i = 0; i < BLOCK; i++) {
            float largest;
            float total = exponentials(s->scores + i * n_rows, t + i + 1, n_keys, a->scale, &largest, s->p + i * n_rows);
            inverse[i] = 1 / total;
            if (t + i < T) a->log_sums[(batch * a->H + head) * T + t + i] = largest + logf(total);
        }
        product(s->p, n_rows, s->v_rows, D, s->sums, D, BLOCK, D, n_keys, 0);
        for (int64_t i = 0; i < BLOCK && t + i < T; i++) {
            uint16_t *y = row_of(&a->y, batch, head, t + i);
            __m512 factor = _mm512_set1_ps(inverse[i]);
            for (int64_t d = 0; d < D; d += 16) {
                __m512 x = _mm512_mul_ps(_mm512_loadu_ps(s->sums + i * D + d), factor);
                _mm256_storeu_si256((__m256i *)(y + d), (__m256i)_mm512_cvtneps_pbh(x));
            }
        }
    }
}

INLINE int64_t in_blocks(int64_t T) { return (T + BLOCK - 1) / BLOCK * BLOCK; }

/* The result y and log_sums of all heads. space: n_threads times forward_bytes(). */
static void attend_all(const TileAttention *a, char *space, int64_t n_bytes, int64_t n_threads) {
    int64_t n_rows = in_blocks(a->T), D = a->D, n_shared = a->H / a->K;
    #pragma omp parallel num_threads(n_threads)
    {
        TileConfig before;
        set_tiles(&before);
        char *mine = space + omp_get_thread_num() * n_bytes;
        ForwardSpace s;
        s.rows = take(&mine, 2 * n_rows * D);
        s.p = take(&mine, 2 * BLOCK * n_rows);
        s.k_columns = take(&mine, 2 * n_rows * D);
        s.v_rows = take(&mine, 2 * n_rows * D);
        s.scores = take(&mine, 4 * BLOCK * n_rows);
        s.sums = take(&mine, 4 * BLOCK * D);
        #pragma omp for schedule(static)
        for (int64_t each = 0; each < a->B * a->K; each++) {
            int64_t batch = each / a->K, head = each % a->K;
            copy_rows(&a->k, batch, head, a->T, n_rows, D, s.rows);
            pair_columns(s.rows, n_rows, D, s.k_columns);
            copy_rows(&a->v, batch, head, a->T, n_rows, D, s.rows);
            pair_rows(s.rows, n_rows, D, s.v_rows);
            for (int64_t i = 0; i < n_shared; i++) attend_head(a, batch, head * n_shared + i, n_rows, &s);
        }
        restore_tiles(&before);
    }
}

typedef struct {
    uint16_t *q, *k, *v, *y_grad;             /* (n_rows, D) */
    uint32_t *q_columns, *y_grad_columns;     /* (D / 2, n_rows) pairs */
    uint32_t *q_rows, *k_rows, *y_grad_rows;  /* (n_rows / 2, D) pairs */
    float *log_sums, *dots;                   /* (n_rows,): of each query; y_grad y */
    float *scores, *p_grads;                  /* (BLOCK, CHUNK): keys and queries */
    uint16_t *p, *s_grads;                    /* as these */
    uint32_t *s_grad_pairs, *s_grad_rows;     /* (BLOCK / 2, CHUNK) pairs of keys, and transposed */
    float *q_grad, *k_grad, *v_grad;          /* (n_rows, D) */
} BackwardSpace;

static void place_backward(BackwardSpace *s, char *mine, int64_t n_rows, int64_t D) {
    uint16_t **halves[] = {&s->q, &s->k, &s->v, &s->y_grad};
    uint32_t **pairs[] = {&s->q_columns, &s->y_grad_columns, &s->q_rows, &s->k_rows, &s->y_grad_rows};
    float **grads[] = {&s->q_grad, &s->k_grad, &s->v_grad};
    for (int i = 0; i < 4; i++) *halves[i] = take(&mine, 2 * n_rows * D);
    for (int i = 0; i < 5; i++) *pairs[i] = take(&mine, 2 * n_rows * D);
    for (int i = 0; i < 3; i++) *grads[i] = take(&mine, 4 * n_rows * D);
    s->log_sums = take(&mine, 4 * n_rows);
    s->dots = take(&mine, 4 * n_rows);
    s->scores = take(&mine, 4 * BLOCK * CHUNK);
    s->p_grads = take(&mine, 4 * BLOCK * CHUNK);
    s->p = take(&mine, 2 * BLOCK * CHUNK);
    s->s_grads = take(&mine, 2 * BLOCK * CHUNK);
    s->s_grad_pairs = take(&mine, 2 * BLOCK * CHUNK);
    s->s_grad_rows = take(&mine, 2 * BLOCK * CHUNK);
}

/* The probabilities and the gradients of the scores between the keys from `key` on and n queries from `query` on. */
static void score_gradients(const TileAttention *a, BackwardSpace *s, int64_t key, int64_t query, int64_t n) {
    __m512 scale = _mm512_set1_ps(a->scale);
    for (int64_t i = 0; i < BLOCK; i += 2) {
        for (int64_t j = 0; j < n; j += 16) {
            __m512 log_sums = _mm512_loadu_ps(s->log_sums + query + j), dots = _mm512_loadu_ps(s->dots + query + j);
            __m256i s_grads[2];
            UNROLLED
            for (int odd = 0; odd < 2; odd++) {
                int64_t at = (i + odd) * CHUNK + j;
                __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(s->scores + at), scale, log_sums);
                /* Query t sees keys up to t. */
                __mmask16 is_hidden = first(key + i + odd - (query + j));
                __m512 p = _mm512_maskz_mov_ps(~is_hidden, exp_negative(x));
                __m512 s_grad = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(s->p_grads + at), dots), p);
                s_grads[odd] = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(s_grad, scale));
                _mm256_storeu_si256((__m256i *)(s->p + at), (__m256i)_mm512_cvtneps_pbh(p));
                _mm256_storeu_si256((__m256i *)(s->s_grads + at), s_grads[odd]);
            }
            _mm512_storeu_si512(s->s_grad_pairs + i / 2 * CHUNK + j, pairs_of(s_grads[0], s_grads[1]));
        }
    }
    for (int64_t p = 0; p < BLOCK / 2; p += 16)
        for (int64_t j = 0; j < n; j += 16)
            transpose_16(s->s_grad_pairs + p * CHUNK + j, CHUNK, s->s_grad_rows + j * BLOCK / 2 + p, BLOCK / 2);
}

/* The gradient of one query head; adds to those of its keys and values, which are already in place. */
static void attend_head_backward(const TileAttention *a, int64_t batch, int64_t head, int64_t n_rows, BackwardSpace *s) {
    int64_t D = a->D, T = a->T;
    copy_rows(&a->q, batch, head, T, n_rows, D, s->q);
    copy_rows(&a->y_grad, batch, head, T, n_rows, D, s->y_grad);
    pair_columns(s->q, n_rows, D, s->q_columns);
    pair_columns(s->y_grad, n_rows, D, s->y_grad_columns);
    pair_rows(s->q, n_rows, D, s->q_rows);
    pair_rows(s->y_grad, n_rows, D, s->y_grad_rows);
    memset(s->q_grad, 0, 4 * n_rows * D);
    for (int64_t t = 0; t < n_rows; t++) {
        s->log_sums[t] = 1e30f; /* no probability for a row that does not exist */
        s->dots[t] = 0;
        if (t >= T) continue;
        s->log_sums[t] = a->log_sums[(batch * a->H + head) * T + t];
        const uint16_t *y = row_of(&a->y, batch, head, t), *grad = s->y_grad + t * D;
        fetch_row(&a->y, batch, head, t, T, D);
        vec dots = {};
        for (int64_t d = 0; d < D; d += 16) dots += load_bf16(y + d) * load_bf16(grad + d);
        s->dots[t] = sum(dots);
    }
    for (int64_t key = 0; key < T; key += BLOCK) {
        for (int64_t query = key; query < n_rows; query += CHUNK) {
            int64_t n = n_rows - query < CHUNK ? n_rows - query : CHUNK;
            product(s->k + key * D, D, s->q_columns + query, n_rows, s->scores, CHUNK, BLOCK, n, D, 0);
            product(s->v + key * D, D, s->y_grad_columns + query, n_rows, s->p_grads, CHUNK, BLOCK, n, D, 0);
            score_gradients(a, s, key, query, n);
            product(s->p, CHUNK, s->y_grad_rows + query / 2 * D, D, s->v_grad + key * D, D, BLOCK, D, n, 1);
            product(s->s_grads, CHUNK, s->q_rows + query / 2 * D, D, s->k_grad + key * D, D, BLOCK, D, n, 1);
            product((const uint16_t *)s->s_grad_rows, BLOCK, s->k_rows + key / 2 * D, D, s->q_grad + query * D, D, n, D,
                    BLOCK, 1);
        }
    }
}

static void write_rows(const float *x, int64_t T, int64_t D, const Heads *out, int64_t batch, int64_t head) {
    for (int64_t t = 0; t < T; t++) {
        uint16_t *y = row_of(out, batch, head, t);
        fetch_row(out, batch, head, t, T, D);
        for (int64_t d = 0; d < D; d += 16) {
            __m512 value = _mm512_loadu_ps(x + t * D + d);
            _mm256_storeu_si256((__m256i *)(y + d), (__m256i)_mm512_cvtneps_pbh(value));
        }
    }
}

/* The gradients of all queries, keys and values. */
static void attend_all_backward(const TileAttention *a, char *space, int64_t n_bytes, int64_t n_threads) {
    int64_t n_rows = in_blocks(a->T), D = a->D, n_shared = a->H / a->K;
    #pragma omp parallel num_threads(n_threads)
    {
        TileConfig before;
        set_tiles(&before);
        BackwardSpace s;
        place_backward(&s, space + omp_get_thread_num() * n_bytes, n_rows, D);
        #pragma omp for schedule(static)
        for (int64_t each = 0; each < a->B * a->K; each++) {
            int64_t batch = each / a->K, head = each % a->K;
            copy_rows(&a->k, batch, head, a->T, n_rows, D, s.k);
            copy_rows(&a->v, batch, head, a->T, n_rows, D, s.v);
            pair_rows(s.k, n_rows, D, s.k_rows);
            memset(s.k_grad, 0, 4 * n_rows * D);
            memset(s.v_grad, 0, 4 * n_rows * D);
            for (int64_t i = 0; i < n_shared; i++) {
                int64_t query_head = head * n_shared + i;
                attend_head_backward(a, batch, query_head, n_rows, &s);
                write_rows(s.q_grad, a->T, D, &a->q_grad, batch, query_head);
            }
            write_rows(s.k_grad, a->T, D, &a->k_grad, batch, head);
            write_rows(s.v_grad, a->T, D, &a->v_grad, batch, head);
        }
        restore_tiles(&before);
    }
}

/* What one thread needs for heads of this shape. */
static int64_t space_bytes(const TileAttention *a) {
    int64_t n_rows = in_blocks(a->T), D = a->D;
    int64_t forward = n_rows * (6 * D + 6 * BLOCK) + 4 * BLOCK * D;
    int64_t backward = n_rows * (30 * D + 8) + 16 * BLOCK * CHUNK;
    return (forward > backward ? forward : backward) + 64 * 32;
}
#endif

#if HAS_TILES
static int64_t with_space(const TileAttention *a, int64_t n_threads,
                          void (*compute)(const TileAttention *, char *, int64_t, int64_t)) {
    int64_t n_bytes = (space_bytes(a) + 4095) / 4096 * 4096;
    char *space = aligned_alloc(4096, n_bytes * n_threads);
    if (!space) return 0;
    compute(a, space, n_bytes, n_threads);
    free(space);
    return 1;
}
#endif

/* y and log_sums. Returns 0 if there is no memory. */
int64_t attend(const TileAttention *a, int64_t n_threads) {
#if HAS_TILES
    return with_space(a, n_threads, attend_all);
#else
    return 0;
#endif
}

/* q_grad, k_grad and v_grad. */
int64_t attend_backward(const TileAttention *a, int64_t n_threads) {
#if HAS_TILES
    return with_space(a, n_threads, attend_all_backward);
#else
    return 0;
#endif
}
