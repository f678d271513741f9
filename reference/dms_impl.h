/* Gate logits and soft-masked attention of dms.h for one element type (REAL, NAME(x) by the includer). Source: maths.md 7.1-7.3, 8.3. */
#include <math.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/dms.h"
#include "reference/gemm.h"

enum {
    LANES = 8
}; /* partial results of a row's maximum and sum: independent, so that they need not wait for each other */

static kv_net_spec net_of(const kv_dms_spec *spec) {
    return (kv_net_spec){.n_input = spec->n_input, .n_mlp = spec->n_mlp, .window = 1};
}

kv_status NAME(kv_dms_logits)(const kv_dms_spec *spec, const REAL *param, int32_t n, const REAL *x,
                              NAME(kv_net_tape) * *tape, REAL *logit) {
    const int64_t doc[2] = {0, n};
    REAL bias = param[kv_dms_param(spec) - 1];
    if (spec->n_mlp) {
        kv_net_spec net = net_of(spec);
        NAME(kv_net_input)
        in = {.n_token = n, .x = x, .n_doc = 1, .doc_first = doc, .chunk = 64};
        kv_status st = NAME(kv_net_forward)(&net, param, &in, tape, logit);
        if (st != KV_OK) return st;
    } else {
        NAME(kv_gemm)(KV_NN, n, 1, spec->n_input, x, spec->n_input, param, 1, false, logit, 1);
    }
    for (int32_t t = 0; t < n; t++) logit[t] = (REAL)spec->scale * logit[t] + bias;
    return KV_OK;
}

kv_status NAME(kv_dms_logits_backward)(const kv_dms_spec *spec, const REAL *param, int32_t n,
                                       const REAL *x, NAME(kv_net_tape) * tape, REAL *e,
                                       REAL *grad) {
    const int64_t doc[2] = {0, n};
    double d_bias = 0;
    for (int32_t t = 0; t < n; t++) {
        d_bias += (double)e[t];
        e[t] *= (REAL)spec->scale;
    }
    grad[kv_dms_param(spec) - 1] = (REAL)d_bias;
    if (!spec->n_mlp) {
        NAME(kv_gemm)
        (KV_TN, 1, spec->n_input, n, e, 1, x, spec->n_input, false, grad, spec->n_input);
        return KV_OK;
    }
    kv_net_spec net = net_of(spec);
    NAME(kv_net_input) in = {.n_token = n, .x = x, .n_doc = 1, .doc_first = doc, .chunk = 64};
    return NAME(kv_net_backward)(&net, param, &in, tape, e, grad);
}

static REAL row_max(int32_t n, const REAL *x) {
    REAL best[LANES], top = x[0];
    int32_t i = 0;
    for (int j = 0; j < LANES; j++) best[j] = x[0];
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) best[j] = x[i + j] > best[j] ? x[i + j] : best[j];
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    for (int j = 0; j < LANES; j++) top = best[j] > top ? best[j] : top;
    return top;
}

static REAL row_sum(int32_t n, const REAL *x) {
    REAL sum[LANES] = {0}, total = 0;
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) sum[j] += x[i + j];
    for (; i < n; i++) total += x[i];
    for (int j = 0; j < LANES; j++) total += sum[j];
    return total;
}

/* x [n] -> its softmax; the row's remaining places up to `width` become 0. */
static void softmax_row(int32_t n, int32_t width, REAL *x) {
    REAL top = row_max(n, x);
    for (int32_t t = 0; t < n; t++) x[t] -= top;
    NAME(kv_exp)(n, x, x);
    REAL by = 1 / row_sum(n, x);
    for (int32_t t = 0; t < n; t++) x[t] *= by;
    memset(x + n, 0, (size_t)(width - n) * sizeof *x);
}

/* Keys of row u that the soft mask weakens: t < max(0, u - window + 1). */
static int32_t beyond_window(const NAME(kv_dms_head) * h, int32_t u) {
    return u - h->window + 1 > 0 ? u - h->window + 1 : 0;
}

void NAME(kv_dms_rows)(const NAME(kv_dms_head) * h, int32_t first, int32_t rows, REAL *o,
                       REAL *dense, REAL *p, REAL *scratch) {
    int32_t width = first + rows;
    int64_t size = (int64_t)rows * width;
    const REAL *q = h->q + first * h->q_stride;
    NAME(kv_gemm)
    (KV_NT, rows, width, h->dim, q, h->q_stride, h->k, h->kv_stride, false, p, width);
    for (int64_t i = 0; i < size; i++) p[i] *= (REAL)h->scale;
    for (int64_t i = 0; h->softcap > 0 && i < size; i++)
        p[i] = (REAL)(h->softcap * tanh((double)p[i] / h->softcap));
    memcpy(scratch, p, (size_t)size * sizeof *p);
    for (int32_t r = 0; r < rows; r++) {
        REAL *row = p + (int64_t)r * width;
        int32_t u = first + r, weak = beyond_window(h, u);
        for (int32_t t = 0; t < weak; t++) row[t] += h->log_keep[t];
        softmax_row(u + 1, width, row);
        softmax_row(u + 1, width, scratch + (int64_t)r * width);
    }
    NAME(kv_gemm)(KV_NN, rows, h->dim, width, p, width, h->v, h->kv_stride, false, o, h->dim);
    NAME(kv_gemm)
    (KV_NN, rows, h->dim, width, scratch, width, h->v, h->kv_stride, false, dense, h->dim);
}

void NAME(kv_dms_rows_backward)(const NAME(kv_dms_head) * h, int32_t first, int32_t rows,
                                const REAL *p, const REAL *o, const REAL *d_o, REAL *scratch,
                                REAL *d_keep) {
    int32_t width = first + rows;
    NAME(kv_gemm)
    (KV_NT, rows, width, h->dim, d_o, h->dim, h->v, h->kv_stride, false, scratch, width);
    for (int32_t r = 0; r < rows; r++) {
        const REAL *prob = p + (int64_t)r * width, *dp = scratch + (int64_t)r * width;
        double along = 0;
        for (int32_t c = 0; c < h->dim; c++)
            along += (double)d_o[(int64_t)r * h->dim + c] * (double)o[(int64_t)r * h->dim + c];
        REAL mean = (REAL)along; /* D of maths.md 8.3 */
        int32_t weak = beyond_window(h, first + r);
        for (int32_t t = 0; t < weak; t++) d_keep[t] += prob[t] * (dp[t] - mean);
    }
}
