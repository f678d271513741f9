/* The device table over host arrays: uploads, runs the kernels, downloads. One device, one lock. */
#include "kernels/gpu_ops.h"

#include <pthread.h>
#include <string.h>

#include "reference/core/mem.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kv_gpu *device;

kv_gpu *kv_gpu_ops_enter(void) {
    pthread_mutex_lock(&lock);
    return device;
}

void kv_gpu_ops_leave(void) { pthread_mutex_unlock(&lock); }

/* Device [rows][n] elements of `size` bytes -> a new host array [rows][stride]. */
static kv_status fetch(const kv_gpu_buffer *from, size_t rows, size_t n, size_t stride, size_t size,
                       void **to) {
    kv_status st = KV_OK;
    char *packed = NULL, *host = kv_mem_new(rows * stride, size);
    if (!host) return KV_E_INTERNAL;
    *to = host;
    if (stride == n) return kv_gpu_get(from, host, rows * n * size);
    KV_NEW(packed, rows * n * size);
    KV_TRY(kv_gpu_get(from, packed, rows * n * size));
    for (size_t i = 0; i < rows; i++)
        memcpy(host + i * stride * size, packed + i * n * size, n * size);
out:
    free(packed);
    return st;
}

/* Host [rows][stride] words of 4 bytes -> a new device array [rows][n]. */
kv_status kv_gpu_ops_send(const void *from, size_t rows, size_t n, size_t stride,
                          kv_gpu_buffer **to) {
    kv_status st = KV_OK;
    char *packed = NULL;
    KV_TRY(kv_gpu_new(device, rows * n * 4, to));
    if (stride == n) return kv_gpu_put(*to, from, rows * n * 4);
    KV_NEW(packed, rows * n * 4);
    for (size_t i = 0; i < rows; i++)
        memcpy(packed + i * n * 4, (const char *)from + i * stride * 4, n * 4);
    KV_TRY(kv_gpu_put(*to, packed, rows * n * 4));
out:
    free(packed);
    return st;
}

kv_status kv_gpu_ops_free(kv_status st, kv_gpu_buffer *const *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const kv_status freed = kv_gpu_free(b[i]);
        if (st == KV_OK) st = freed;
    }
    return st;
}

static kv_status dense_locked(const kv_span *span, const kv_dense_request *request, kv_dense *out) {
    kv_status st = KV_OK;
    enum { LSE, MASS, P, T, NORM, COLUMN, O, BUFFERS };
    kv_gpu_buffer *b[BUFFERS] = {0};
    kv_gpu_span *s = NULL;
    const size_t rows = (size_t)span->n_q_head, n = (size_t)span->n_token,
                 stride = (size_t)span->stride, cells = rows * n;
    memset(out, 0, sizeof *out);
    out->request = *request;
    out->stride = span->stride;
    KV_TRY(kv_gpu_span_upload(device, span, request->want_output, &s));
    KV_TRY(kv_gpu_new(device, cells * 4, &b[LSE]));
    for (int i = MASS; request->want_events && i <= T; i++)
        KV_TRY(kv_gpu_new(device, cells * 4, &b[i]));
    KV_TRY(kv_gpu_lse(s, request->sinks, request->window, b[LSE], b[MASS], b[P], b[T]));
    KV_TRY(fetch(b[LSE], rows, n, stride, 4, (void **)&out->lse));
    if (request->want_events) {
        KV_TRY(fetch(b[MASS], rows, n, stride, 4, (void **)&out->long_mass));
        KV_TRY(fetch(b[P], rows, n, stride, 4, (void **)&out->top_p));
        KV_TRY(fetch(b[T], rows, n, stride, 4, (void **)&out->top_t));
    }
    if (request->lse) KV_TRY(kv_gpu_ops_send(request->lse, rows, n, stride, &b[NORM]));
    if (request->n_power > 0) KV_TRY(kv_gpu_new(device, cells * 8, &b[COLUMN]));
    for (int32_t i = 0; i < request->n_power; i++) {
        KV_TRY(kv_gpu_column(s, request->window, request->power[i], b[request->lse ? NORM : LSE],
                             request->lse != NULL, b[COLUMN]));
        KV_TRY(fetch(b[COLUMN], rows, n, stride, 8, (void **)&out->column[i]));
    }
    if (request->want_output) {
        const size_t d = (size_t)span->head_dim;
        KV_TRY(kv_gpu_new(device, cells * d * 4, &b[O]));
        KV_TRY(kv_gpu_attend(s, NULL, true, b[O], NULL, NULL));
        KV_TRY(fetch(b[O], rows, n * d, stride * d, 4, (void **)&out->o));
    }
out:
    kv_gpu_span_free(s);
    st = kv_gpu_ops_free(st, b, BUFFERS);
    if (st != KV_OK) kv_dense_free(out);
    return st;
}

static kv_status masked_locked(const kv_span *span, const kv_masked_request *request,
                               kv_masked *out) {
    kv_status st = KV_OK;
    enum { EVICT, LSE, LONG, O, BUFFERS };
    kv_gpu_buffer *b[BUFFERS] = {0};
    kv_gpu_span *s = NULL;
    kv_gpu_plan *plan = NULL;
    const size_t rows = (size_t)span->n_q_head, n = (size_t)span->n_token,
                 stride = (size_t)span->stride, d = (size_t)span->head_dim, cells = rows * n;
    memset(out, 0, sizeof *out);
    KV_TRY(kv_gpu_span_upload(device, span, true, &s));
    KV_TRY(kv_gpu_ops_send(request->evict_at, (size_t)span->n_kv_head, n, stride, &b[EVICT]));
    KV_TRY(kv_gpu_plan_new(device, span->n_kv_head, span->n_token, request->sinks, request->window,
                           b[EVICT], &plan));
    KV_TRY(kv_gpu_new(device, cells * 4, &b[LSE]));
    if (request->want_long) KV_TRY(kv_gpu_new(device, cells * 4, &b[LONG]));
    if (request->want_output) KV_TRY(kv_gpu_new(device, cells * d * 4, &b[O]));
    KV_TRY(kv_gpu_attend(s, plan, true, b[O], b[LSE], b[LONG]));
    KV_TRY(fetch(b[LSE], rows, n, stride, 4, (void **)&out->lse));
    if (request->want_long) KV_TRY(fetch(b[LONG], rows, n, stride, 4, (void **)&out->lse_long));
    if (request->want_output) KV_TRY(fetch(b[O], rows, n * d, stride * d, 4, (void **)&out->o));
out:
    kv_gpu_plan_free(plan);
    kv_gpu_span_free(s);
    st = kv_gpu_ops_free(st, b, BUFFERS);
    if (st != KV_OK) kv_masked_free(out);
    return st;
}

static kv_status attend_locked(const kv_span *span, float *o, float *lse) {
    kv_status st = KV_OK;
    kv_gpu_buffer *b[2] = {0};
    kv_gpu_span *s = NULL;
    const size_t rows = (size_t)span->n_q_head, n = (size_t)span->n_token,
                 stride = (size_t)span->stride, d = (size_t)span->head_dim;
    float *host[2] = {NULL, NULL};
    KV_TRY(kv_gpu_span_upload(device, span, true, &s));
    KV_TRY(kv_gpu_new(device, rows * n * d * 4, &b[0]));
    KV_TRY(kv_gpu_new(device, rows * n * 4, &b[1]));
    KV_TRY(kv_gpu_attend(s, NULL, true, b[0], b[1], NULL));
    KV_TRY(fetch(b[0], rows, n * d, stride * d, 4, (void **)&host[0]));
    KV_TRY(fetch(b[1], rows, n, stride, 4, (void **)&host[1]));
    for (size_t i = 0; i < rows; i++) {
        memcpy(o + i * stride * d, host[0] + i * stride * d, n * d * sizeof *o);
        if (lse) memcpy(lse + i * stride, host[1] + i * stride, n * sizeof *lse);
    }
out:
    free(host[0]);
    free(host[1]);
    kv_gpu_span_free(s);
    return kv_gpu_ops_free(st, b, 2);
}

static kv_status dense(const kv_span *span, const kv_dense_request *request, kv_dense *out) {
    pthread_mutex_lock(&lock);
    const kv_status st = dense_locked(span, request, out);
    pthread_mutex_unlock(&lock);
    return st;
}

/* Re-rotated keys (streaming pos=cache) have other logits for every query and stay on the CPU. */
static kv_status masked(const kv_span *span, const kv_masked_request *request, kv_masked *out) {
    if (request->rerotate) return kv_ops_cpu.masked(span, request, out);
    pthread_mutex_lock(&lock);
    const kv_status st = masked_locked(span, request, out);
    pthread_mutex_unlock(&lock);
    return st;
}

static kv_status attend(const kv_span *span, float *o, float *lse) {
    pthread_mutex_lock(&lock);
    const kv_status st = attend_locked(span, o, lse);
    pthread_mutex_unlock(&lock);
    return st;
}

kv_status kv_gpu_ops(const kv_ops **out) {
    static kv_ops table;
    kv_status st = KV_OK;
    *out = &kv_ops_cpu;
    pthread_mutex_lock(&lock);
    if (!device) st = kv_gpu_open(&device);
    if (st == KV_OK) {
        table = kv_ops_cpu;
        table.name = "gpu";
        table.dense = dense;
        table.masked = masked;
        table.attend = attend;
        table.select = kv_gpu_ops_select;
        table.replay_attention = kv_gpu_ops_replay_attention;
        table.mlp_scores = kv_gpu_ops_mlp_scores;
        table.mlstm_scores = kv_gpu_ops_mlstm_scores;
        table.linear = kv_gpu_ops_linear;
        table.forward = kv_gpu_ops_forward;
        *out = &table;
    } else {
        kv_gpu_close(device);
        device = NULL;
    }
    pthread_mutex_unlock(&lock);
    return st == KV_OK ? st : kv_error_context(st, "--device gpu");
}

kv_status kv_gpu_shared(kv_gpu **out) {
    const kv_ops *table;
    const kv_status st = kv_gpu_ops(&table);
    *out = device;
    return st;
}
