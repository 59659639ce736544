/* Decoding: a list of operations, run in order by all threads, on a few rows of activations (n_rows, width) in fp32.
   native/operations.py has the same structures, and each operation in plain PyTorch. */
#include <omp.h>
#include "attention.h"
#include "sampling.h"

enum { EMBED, LINEAR, ROTATE, ATTEND };          /* kinds of operations */
enum { NO_TRANSFORM, RMS_NORM, SWIGLU };         /* of the input of LINEAR */

typedef struct {
    int64_t kind;
    /* EMBED: out = weight[tokens]. LINEAR: out = [out +] transform(x) weightᵀ + bias. */
    int64_t format, transform, adds, n_in, n_out;
    const void *weight;
    const uint16_t *scale; /* of a quantized weight */
    const float *bias, *norm;
    float eps;
    /* ROTATE: norm and RoPE of queries and keys in x (n_rows, (H + 2K) D), and write keys and values to the cache.
       ATTEND: out (n_rows, H D). */
    float attention_scale, softcap;
    int64_t H, K, D, rotates;
    const float *sinks;
    Cached keys, values;
    const Visible *visible;
    float *x, *out;
} Operation;

typedef struct {
    int64_t n_rows, n_queries;       /* rows are (sequence, query); n_queries of each sequence */
    const int64_t *tokens;           /* (n_rows,) */
    const int64_t *positions;        /* (n_rows,), rows of the RoPE tables */
    const float *cosines, *sines;    /* (positions, D) */
    float *transformed;              /* (n_rows, largest n_in) */
    Activations activations;
    float *scores;                   /* (threads, n_scores) */
    int64_t n_scores;
} Step;

#define SHARE(n, begin, end) int64_t begin = (n) * thread / n_threads, end = (n) * (thread + 1) / n_threads

static void linear(const Operation *op, const Step *step, int64_t thread, int64_t n_threads) {
    const float *x = op->x;
    int64_t N = step->n_rows, is_quantized = op->format == INT8 || op->format == INT4;
    if (op->transform != NO_TRANSFORM || op->format != FP32) {
        SHARE(N, first, last);
        for (int64_t n = first; n < last; n++) {
            const float *row = x + n * op->n_in;
            float *out = step->transformed + n * op->n_in;
            if (op->transform == RMS_NORM) rms_norm(row, op->norm, op->eps, op->n_in, out);
            if (op->transform == SWIGLU) swiglu(x + 2 * n * op->n_in, op->n_in, out);
            if (is_quantized) {
                int64_t g = n * groups_of(op->n_in);
                Activations a = step->activations;
                quantize_row(op->transform == NO_TRANSFORM ? row : out, op->n_in, a.codes + g * GROUP, a.scale + g,
                             a.total + g);
            } else if (op->format == BF16) {
                round_to_bf16(op->transform == NO_TRANSFORM ? row : out, op->n_in, (uint16_t *)out);
            }
        }
        x = step->transformed;
        #pragma omp barrier
    }
    Output out = {op->out, op->n_out, op->bias, op->adds};
    if (is_quantized) {
        SHARE((op->n_out + BLOCK - 1) / BLOCK, begin, end);
        if (op->format == INT8)
            quantized_product(8, op->weight, op->scale, step->activations, N, op->n_in, op->n_out, begin, end, out);
        else
            quantized_product(4, op->weight, op->scale, step->activations, N, op->n_in, op->n_out, begin, end, out);
        return;
    }
    SHARE((op->n_out + TILE_OUT - 1) / TILE_OUT, first, last);
    int64_t begin = first * TILE_OUT, end = last * TILE_OUT < op->n_out ? last * TILE_OUT : op->n_out;
    if (op->format == FP32) plain_product(FP32, op->weight, x, N, op->n_in, begin, end, out);
    else plain_product(BF16, op->weight, x, N, op->n_in, begin, end, out);
}

static void embed(const Operation *op, const Step *step, int64_t thread, int64_t n_threads) {
    SHARE(step->n_rows, first, last);
    for (int64_t n = first; n < last; n++) {
        int64_t row = step->tokens[n] * op->n_out;
        for (int64_t i = 0; i < op->n_out; i++) op->out[n * op->n_out + i] = number_at(op->weight, op->format, row + i);
    }
}

static void rotate_and_cache(const Operation *op, const Step *step, int64_t thread, int64_t n_threads) {
    int64_t D = op->D, n_heads = op->H + 2 * op->K;
    SHARE(step->n_rows * n_heads, first, last);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t n = unit / n_heads, head = unit % n_heads, row = n / step->n_queries;
        float *x = op->x + unit * D;
        if (head < op->H + op->K) {
            if (op->norm) rms_norm(x, op->norm + head * D, op->eps, D, x);
            int64_t table = step->positions[n] * D;
            if (op->rotates) rotate(x, step->cosines + table, step->sines + table, D);
        }
        int64_t slot = op->visible->slots[n];
        if (head >= op->H + op->K)
            write_cached(op->values, cached_offset(op->values, row, head - op->H - op->K, slot), x, D);
        else if (head >= op->H)
            write_cached(op->keys, cached_offset(op->keys, row, head - op->H, slot), x, D);
    }
}

static void attention(const Operation *op, const Step *step, int64_t thread, int64_t n_threads) {
    int64_t H = op->H, D = op->D;
    SHARE(step->n_rows * H, first, last);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t n = unit / H, head = unit % H;
        attend(op->x + (n * (H + 2 * op->K) + head) * D, op->keys, op->values, n / step->n_queries, head, H / op->K,
               op->visible->length[n], D, op->attention_scale, op->softcap, op->sinks, op->visible,
               n % step->n_queries, step->scores + thread * step->n_scores, op->out + unit * D);
    }
}

void run(const Operation *operations, int64_t n_operations, const Step *step, int64_t n_threads) {
    #pragma omp parallel num_threads(n_threads)
    {
        int64_t thread = omp_get_thread_num(), n = omp_get_num_threads();
        for (int64_t i = 0; i < n_operations; i++) {
            switch (operations[i].kind) {
            case EMBED: embed(&operations[i], step, thread, n); break;
            case LINEAR: linear(&operations[i], step, thread, n); break;
            case ROTATE: rotate_and_cache(&operations[i], step, thread, n); break;
            case ATTEND: attention(&operations[i], step, thread, n); break;
            }
            #pragma omp barrier
        }
    }
}
