/* Entries of the device table for metrics: the step oracle's mass; attention under evict_at and the sums behind the metrics, without
 * outputs leaving the device. */
#include <string.h>

#include "kernels/gpu_ops.h"
#include "reference/core/mem.h"
#include "reference/target.h"

enum { EVICT, ORACLE, OWN, MASS, KIND, LSE, LONG, O, BUFFERS };

/* Mean future mass of the oracle's target: packed to double [n_kv_head][n_token] on the device. */
static kv_status send_mass(kv_gpu *g, const kv_run *run, const kv_metrics_item *item,
                           kv_gpu_buffer **out) {
    kv_status st = KV_OK;
    const kv_span *s = item->span;
    const size_t n = (size_t)s->n_token;
    double *m = NULL; /* [n_kv_head][stride] */
    KV_NEW(m, s->n_kv_head * s->stride);
    KV_TRY(kv_target_mass(s, item->dense, 1, run->target_mean, m));
    for (int32_t h = 1; h < s->n_kv_head; h++)
        memmove(m + (size_t)h * n, m + h * s->stride, n * sizeof *m);
    KV_TRY(kv_gpu_new(g, (size_t)s->n_kv_head * n * sizeof *m, out));
    KV_TRY(kv_gpu_put(*out, m, (size_t)s->n_kv_head * n * sizeof *m));
out:
    free(m);
    return st;
}

static kv_status send_decisions(kv_gpu *g, const kv_run *run, const kv_metrics_item *item,
                                kv_gpu_buffer **b) {
    kv_status st = KV_OK;
    const kv_span *s = item->span;
    const int32_t *const from[] = {
        [EVICT] = item->evict_at, [ORACLE] = item->evict_oracle, [OWN] = item->evict_own};
    for (int i = EVICT; i <= OWN; i++)
        if (from[i])
            KV_TRY(kv_gpu_ops_send(g, from[i], (size_t)s->n_kv_head, (size_t)s->n_token,
                                   (size_t)s->stride, &b[i]));
    KV_TRY(send_mass(g, run, item, &b[MASS]));
    if (item->kind) {
        KV_TRY(kv_gpu_new(g, (size_t)s->n_token, &b[KIND]));
        KV_TRY(kv_gpu_put(b[KIND], item->kind, (size_t)s->n_token));
    }
out:
    return st;
}

/* A caller's own arrays. */
static kv_status send_masked(kv_gpu *g, const kv_span *s, const kv_masked *masked,
                             kv_gpu_buffer **b) {
    kv_status st = KV_OK;
    const size_t rows = (size_t)s->n_q_head, n = (size_t)s->n_token, stride = (size_t)s->stride,
                 d = (size_t)s->head_dim;
    const float *lse = masked->lse_orig ? masked->lse_orig : masked->lse;
    KV_TRY(kv_gpu_ops_send(g, lse, rows, n, stride, &b[LSE]));
    KV_TRY(kv_gpu_ops_send(g, masked->lse_long, rows, n, stride, &b[LONG]));
    KV_TRY(kv_gpu_ops_send(g, masked->o, rows, n * d, stride * d, &b[O]));
out:
    return st;
}

/* Mass is counted under the recorded logits, the output is that of the re-rotated ones. */
static kv_status attend(kv_gpu *g, const kv_run *run, const kv_metrics_item *item,
                        const kv_held *held, kv_gpu_buffer **b) {
    kv_status st = KV_OK;
    const kv_span *s = item->span;
    const kv_masked_request request = {
        .sinks = run->sinks, .window = run->window, .rerotate = item->rerotate};
    const size_t cells = (size_t)s->n_q_head * (size_t)s->n_token;
    KV_TRY(kv_gpu_new(g, cells * 4, &b[LSE]));
    KV_TRY(kv_gpu_new(g, cells * 4, &b[LONG]));
    KV_TRY(kv_gpu_new(g, cells * (size_t)s->head_dim * 4, &b[O]));
    KV_TRY(kv_gpu_ops_attend_masked(g, s, held, &request, b[EVICT], b[O],
                                    item->rerotate ? NULL : b[LSE], b[LONG], b[LSE]));
out:
    return st;
}

static kv_status measure_locked(kv_gpu *g, const kv_run *run, const kv_metrics_item *item,
                                kv_layer_sums *sums) {
    kv_status st = KV_OK;
    const kv_span *s = item->span;
    kv_gpu_buffer *b[BUFFERS] = {0};
    kv_held *held = NULL;
    KV_TRY(kv_gpu_ops_borrow(g, s, true, &held));
    KV_TRY(kv_gpu_ops_dense_rows(g, held, run->sinks, run->window));
    KV_TRY(kv_gpu_ops_dense_output(g, held));
    KV_TRY(send_decisions(g, run, item, b));
    KV_TRY(item->masked ? send_masked(g, s, item->masked, b) : attend(g, run, item, held, b));
    const kv_gpu_measure_input in = {
        .n_q_head = s->n_q_head,
        .n_kv_head = s->n_kv_head,
        .n_token = s->n_token,
        .head_dim = s->head_dim,
        .dense_lse = held->lse,
        .long_mass = held->long_mass,
        .top_p = held->top_p,
        .top_t = held->top_t,
        .dense_o = held->o,
        .lse = b[LSE],
        .lse_long = b[LONG],
        .o = b[O],
        .evict_at = b[EVICT],
        .evict_oracle = b[ORACLE],
        .evict_own = b[OWN],
        .mass = b[MASS],
        .kind = b[KIND],
    };
    KV_TRY(kv_gpu_measure(g, run, &in, sums));
out:
    return kv_gpu_ops_return(kv_gpu_ops_free(st, b, BUFFERS), s, held);
}

kv_status kv_gpu_ops_measure(const kv_run *run, const kv_metrics_item *item, kv_layer_sums *sums) {
    const kv_status st = measure_locked(kv_gpu_ops_enter(), run, item, sums);
    kv_gpu_ops_leave();
    return st;
}

static kv_status step_mass_locked(kv_gpu *g, const kv_span *s, const kv_run *run,
                                  const kv_dense *dense, double *step_mass) {
    kv_status st = KV_OK;
    kv_gpu_buffer *b[2] = {NULL, NULL};
    kv_held *held = NULL;
    const size_t rows = (size_t)s->n_kv_head, n = (size_t)s->n_token, stride = (size_t)s->stride;
    KV_TRY(kv_gpu_ops_borrow(g, s, false, &held));
    KV_TRY(kv_gpu_ops_send(g, dense->lse, (size_t)s->n_q_head, n, stride, &b[0]));
    KV_TRY(kv_gpu_new(g, rows * n * sizeof *step_mass, &b[1]));
    KV_TRY(kv_gpu_step_mass(held->span, run, b[0], b[1]));
    KV_TRY(kv_gpu_ops_fetch(b[1], rows, n, stride, sizeof *step_mass, step_mass));
out:
    return kv_gpu_ops_return(kv_gpu_ops_free(st, b, 2), s, held);
}

kv_status kv_gpu_ops_step_mass(const kv_span *span, const kv_run *run, const kv_dense *dense,
                               double *step_mass) {
    const kv_status st = step_mass_locked(kv_gpu_ops_enter(), span, run, dense, step_mass);
    kv_gpu_ops_leave();
    return st;
}
