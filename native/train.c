/* Training: fused operations between the matrix products, forward and backward, and the updates of Muon. Tensors are in
   fp32 or bf16, sums in fp32. Rows are cut into PARTS, whatever the number of threads, so that sums over rows do not
   depend on it. native/training.py calls these functions; in plain PyTorch, they are in model/ and training/optim/muon.py. */
#include "dropout.h"
#include "rows.h"
#include "swiglu.h"
#include "tiles/activation_product.h"
#include "tiles/causal_attention.h"
#include "tiles/weight_gradient.h"

INLINE float inverse_rms(const float *restrict x, float eps, int64_t n) {
    float squares = 0;
    #pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; i++) squares += x[i] * x[i];
    return 1 / sqrtf(squares / n + eps);
}

INLINE void norm_row(const float *restrict x, const float *restrict w, float eps, int64_t n, float *restrict y) {
    float scale = inverse_rms(x, eps, n);
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * w[i];
}

/* The gradients of norm_row(): x_grad, and that of w, which is added to w_grad. */
INLINE void norm_row_backward(const float *restrict grad, const float *restrict x, const float *restrict w, float eps,
                              int64_t n, float *restrict x_grad, float *restrict w_grad) {
    float scale = inverse_rms(x, eps, n), products = 0;
    #pragma omp simd reduction(+ : products)
    for (int64_t i = 0; i < n; i++) {
        float product = grad[i] * (x[i] * scale);
        w_grad[i] += product;
        products += product * w[i];
    }
    float mean = products / n;
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) x_grad[i] = (grad[i] * w[i] - x[i] * scale * mean) * scale;
}

/* out[i] = Σ partial[part][i], in order. */
static void add_parts(const float *restrict partial, int64_t n, float *restrict out) {
    memset(out, 0, n * sizeof(float));
    for (int part = 0; part < PARTS; part++)
        for (int64_t i = 0; i < n; i++) out[i] += partial[part * n + i];
}

/* x, out (n_rows, n). */
void rms_norm(const void *x, int64_t is_bf16, const float *w, double eps, int64_t n_rows, int64_t n, void *out,
              int64_t n_threads) {
    #pragma omp parallel for num_threads(n_threads) schedule(static)
    for (int part = 0; part < PARTS; part++) {
        float x_space[n], y_space[n];
        PART(n_rows, part, begin, end);
        for (int64_t row = begin; row < end; row++) {
            void *y = at(out, is_bf16, row * n);
            norm_row(read_row(at(x, is_bf16, row * n), is_bf16, n, x_space), w, eps, n,
                     row_to_write(y, is_bf16, y_space));
            write_row(y, is_bf16, n, y_space);
        }
    }
}

/* grad, x, x_grad (n_rows, n); w_grad (n,); partial (PARTS, n), zeros. */
void rms_norm_backward(const void *grad, const void *x, int64_t is_bf16, const float *w, double eps, int64_t n_rows,
                       int64_t n, void *x_grad, float *w_grad, float *partial, int64_t n_threads) {
    #pragma omp parallel for num_threads(n_threads) schedule(static)
    for (int part = 0; part < PARTS; part++) {
        float grad_space[n], x_space[n], out_space[n];
        PART(n_rows, part, begin, end);
        for (int64_t row = begin; row < end; row++) {
            void *out = at(x_grad, is_bf16, row * n);
            norm_row_backward(read_row(at(grad, is_bf16, row * n), is_bf16, n, grad_space),
                              read_row(at(x, is_bf16, row * n), is_bf16, n, x_space), w, eps, n,
                              row_to_write(out, is_bf16, out_space), partial + part * n);
            write_row(out, is_bf16, n, out_space);
        }
    }
    add_parts(partial, n, w_grad);
}

typedef struct {
    int64_t is_bf16, B, T, H, K, D;
    const void *x;                   /* (B, T, H + 2K, D): queries, keys and values before norm and RoPE */
    const float *norms[2];           /* weights for queries and keys, (D,), or no norm */
    double eps;
    const void *cosines, *sines;     /* (T, D), or no RoPE; the sines of the first half are negated */
    int64_t table_batch;             /* stride of the tables from one sequence to the next, or 0 */
    Heads heads[3];                  /* queries, keys and values after norm and RoPE, or their gradients */
    void *x_grad;                    /* as x */
    float *norm_grads[2], *partial;  /* (D,) each; (2, PARTS, D), zeros */
} Rotation;

/* y[i] = x[i] cos[i] + x[i + D/2] sin[i], where indices wrap around. */
INLINE void rotate_row(const float *restrict x, const float *restrict cos, const float *restrict sin, int64_t D,
                       float *restrict y) {
    int64_t half = D / 2;
    #pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        y[i] = first * cos[i] + second * sin[i];
        y[i + half] = second * cos[i + half] + first * sin[i + half];
    }
}

INLINE void rotate_row_backward(const float *restrict grad, const float *restrict cos, const float *restrict sin,
                                int64_t D, float *restrict x_grad) {
    int64_t half = D / 2;
    #pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float first = grad[i], second = grad[i + half];
        x_grad[i] = first * cos[i] + second * sin[i + half];
        x_grad[i + half] = second * cos[i + half] + first * sin[i];
    }
}

/* One position: norm and rotate its heads, or compute the gradient of that. space (6, D) */
INLINE void rotate_position(const Rotation *r, int64_t D, int64_t row, int part, int is_backward, float *space) {
    int64_t batch = row / r->T, position = row % r->T, is_bf16 = r->is_bf16;
    int64_t offset = row * (r->H + 2 * r->K) * D, table = batch * r->table_batch + position * D;
    int64_t n_heads[3] = {r->H, r->K, r->K};
    const float *cos = NULL, *sin = NULL;
    if (r->cosines) {
        cos = read_row(at(r->cosines, is_bf16, table), is_bf16, D, space);
        sin = read_row(at(r->sines, is_bf16, table), is_bf16, D, space + D);
    }
    for (int kind = 0; kind < 3; kind++) {
        const Heads *heads = &r->heads[kind];
        const float *w = kind < 2 ? r->norms[kind] : NULL;
        for (int64_t head = 0; head < n_heads[kind]; head++, offset += D) {
            int64_t place = batch * heads->batch + position * heads->position + head * heads->head;
            void *rotated = at(heads->data, is_bf16, place);
            void *from = is_backward ? rotated : at(r->x, is_bf16, offset);
            void *to = is_backward ? at(r->x_grad, is_bf16, offset) : rotated;
            if (kind == 2 || !(w || cos)) {
                memcpy(to, from, D * (is_bf16 ? 2 : 4));
                continue;
            }
            const float *x = read_row(from, is_bf16, D, space + 2 * D);
            float *out = row_to_write(to, is_bf16, space + 3 * D), *between = w && cos ? space + 4 * D : out;
            if (!is_backward) {
                if (w) norm_row(x, w, r->eps, D, between);
                if (cos) rotate_row(w ? between : x, cos, sin, D, out);
            } else {
                if (cos) rotate_row_backward(x, cos, sin, D, between);
                if (w)
                    norm_row_backward(cos ? between : x, read_row(at(r->x, is_bf16, offset), is_bf16, D, space + 5 * D),
                                      w, r->eps, D, out, r->partial + (kind * PARTS + part) * D);
            }
            write_row(to, is_bf16, D, space + 3 * D);
        }
    }
}

static void rotate_positions(const Rotation *r, int64_t n_threads, int is_backward) {
    #pragma omp parallel for num_threads(n_threads) schedule(static)
    for (int part = 0; part < PARTS; part++) {
        float space[6 * r->D];
        PART(r->B * r->T, part, begin, end);
        for (int64_t row = begin; row < end; row++) {
            switch (r->D) { /* the compiler makes faster loops of a known length */
            case 32: rotate_position(r, 32, row, part, is_backward, space); break;
            case 64: rotate_position(r, 64, row, part, is_backward, space); break;
            case 128: rotate_position(r, 128, row, part, is_backward, space); break;
            default: rotate_position(r, r->D, row, part, is_backward, space);
            }
        }
    }
}

void rotate_heads(const Rotation *r, int64_t n_threads) { rotate_positions(r, n_threads, 0); }

void rotate_heads_backward(const Rotation *r, int64_t n_threads) {
    rotate_positions(r, n_threads, 1);
    for (int kind = 0; kind < 2; kind++)
        if (r->norms[kind]) add_parts(r->partial + kind * PARTS * r->D, r->D, r->norm_grads[kind]);
}

/* gate_up (n_rows, 2n) -> out (n_rows, n). */
void swiglu(const void *gate_up, int64_t is_bf16, int64_t n_rows, int64_t n, void *out, int64_t n_threads) {
    #pragma omp parallel for num_threads(n_threads) schedule(static)
    for (int part = 0; part < PARTS; part++) {
        float gate_space[COLUMNS], up_space[COLUMNS], out_space[COLUMNS];
        PART(n_rows, part, begin, end);
        for (int64_t row = begin; row < end; row++) {
            for (int64_t i = 0; i < n; i += COLUMNS) {
                int64_t count = n - i < COLUMNS ? n - i : COLUMNS;
                void *to = at(out, is_bf16, row * n + i);
                swiglu_row(read_row(at(gate_up, is_bf16, 2 * row * n + i), is_bf16, count, gate_space),
                           read_row(at(gate_up, is_bf16, 2 * row * n + n + i), is_bf16, count, up_space), count,
                           row_to_write(to, is_bf16, out_space));
                write_row(to, is_bf16, count, out_space);
            }
        }
    }
}

/* grad (n_rows, n), gate_up (n_rows, 2n) -> out (n_rows, 2n). */
void swiglu_backward(const void *grad, const void *gate_up, int64_t is_bf16, int64_t n_rows, int64_t n, void *out,
                     int64_t n_threads) {
    #pragma omp parallel for num_threads(n_threads) schedule(static)
    for (int part = 0; part < PARTS; part++) {
        float grad_space[COLUMNS], gate_space[COLUMNS], up_space[COLUMNS], gate_out[COLUMNS], up_out[COLUMNS];
        PART(n_rows, part, begin, end);
        for (int64_t row = begin; row < end; row++) {
            for (int64_t i = 0; i < n; i += COLUMNS) {
                int64_t count = n - i < COLUMNS ? n - i : COLUMNS, gate = 2 * row * n + i, up = gate + n;
                swiglu_row_backward(read_row(at(grad, is_bf16, row * n + i), is_bf16, count, grad_space),
                                    read_row(at(gate_up, is_bf16, gate), is_bf16, count, gate_space),
                                    read_row(at(gate_up, is_bf16, up), is_bf16, count, up_space), count,
                                    row_to_write(at(out, is_bf16, gate), is_bf16, gate_out),
                                    row_to_write(at(out, is_bf16, up), is_bf16, up_out));
                write_row(at(out, is_bf16, gate), is_bf16, count, gate_out);
                write_row(at(out, is_bf16, up), is_bf16, count, up_out);
            }
        }
    }
}

INLINE float largest_of(const float *restrict x, int64_t n, float largest) {
    #pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

INLINE float sum_of_exponentials(const float *restrict x, int64_t n, float largest) {
    float total = 0;
    #pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; i++) total += exponential(x[i] - largest);
    return total;
}

/* y may be the memory of x. */
INLINE void softmax_of(const float *x, int64_t n, float largest, float inverse, float *y) {
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = exponential(x[i] - largest) * inverse;
}

/* Cross-entropy of a row of logits, which its gradient replaces. */
INLINE float cross_entropy_row(void *logits, int64_t is_bf16, int64_t n, int64_t target, int64_t needs_gradient) {
    float space[COLUMNS], out_space[COLUMNS], largest = -INFINITY, total = 0;
    for (int64_t begin = 0; begin < n; begin += COLUMNS) {
        int64_t count = n - begin < COLUMNS ? n - begin : COLUMNS;
        largest = largest_of(read_row(at(logits, is_bf16, begin), is_bf16, count, space), count, largest);
    }
    for (int64_t begin = 0; begin < n; begin += COLUMNS) {
        int64_t count = n - begin < COLUMNS ? n - begin : COLUMNS;
        total += sum_of_exponentials(read_row(at(logits, is_bf16, begin), is_bf16, count, space), count, largest);
    }
    float loss = logf(total) - (*read_row(at(logits, is_bf16, target), is_bf16, 1, space) - largest);
    if (!needs_gradient) return loss;
    for (int64_t begin = 0; begin < n; begin += COLUMNS) {
        int64_t count = n - begin < COLUMNS ? n - begin : COLUMNS;
        void *place = at(logits, is_bf16, begin);
        float *out = row_to_write(place, is_bf16, out_space);
        softmax_of(read_row(place, is_bf16, count, space), count, largest, 1 / total, out);
        if (target >= begin && target < begin + count) out[target - begin] -= 1;
        write_row(place, is_bf16, count, out);
    }
    return loss;
}

/* logits (n_rows, n), which their gradient replaces; targets (n_rows,), or below 0: no loss; losses (n_rows,). */
void cross_entropy(void *logits, int64_t is_bf16, int64_t n_rows, int64_t n, const int64_t *targets, float *losses,
                   int64_t needs_gradient, int64_t n_threads) {
    #pragma omp parallel for num_threads(n_threads) schedule(static)
    for (int64_t row = 0; row < n_rows; row++) {
        void *x = at(logits, is_bf16, row * n);
        if (targets[row] >= 0) {
            losses[row] = cross_entropy_row(x, is_bf16, n, targets[row], needs_gradient);
        } else {
            losses[row] = 0;
            if (needs_gradient) memset(x, 0, n * (is_bf16 ? 2 : 4));
        }
    }
}

/* x, out (n,). The gradient is the same function of the gradient of out. */
void dropout(const void *x, int64_t is_bf16, int64_t n, const uint64_t *seed, double p, void *out, int64_t n_threads) {
    #pragma omp parallel for num_threads(n_threads) schedule(static)
    for (int part = 0; part < PARTS; part++) {
        float x_space[COLUMNS], out_space[COLUMNS];
        PART(n, part, begin, end);
        for (int64_t i = begin; i < end; i += COLUMNS) {
            int64_t count = end - i < COLUMNS ? end - i : COLUMNS;
            void *to = at(out, is_bf16, i);
            dropout_row(read_row(at(x, is_bf16, i), is_bf16, count, x_space), i, count, *seed, p,
                        row_to_write(to, is_bf16, out_space));
            write_row(to, is_bf16, count, out_space);
        }
    }
}

/* Muon. All matrices have the shape (n_rows, n). */

/* momenta += (grads - momenta) (1 - beta); out (n_matrices, n_rows, n) = the momenta, or with `nesterov` what they
   become if the same gradient comes again. */
void muon_momentum(const float *const *grads, float *const *momenta, int64_t n_matrices, int64_t n_rows, int64_t n,
                   double beta, int64_t nesterov, void *out, int64_t is_bf16, int64_t n_threads) {
    float new = 1 - beta, old = nesterov ? beta : 1;
    #pragma omp parallel for num_threads(n_threads) schedule(static)
    for (int64_t row = 0; row < n_matrices * n_rows; row++) {
        const float *restrict grad = grads[row / n_rows] + row % n_rows * n;
        float *restrict momentum = momenta[row / n_rows] + row % n_rows * n, space[COLUMNS];
        for (int64_t begin = 0; begin < n; begin += COLUMNS) {
            int64_t count = n - begin < COLUMNS ? n - begin : COLUMNS;
            void *to = at(out, is_bf16, row * n + begin);
            float *restrict update = row_to_write(to, is_bf16, space);
            #pragma omp simd
            for (int64_t i = 0; i < count; i++) {
                float g = grad[begin + i], m = momentum[begin + i] + (g - momentum[begin + i]) * new;
                momentum[begin + i] = m;
                update[i] = g + (m - g) * old;
            }
            write_row(to, is_bf16, count, space);
        }
    }
}

/* Divide each row of updates (n_matrices, n_rows, n) by its root mean square over recent steps, keeping the norm of each
   matrix, decay the weights and move them. means (n_rows,) of each matrix: of the squares, where new ones enter with
   `new`; factors (n_matrices, n_rows): space. */
void muon_update(const void *updates, int64_t is_bf16, float *const *means, float *const *weights, int64_t n_matrices,
                 int64_t n_rows, int64_t n, double new, double lr, double decay, int64_t is_cautious, float *factors,
                 int64_t n_threads) {
    #pragma omp parallel num_threads(n_threads)
    {
        float space[COLUMNS];
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < n_matrices * n_rows; row++) {
            float squares = 0;
            for (int64_t begin = 0; begin < n; begin += COLUMNS) {
                int64_t count = n - begin < COLUMNS ? n - begin : COLUMNS;
                const float *restrict update = read_row(at(updates, is_bf16, row * n + begin), is_bf16, count, space);
                #pragma omp simd reduction(+ : squares)
                for (int64_t i = 0; i < count; i++) squares += update[i] * update[i];
            }
            factors[row] = squares / n;
        }
        #pragma omp for schedule(static)
        for (int64_t matrix = 0; matrix < n_matrices; matrix++) {
            float *restrict factor = factors + matrix * n_rows, *restrict mean = means[matrix], before = 0, after = 0;
            for (int64_t row = 0; row < n_rows; row++) {
                float square = factor[row];
                mean[row] += (square - mean[row]) * (float)new;
                factor[row] = 1 / sqrtf(mean[row] < 1e-30f ? 1e-30f : mean[row]);
                before += square;
                after += square * (factor[row] * factor[row]);
            }
            float scale = sqrtf(before / (after < 1e-30f ? 1e-30f : after));
            for (int64_t row = 0; row < n_rows; row++) factor[row] *= scale;
        }
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < n_matrices * n_rows; row++) {
            float *restrict weight = weights[row / n_rows] + row % n_rows * n;
            float factor = factors[row], kept = 1 - decay, rate = lr;
            for (int64_t begin = 0; begin < n; begin += COLUMNS) {
                int64_t count = n - begin < COLUMNS ? n - begin : COLUMNS;
                const float *restrict update = read_row(at(updates, is_bf16, row * n + begin), is_bf16, count, space);
                #pragma omp simd
                for (int64_t i = 0; i < count; i++) {
                    float w = weight[begin + i], u = update[i] * factor;
                    float decayed = w * kept;
                    w = is_cautious && !(u * w > 0) ? w : decayed;
                    weight[begin + i] = w - rate * u;
                }
            }
        }
    }
}
