/* Decoding: a list of operations, run in order by all threads, on a few rows of activations (n_rows, width) in fp32.
   native/operations.py has the same structures. In plain PyTorch, the operations are those of model/, with the rounding
   of native/quantization.py. */
#ifdef _OPENMP
#include <omp.h>
#endif
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
    int64_t n_rows;
    const int64_t *tokens;           /* (n_rows,) */
    const int64_t *cache_rows;       /* (n_rows,): the row of the cache that holds the keys of each row */
    int64_t *positions;              /* (n_rows,), rows of the RoPE tables */
    const float *cosines, *sines;    /* (positions, D) */
    float *transformed;              /* (n_rows, largest n_in) */
    Activations activations;
    float *scores;                   /* (threads, TILE_QUERIES, n_scores) */
    int64_t n_scores;
} Step;

#define SHARE(n, begin, end) int64_t begin = (n) * thread / n_threads, end = (n) * (thread + 1) / n_threads

/* Prepare the input of a product: threads share the groups of 32 inputs of each row. */
static void transform(const Operation *op, const Step *step, int64_t thread, int64_t n_threads) {
    int64_t n_groups = groups_of(op->n_in), is_quantized = op->format == INT8 || op->format == INT4;
    Activations a = step->activations;
    SHARE(n_groups, first, last);
    for (int64_t n = 0; n < step->n_rows; n++) {
        const float *x = op->x + n * op->n_in * (op->transform == SWIGLU ? 2 : 1);
        float *row = step->transformed + n * op->n_in;
        uint16_t *halves = (uint16_t *)row; /* each number takes half of the space */
        float scale = op->transform == RMS_NORM ? inverse_rms(x, op->eps, op->n_in) : 1;
        for (int64_t g = first; g < last; g++) {
            int64_t begin = g * GROUP, count = op->n_in - begin < GROUP ? op->n_in - begin : GROUP;
            float group[GROUP] = {};
            if (op->transform == RMS_NORM) scaled(x + begin, op->norm + begin, scale, count, group);
            else if (op->transform == SWIGLU) swiglu(x + begin, x + op->n_in + begin, count, group);
            else memcpy(group, x + begin, count * sizeof(float));
            if (is_quantized) {
                int64_t i = n * n_groups + g;
                quantize_group(group, op->format == INT8 ? 8 : 4, a.codes + i * GROUP, a.scale + i, a.offset + i);
            } else if (op->format == BF16) {
                round_to_bf16(group, count, halves + begin);
            } else {
                memcpy(row + begin, group, count * sizeof(float));
            }
        }
    }
}

static void linear(const Operation *op, const Step *step, int64_t thread, int64_t n_threads) {
    const float *x = op->x;
    int64_t N = step->n_rows, is_quantized = op->format == INT8 || op->format == INT4;
    if (op->transform != NO_TRANSFORM || op->format != FP32) {
        transform(op, step, thread, n_threads);
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
        int64_t n = unit / n_heads, head = unit % n_heads, row = step->cache_rows[n];
        float *x = op->x + unit * D;
        if (head < op->H + op->K) {
            if (op->norm) scaled(x, op->norm + head * D, inverse_rms(x, op->eps, D), D, x);
            int64_t table = step->positions[n] * D;
            if (op->rotates) rotate(x, step->cosines + table, step->sines + table, D);
        }
        int64_t slot = op->visible->slots[n];
        if (head >= op->H + op->K) write_cached(&op->values, row, head - op->H - op->K, slot, x, D);
        else if (head >= op->H) write_cached(&op->keys, row, head - op->H, slot, x, D);
    }
}

/* A thread's share of the tiles and heads. The format of the cache is a constant where it is quantized. */
INLINE void attend_tiles(int64_t format, const Operation *op, const Step *step, const int64_t *starts, int64_t n_tiles,
                         int64_t thread, int64_t n_threads) {
    int64_t H = op->H, D = op->D, width = (H + 2 * op->K) * D, stride = step->n_scores;
    float *scores = step->scores + thread * TILE_QUERIES * stride;
    SHARE(n_tiles * H, first, last); /* ordered by head, because later tiles may have more keys */
    for (int64_t unit = first; unit < last; unit++) {
        int64_t head = unit / n_tiles, n = starts[unit % n_tiles], count = starts[unit % n_tiles + 1] - n;
        const float *q = op->x + n * width + head * D;
        float *y = op->out + (n * H + head) * D;
#define ATTEND_TILE(size) \
    attend(size, format, q, width, &op->keys, &op->values, step->cache_rows[n], head, H / op->K, op->visible->length + n, \
           D, op->attention_scale, op->softcap, op->sinks, op->visible, n, scores, stride, y, H * D)
        if (count == TILE_QUERIES) ATTEND_TILE(TILE_QUERIES);
        else ATTEND_TILE(1);
    }
}

/* Whether row n, which follows others of a tile that begins with row `start`, can be in this tile: it attends to as many
   keys of the same row of the cache or more, and to the same keys in a ring. */
INLINE int shares_keys(const Operation *op, const Step *step, int64_t start, int64_t n) {
    const int64_t *S = op->visible->length;
    return n < step->n_rows && !op->visible->mask && S[n] >= S[n - 1] &&
           step->cache_rows[n] == step->cache_rows[start] &&
           (!op->keys.n_newest || first_exact(op->visible->slots[n]) == first_exact(op->visible->slots[start]));
}

/* Tiles have TILE_QUERIES rows or one. */
static void attention(const Operation *op, const Step *step, int64_t thread, int64_t n_threads) {
    int64_t starts[step->n_rows + 1], n_tiles = 0;
    for (int64_t n = 0; n < step->n_rows; n = starts[n_tiles]) {
        int64_t end = n + 1;
        while (end < n + TILE_QUERIES && shares_keys(op, step, n, end)) end++;
        starts[n_tiles++] = n;
        starts[n_tiles] = end == n + TILE_QUERIES ? end : n + 1;
    }
    switch (op->keys.format) {
    case INT8: attend_tiles(INT8, op, step, starts, n_tiles, thread, n_threads); break;
    case INT4: attend_tiles(INT4, op, step, starts, n_tiles, thread, n_threads); break;
    default: attend_tiles(op->keys.format == BF16 ? BF16 : FP32, op, step, starts, n_tiles, thread, n_threads);
    }
}

/* How many rows the products compute as fast as torch's; more are computed in several passes. */
int64_t max_rows(void) {
#if defined(__AVX512F__)
    return 128;
#else /* GCC keeps vectors that are wider than the registers in memory */
    return 16;
#endif
}

void run(const Operation *operations, int64_t n_operations, const Step *step, int64_t n_threads) {
    #pragma omp parallel num_threads(n_threads)
    {
        int64_t thread = 0, n = 1; /* of a compiler without OpenMP, such as Apple's */
#ifdef _OPENMP
        thread = omp_get_thread_num();
        n = omp_get_num_threads();
#endif
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

/* Sample n_steps tokens of each of n_rows sequences, the first from `logits`, running the model between two of them. It
   counts up what `first` and `visible` say of positions. Arguments as in sample(); tokens, logprobs and uniforms have a
   row per step, and logits that of the last operation. */
void sample_steps(const Operation *operations, int64_t n_operations, const Step *first, Visible *visible, int64_t n_threads,
                  const float *logits, int64_t stride, int64_t n_ids, const double *temperatures, const double *uniforms,
                  double *terms, int64_t *tokens, float *logprobs, int64_t n_steps) {
    Step step = *first;
    int64_t N = step.n_rows;
    for (int64_t i = 0;; i++) {
        sample(logits, N, stride, n_ids, temperatures, uniforms + i * N, terms, tokens + i * N, logprobs + i * N,
               NULL, NULL);
        if (i == n_steps - 1) return;
        step.tokens = tokens + i * N;
        run(operations, n_operations, &step, n_threads);
        for (int64_t n = 0; n < N; n++) {
            step.positions[n]++;
            visible->slots[n]++;
            visible->length[n]++;
        }
        logits = operations[n_operations - 1].out;
        stride = operations[n_operations - 1].n_out;
    }
}
