/* One reading thread, a window of layers between it and the work. */
#include "experiments/layer_reader.h"

#include <pthread.h>
#include <stdio.h>

#include "reference/core/cpu.h"
#include "reference/core/mem.h"

struct kv_layer_reader {
    kv_trace *trace;
    bool want_hidden, stop, started;
    int n_thread;                        /* of the opener: a new thread would use all cores */
    int32_t n_layer, ahead, read, taken; /* layers read so far and taken so far */
    kv_trace_layer *layer;               /* [n_layer] */
    kv_status status;                    /* of layer `read`, after which nothing is read */
    char message[1024];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
};

static void *read_all(void *context) {
    kv_layer_reader *r = context;
    kv_threads_set(r->n_thread);
    pthread_mutex_lock(&r->lock);
    while (r->read < r->n_layer && r->status == KV_OK) {
        while (!r->stop && r->read - r->taken >= r->ahead) pthread_cond_wait(&r->changed, &r->lock);
        if (r->stop) break;
        const int32_t at = r->read;
        pthread_mutex_unlock(&r->lock);
        const kv_status st = kv_trace_read_layer(r->trace, at, r->want_hidden, &r->layer[at]);
        pthread_mutex_lock(&r->lock);
        if (st == KV_OK)
            r->read++;
        else /* the error record belongs to this thread */
            snprintf(r->message, sizeof r->message, "%s", kv_error_message());
        r->status = st;
        pthread_cond_broadcast(&r->changed);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

kv_status kv_layer_reader_open(kv_trace *trace, bool want_hidden, int32_t ahead,
                               kv_layer_reader **out) {
    kv_status st = KV_OK;
    kv_layer_reader *r = NULL;
    *out = NULL;
    KV_NEW(r, 1);
    r->trace = trace;
    r->want_hidden = want_hidden;
    r->ahead = ahead;
    r->n_thread = kv_threads();
    r->n_layer = kv_trace_get(trace)->n_layer;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->changed, NULL);
    KV_NEW(r->layer, r->n_layer);
    r->started = pthread_create(&r->thread, NULL, read_all, r) == 0;
    if (!r->started) KV_RAISE(KV_E_INTERNAL, "no thread could be started to read the trace");
    *out = r;
    r = NULL;
out:
    kv_layer_reader_close(r);
    return st;
}

kv_status kv_layer_reader_next(kv_layer_reader *r, kv_trace_layer *out) {
    kv_status st = KV_OK;
    pthread_mutex_lock(&r->lock);
    while (r->read == r->taken && r->status == KV_OK) pthread_cond_wait(&r->changed, &r->lock);
    if (r->read > r->taken) {
        *out = r->layer[r->taken];
        r->layer[r->taken++] = (kv_trace_layer){0};
        pthread_cond_broadcast(&r->changed);
    } else {
        st = KV_FAIL(r->status, "%s", r->message);
    }
    pthread_mutex_unlock(&r->lock);
    return st;
}

void kv_layer_reader_close(kv_layer_reader *r) {
    if (!r) return;
    pthread_mutex_lock(&r->lock);
    r->stop = true;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
    if (r->started) pthread_join(r->thread, NULL);
    for (int32_t i = 0; r->layer && i < r->n_layer; i++) kv_trace_layer_free(&r->layer[i]);
    free(r->layer);
    pthread_cond_destroy(&r->changed);
    pthread_mutex_destroy(&r->lock);
    free(r);
}
