/* Parameters, optimiser and traces of a training on the GPU. */
#include "experiments/train_device.h"

#include <stdlib.h>
#include <string.h>

#include "reference/core/mem.h"

static size_t bytes_of(const kv_train_device *d) { return (size_t)d->n * sizeof(float); }

kv_status kv_train_device_open(kv_train_device *d, int64_t n) {
    kv_status st = KV_OK;
    KV_TRY(kv_gpu_shared(&d->gpu));
    d->n = n;
    kv_gpu_buffer **all[] = {&d->param, &d->grad, &d->m1, &d->m2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        KV_TRY(kv_gpu_new(d->gpu, bytes_of(d), all[i]));
    KV_TRY(kv_gpu_new(d->gpu, sizeof(double), &d->sum));
out:
    return st;
}

void kv_train_device_close(kv_train_device *d) {
    kv_gpu_buffer *all[] = {d->param, d->grad, d->m1, d->m2, d->sum};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) (void)kv_gpu_free(all[i]);
    memset(d, 0, sizeof *d);
}

kv_status kv_train_device_load(kv_train_device *d, const kv_train_state *s) {
    kv_status st = KV_OK;
    KV_TRY(kv_gpu_put(d->param, s->param, bytes_of(d)));
    KV_TRY(kv_gpu_put(d->m1, s->m1, bytes_of(d)));
    KV_TRY(kv_gpu_put(d->m2, s->m2, bytes_of(d)));
out:
    return st;
}

kv_status kv_train_device_fetch(const kv_train_device *d, kv_train_state *s) {
    kv_status st = KV_OK;
    KV_TRY(kv_gpu_get(d->param, s->param, bytes_of(d)));
    KV_TRY(kv_gpu_get(d->m1, s->m1, bytes_of(d)));
    KV_TRY(kv_gpu_get(d->m2, s->m2, bytes_of(d)));
out:
    return st;
}

kv_status kv_train_device_update(kv_train_device *d, const kv_adamw *group, int64_t step,
                                 double clip, double *sum) {
    kv_status st = KV_OK;
    KV_TRY(kv_gpu_adamw(d->gpu, group, step, clip, d->n, d->grad, d->param, d->m1, d->m2, d->sum));
    KV_TRY(kv_gpu_get(d->sum, sum, sizeof *sum));
out:
    return st;
}

kv_status kv_train_shelf_open(kv_train_shelf *s, kv_gpu *g, int32_t n_trace, void *context,
                              void (*drop)(void *context, int32_t trace)) {
    kv_status st = KV_OK;
    kv_gpu_info info;
    kv_gpu_describe(g, &info);
    *s = (kv_train_shelf){.n_trace = n_trace,
                          .newest = -1,
                          .room = info.bytes_free / 2,
                          .context = context,
                          .drop = drop};
    KV_NEW(s->bytes, n_trace);
    KV_NEW(s->used, n_trace);
out:
    return st;
}

void kv_train_shelf_close(kv_train_shelf *s) {
    for (int32_t i = 0; s->bytes && i < s->n_trace; i++)
        if (s->bytes[i]) s->drop(s->context, i);
    free(s->bytes);
    free(s->used);
    memset(s, 0, sizeof *s);
}

static int32_t oldest(const kv_train_shelf *s) {
    int32_t found = -1;
    for (int32_t i = 0; i < s->n_trace; i++)
        if (s->bytes[i] && (found < 0 || s->used[i] < s->used[found])) found = i;
    return found;
}

bool kv_train_shelf_take(kv_train_shelf *s, int32_t trace, int64_t bytes) {
    const bool there = s->bytes[trace] > 0;
    while (!there && s->held > 0 && s->held + bytes > s->room) {
        const int32_t i = oldest(s);
        s->drop(s->context, i);
        s->held -= s->bytes[i];
        s->bytes[i] = 0;
    }
    if (!there) s->held += bytes;
    s->bytes[trace] = bytes;
    s->used[trace] = ++s->now;
    s->newest = trace;
    return there;
}
