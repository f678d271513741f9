/* oracle_step (contract.md 2): the best keys anew at each query, an upper bound of the retained mass of every priority policy with
 * the same budget, sinks and window. */
#include <omp.h>
#include <string.h>

#include "reference/closed_loop.h"
#include "reference/core/cpu.h"
#include "reference/core/mem.h"
#include "reference/core/num.h"
#include "reference/metrics.h"

enum { STEP = KV_LOOP_STEP, LEVELS = 3, BINS = 2048 };

/* Sum of the k largest of x[n] >= 0, 1 <= k <= n. The bits of a nonnegative float order like the float: a histogram of 11 bits
 * tells which bin holds the k-th largest; what lies above is summed, what lies in it moves to the front for the next 11 bits.
 * Nothing branches on an element. x is overwritten. */
static double sum_of_largest(float *x, int32_t n, int32_t k) {
    static const int shift[LEVELS] = {21, 10, 0};
    static const uint32_t mask[LEVELS] = {0x7ff, 0x7ff, 0x3ff};
    double sum = 0;
    for (int level = 0; level < LEVELS; level++) {
        int32_t count[BINS] = {0}, kept = 0;
        for (int32_t i = 0; i < n; i++) count[(kv_bits(x[i]) >> shift[level]) & mask[level]]++;
        uint32_t bin = mask[level];
        for (; k > count[bin]; bin--) k -= count[bin];
        for (int32_t i = 0; i < n; i++) {
            const float value = x[i];
            const uint32_t own = (kv_bits(value) >> shift[level]) & mask[level];
            sum += own > bin ? (double)value : 0;
            x[kept] = value;
            kept += own == bin;
        }
        n = kept;
    }
    return sum + k * (double)x[0];
}

static double sum_of(const float *x, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (double)x[i];
    return sum;
}

/* Keys of KV head h in panels [n_panel][head_dim][panel]; the last panel is padded with zeros. */
static void pack(const kv_span *span, int32_t h, int32_t panel, float *out) {
    const size_t d = (size_t)span->head_dim;
    const float *k = span->k + (size_t)h * (size_t)span->stride * d;
    for (int32_t t = 0; t < span->n_token; t++)
        for (size_t c = 0; c < d; c++)
            out[(size_t)(t / panel) * d * (size_t)panel + c * (size_t)panel + (size_t)(t % panel)] =
                k[(size_t)t * d + c];
}

static double mass_of(const kv_run *run, float *p, int32_t u) {
    const int32_t s = run->sinks, w = run->window, k = run->budget - s - w, n = u - w - s + 1;
    const double fixed = sum_of(p, s) + sum_of(p + u - w + 1, w);
    return fixed + (k > 0 ? sum_of_largest(p + s, n, k) : 0);
}

/* Queries u .. u + n_query - 1 of KV head h. rows [group][STEP][n_padded] and q [group][STEP][head_dim] are scratch. */
static void step_queries(const kv_span *span, const kv_run *run, const kv_dense *dense, int32_t h,
                         int32_t u, int32_t n_query, const float *panels, float *rows, float *q,
                         size_t n_padded, double *out) {
    const kv_loop_kernel *f = kv_loop_kernel_best();
    const int32_t group = span->n_q_head / span->n_kv_head, d = span->head_dim,
                  n_panel = (u + n_query + f->panel - 1) / f->panel, n = n_panel * f->panel;
    for (int32_t g = 0; g < group; g++)
        memcpy(q + (size_t)(g * STEP * d),
               span->q + ((size_t)(h * group + g) * (size_t)span->stride + (size_t)u) * (size_t)d,
               (size_t)(n_query * d) * sizeof *q);
    f->logits(q, panels, group, n_panel, d, span->scale, rows, n_padded);
    for (int32_t i = 0; i < n_query; i++) {
        float *mean = rows + (size_t)i * n_padded;
        for (int32_t g = 0; g < group; g++) {
            float *p = rows + (size_t)(g * STEP + i) * n_padded;
            if (span->softcap > 0) f->softcap(p, n, span->softcap);
            f->exponential(p, n, dense->lse[(h * group + g) * span->stride + u + i]);
            for (int32_t t = u + i + 1; t < n; t++) p[t] = 0; /* the future and the padding */
            /* 1 but for the rounding of the fp32 log-sum-exp, which matters when logits are large */
            const float scale = (float)(1 / (group * f->sum(p, n)));
            for (int32_t t = 0; t <= u + i; t++) mean[t] = p[t] * scale + (g > 0 ? mean[t] : 0);
        }
        out[u + i] = mass_of(run, mean, u + i);
    }
}

kv_status kv_oracle_step_mass(const kv_span *span, const kv_run *run, const kv_dense *dense,
                              double *step_mass) {
    kv_status st = KV_OK;
    const kv_loop_kernel *f = kv_loop_kernel_best();
    const int32_t n = span->n_token, group = span->n_q_head / span->n_kv_head,
                  n_thread = kv_threads(), n_block = (n - run->budget + STEP - 1) / STEP;
    const size_t n_padded = (size_t)((n + f->panel - 1) / f->panel * f->panel),
                 d = (size_t)span->head_dim, row_size = (size_t)(group * STEP) * n_padded,
                 q_size = (size_t)(group * STEP) * d;
    float *panels = NULL, *rows = NULL, *q = NULL;
    KV_NEW(panels, n_padded * d);
    KV_NEW(rows, (size_t)n_thread * row_size);
    KV_NEW(q, (size_t)n_thread * q_size);
    for (int32_t h = 0; h < span->n_kv_head; h++) {
        double *out = step_mass + h * span->stride;
        pack(span, h, f->panel, panels);
        for (int32_t u = 0; u < n && u < run->budget; u++) out[u] = 1; /* everything is kept */
#pragma omp parallel for schedule(dynamic, 4) num_threads(n_thread)
        for (int32_t b = n_block - 1; b >= 0; b--) {
            const int32_t u = run->budget + b * STEP, n_query = n - u < STEP ? n - u : STEP;
            const size_t thread = (size_t)omp_get_thread_num();
            step_queries(span, run, dense, h, u, n_query, panels, rows + thread * row_size,
                         q + thread * q_size, n_padded, out);
        }
        KV_TRY(kv_interrupt_poll());
    }
out:
    free(panels);
    free(rows);
    free(q);
    return st;
}
