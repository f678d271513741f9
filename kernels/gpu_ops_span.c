/* Entries of the device table that attend: spans held on the device, dense sweep, masked and dense attention. */
#include <string.h>

#include "kernels/gpu_ops.h"
#include "reference/core/mem.h"

kv_status kv_gpu_ops_drop(kv_status st, kv_held *held) {
    if (!held) return st;
    kv_gpu_buffer *const b[] = {held->lse, held->long_mass, held->top_p, held->top_t, held->o};
    kv_gpu_span_free(held->span);
    free(held);
    return kv_gpu_ops_free(st, b, sizeof b / sizeof *b);
}

static kv_status make(kv_gpu *g, const kv_span *span, bool want_v, kv_held **out) {
    kv_status st = KV_OK;
    kv_held *held = NULL;
    KV_NEW(held, 1);
    KV_TRY(kv_gpu_span_upload(g, span, want_v, &held->span));
    *out = held;
    return KV_OK;
out:
    free(held);
    return st;
}

kv_status kv_gpu_ops_adopt(kv_gpu *g, kv_span *span, const kv_gpu_buffer *q, const kv_gpu_buffer *k,
                           const kv_gpu_buffer *v) {
    kv_status st = KV_OK;
    kv_held *held = NULL;
    KV_NEW(held, 1);
    KV_TRY(kv_gpu_span_adopt(g, span, q, k, v, &held->span));
    span->held = held;
    return KV_OK;
out:
    free(held);
    return st;
}

kv_status kv_gpu_ops_borrow(kv_gpu *g, const kv_span *span, bool want_v, kv_held **out) {
    *out = span->held;
    return *out ? KV_OK : make(g, span, want_v, out);
}

kv_status kv_gpu_ops_return(kv_status st, const kv_span *span, kv_held *held) {
    return held == span->held ? st : kv_gpu_ops_drop(st, held);
}

kv_status kv_gpu_ops_hold(kv_span *span) {
    kv_held *held = NULL;
    const kv_status st = make(kv_gpu_ops_enter(), span, true, &held);
    kv_gpu_ops_leave();
    span->held = held;
    return st;
}

void kv_gpu_ops_release(kv_span *span) {
    if (!span->held) return;
    (void)kv_gpu_ops_enter();
    (void)kv_gpu_ops_drop(KV_OK, span->held);
    kv_gpu_ops_leave();
    span->held = NULL;
}

static size_t rows_of(const kv_held *held) {
    int32_t n_q_head, n_token;
    kv_gpu_span_shape(held->span, &n_q_head, &n_token, NULL);
    return (size_t)n_q_head * (size_t)n_token;
}

kv_status kv_gpu_ops_dense_rows(kv_gpu *g, kv_held *held, int32_t sinks, int32_t window) {
    kv_status st = KV_OK;
    kv_gpu_buffer **const row[] = {&held->lse, &held->long_mass, &held->top_p, &held->top_t};
    if (held->lse && held->sinks == sinks && held->window == window) return KV_OK;
    for (size_t i = 0; i < sizeof row / sizeof *row; i++)
        if (!*row[i]) KV_TRY(kv_gpu_new(g, rows_of(held) * 4, row[i]));
    KV_TRY(kv_gpu_lse(held->span, sinks, window, held->lse, held->long_mass, held->top_p,
                      held->top_t));
    held->sinks = sinks;
    held->window = window;
out:
    return st;
}

kv_status kv_gpu_ops_dense_output(kv_gpu *g, kv_held *held) {
    kv_status st = KV_OK;
    int32_t n_q_head, n_token, head_dim;
    if (held->o) return KV_OK;
    kv_gpu_span_shape(held->span, &n_q_head, &n_token, &head_dim);
    KV_TRY(kv_gpu_new(g, rows_of(held) * (size_t)head_dim * 4, &held->o));
    KV_TRY(kv_gpu_attend(held->span, NULL, true, held->o, NULL, NULL));
out:
    return st;
}

/* Device [rows][n] of `size` bytes -> a new host array [rows][stride]. */
static kv_status fetch(const kv_gpu_buffer *from, const kv_span *span, size_t width, size_t size,
                       void **to) {
    const size_t rows = (size_t)span->n_q_head, stride = (size_t)span->stride * width;
    *to = kv_mem_new(rows * stride, size);
    return *to ? kv_gpu_ops_fetch(from, rows, (size_t)span->n_token * width, stride, size, *to)
               : KV_E_INTERNAL;
}

static kv_status dense_locked(kv_gpu *g, const kv_span *span, const kv_dense_request *request,
                              kv_dense *out) {
    kv_status st = KV_OK;
    enum { LSE, NORM, COLUMN, BUFFERS };
    kv_gpu_buffer *b[BUFFERS] = {0};
    kv_held *held = NULL;
    const size_t rows = (size_t)span->n_q_head, n = (size_t)span->n_token, cells = rows * n;
    memset(out, 0, sizeof *out);
    out->request = *request;
    out->stride = span->stride;
    KV_TRY(kv_gpu_ops_borrow(g, span, request->want_output, &held));
    if (request->want_events) {
        KV_TRY(kv_gpu_ops_dense_rows(g, held, request->sinks, request->window));
        KV_TRY(fetch(held->long_mass, span, 1, 4, (void **)&out->long_mass));
        KV_TRY(fetch(held->top_p, span, 1, 4, (void **)&out->top_p));
        KV_TRY(fetch(held->top_t, span, 1, 4, (void **)&out->top_t));
    } else {
        KV_TRY(kv_gpu_new(g, cells * 4, &b[LSE]));
        KV_TRY(kv_gpu_lse(held->span, request->sinks, request->window, b[LSE], NULL, NULL, NULL));
    }
    const kv_gpu_buffer *lse = request->want_events ? held->lse : b[LSE];
    KV_TRY(fetch(lse, span, 1, 4, (void **)&out->lse));
    if (request->lse)
        KV_TRY(kv_gpu_ops_send(g, request->lse, rows, n, (size_t)span->stride, &b[NORM]));
    if (request->n_power > 0) KV_TRY(kv_gpu_new(g, cells * 8, &b[COLUMN]));
    for (int32_t i = 0; i < request->n_power; i++) {
        KV_TRY(kv_gpu_column(held->span, request->window, request->power[i],
                             request->lse ? b[NORM] : lse, request->lse != NULL, b[COLUMN]));
        KV_TRY(fetch(b[COLUMN], span, 1, 8, (void **)&out->column[i]));
    }
    if (request->want_output) {
        KV_TRY(kv_gpu_ops_dense_output(g, held));
        KV_TRY(fetch(held->o, span, (size_t)span->head_dim, 4, (void **)&out->o));
    }
out:
    st = kv_gpu_ops_return(kv_gpu_ops_free(st, b, BUFFERS), span, held);
    if (st != KV_OK) kv_dense_free(out);
    return st;
}

kv_status kv_gpu_ops_dense(const kv_span *span, const kv_dense_request *request, kv_dense *out) {
    const kv_status st = dense_locked(kv_gpu_ops_enter(), span, request, out);
    kv_gpu_ops_leave();
    return st;
}

kv_status kv_gpu_ops_attend_masked(kv_gpu *g, const kv_span *span, const kv_held *held,
                                   const kv_masked_request *request, const kv_gpu_buffer *evict_at,
                                   kv_gpu_buffer *o, kv_gpu_buffer *lse, kv_gpu_buffer *lse_long,
                                   kv_gpu_buffer *recorded) {
    kv_status st = KV_OK;
    kv_gpu_plan *plan = NULL;
    const bool turned = request->rerotate;
    KV_TRY(kv_gpu_plan_new(g, span->n_kv_head, span->n_token, request->sinks, request->window,
                           evict_at, &plan));
    KV_TRY(kv_gpu_attend(held->span, plan, true, turned ? NULL : o, turned ? recorded : lse,
                         lse_long));
    if (turned)
        KV_TRY(kv_gpu_attend_turned(held->span, evict_at, span->position, span->inv_freq, o, lse));
out:
    kv_gpu_plan_free(plan);
    return st;
}

static kv_status masked_locked(kv_gpu *g, const kv_span *span, const kv_masked_request *request,
                               kv_masked *out) {
    kv_status st = KV_OK;
    enum { EVICT, LSE, LONG, RECORDED, O, BUFFERS };
    kv_gpu_buffer *b[BUFFERS] = {0};
    kv_held *held = NULL;
    const size_t rows = (size_t)span->n_q_head, n = (size_t)span->n_token,
                 stride = (size_t)span->stride, d = (size_t)span->head_dim, cells = rows * n;
    memset(out, 0, sizeof *out);
    KV_TRY(kv_gpu_ops_borrow(g, span, true, &held));
    KV_TRY(kv_gpu_ops_send(g, request->evict_at, (size_t)span->n_kv_head, n, stride, &b[EVICT]));
    KV_TRY(kv_gpu_new(g, cells * 4, &b[LSE]));
    if (request->rerotate) KV_TRY(kv_gpu_new(g, cells * 4, &b[RECORDED]));
    if (request->want_long) KV_TRY(kv_gpu_new(g, cells * 4, &b[LONG]));
    if (request->want_output) KV_TRY(kv_gpu_new(g, cells * d * 4, &b[O]));
    KV_TRY(kv_gpu_ops_attend_masked(g, span, held, request, b[EVICT], b[O], b[LSE], b[LONG],
                                    b[RECORDED]));
    KV_TRY(fetch(b[LSE], span, 1, 4, (void **)&out->lse));
    if (request->rerotate) KV_TRY(fetch(b[RECORDED], span, 1, 4, (void **)&out->lse_orig));
    if (request->want_long) KV_TRY(fetch(b[LONG], span, 1, 4, (void **)&out->lse_long));
    if (request->want_output && request->o)
        KV_TRY(kv_gpu_ops_fetch(b[O], rows, n * d, stride * d, 4, request->o));
    else if (request->want_output)
        KV_TRY(fetch(b[O], span, d, 4, (void **)&out->o));
out:
    st = kv_gpu_ops_return(kv_gpu_ops_free(st, b, BUFFERS), span, held);
    if (st != KV_OK) kv_masked_free(out);
    return st == KV_OK ? st : kv_error_context(st, "layer %d", span->layer_id);
}

kv_status kv_gpu_ops_masked(const kv_span *span, const kv_masked_request *request, kv_masked *out) {
    const kv_status st = masked_locked(kv_gpu_ops_enter(), span, request, out);
    kv_gpu_ops_leave();
    return st;
}

static kv_status attend_locked(kv_gpu *g, const kv_span *span, float *o, float *lse) {
    kv_status st = KV_OK;
    kv_gpu_buffer *b[2] = {0};
    kv_held *held = NULL;
    const size_t rows = (size_t)span->n_q_head, n = (size_t)span->n_token,
                 stride = (size_t)span->stride, d = (size_t)span->head_dim;
    KV_TRY(kv_gpu_ops_borrow(g, span, true, &held));
    KV_TRY(kv_gpu_new(g, rows * n * d * 4, &b[0]));
    KV_TRY(kv_gpu_new(g, rows * n * 4, &b[1]));
    KV_TRY(kv_gpu_attend(held->span, NULL, true, b[0], b[1], NULL));
    KV_TRY(kv_gpu_ops_fetch(b[0], rows, n * d, stride * d, 4, o));
    if (lse) KV_TRY(kv_gpu_ops_fetch(b[1], rows, n, stride, 4, lse));
out:
    return kv_gpu_ops_return(kv_gpu_ops_free(st, b, 2), span, held);
}

kv_status kv_gpu_ops_attend(const kv_span *span, float *o, float *lse) {
    const kv_status st = attend_locked(kv_gpu_ops_enter(), span, o, lse);
    kv_gpu_ops_leave();
    return st;
}
