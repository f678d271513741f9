/* A small random trace for tests of whole commands: normal q, k, v with a few keys that draw attention, kinds and scored marks. */
#ifndef KV_TESTS_FIXTURE_TRACE_H
#define KV_TESTS_FIXTURE_TRACE_H

#include <stdlib.h>

#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "traces/trace.h"

typedef struct fixture {
    int32_t n_layer, n_q_head, n_kv_head, head_dim, n_token;
    uint64_t seed;
    int32_t n_document;
    const int32_t *doc_start; /* NULL: one document */
    bool bare;                /* without the optional datasets */
    const char *model_hash;
} fixture;

static inline void fixture_fill(float *x, int64_t n, uint64_t seed, uint32_t stream, double scale) {
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)(scale * kv_rand_normal(seed, stream, (uint32_t)i, (uint32_t)(i >> 32), 7));
}

static inline kv_status fixture_write(const char *path, const fixture *f) {
    kv_status st = KV_OK;
    kv_trace_writer *w = NULL;
    float *q = NULL, *k = NULL, *v = NULL;
    int32_t *token = NULL, *layer_id = NULL;
    uint8_t *kind = NULL, *scored = NULL;
    const int64_t nq = (int64_t)f->n_q_head * f->n_token * f->head_dim,
                  nk = (int64_t)f->n_kv_head * f->n_token * f->head_dim;
    KV_NEW(q, nq);
    KV_NEW(k, nk);
    KV_NEW(v, nk);
    KV_NEW(token, f->n_token);
    KV_NEW(layer_id, f->n_layer);
    KV_NEW(kind, f->n_token);
    KV_NEW(scored, f->n_token);
    for (int32_t l = 0; l < f->n_layer; l++) layer_id[l] = l;
    for (int32_t t = 0; t < f->n_token; t++) {
        token[t] = (int32_t)(kv_rand(f->seed, 1, (uint32_t)t, 0, 0).v[0] % 250);
        kind[t] = (uint8_t)(t % 7);
        scored[t] = (uint8_t)(t % 4);
    }
    const kv_trace_spec spec = {.title = "fixture",
                                .source = "random",
                                .history = "fixture",
                                .producer = "tests",
                                .task = "none",
                                .n_layer = f->n_layer,
                                .n_q_head = f->n_q_head,
                                .n_kv_head = f->n_kv_head,
                                .head_dim = f->head_dim,
                                .d_model = f->n_q_head * f->head_dim,
                                .n_model_layer = f->n_layer,
                                .layer_id = layer_id,
                                .rope_theta = 10000,
                                .softmax_scale = 0.5,
                                .type = KV_F16,
                                .n_token = f->n_token,
                                .n_document = f->doc_start ? f->n_document : 1,
                                .token = token,
                                .doc_start = f->doc_start,
                                .kind = f->bare ? NULL : kind,
                                .scored = f->bare ? NULL : scored,
                                .model_hash = f->model_hash ? f->model_hash : ""};
    KV_TRY(kv_trace_writer_open(path, &spec, &w));
    for (int32_t l = 0; l < f->n_layer; l++) {
        fixture_fill(q, nq, f->seed, (uint32_t)(10 + l), 1);
        fixture_fill(k, nk, f->seed, (uint32_t)(100 + l), 1);
        fixture_fill(v, nk, f->seed, (uint32_t)(200 + l), 1);
        for (int64_t t = 3; t < nk / f->head_dim; t += 17)
            for (int32_t c = 0; c < f->head_dim; c++) k[t * f->head_dim + c] *= 4;
        const kv_span span = {.n_token = f->n_token,
                              .stride = f->n_token,
                              .n_q_head = f->n_q_head,
                              .n_kv_head = f->n_kv_head,
                              .head_dim = f->head_dim,
                              .q = q,
                              .k = k,
                              .v = v,
                              .scale = 0.5f,
                              .layer_id = l,
                              .layer_index = l,
                              .n_layer = f->n_layer};
        KV_TRY(kv_trace_writer_layer(w, &span, NULL));
    }
    st = kv_trace_writer_close(w, true);
    w = NULL;
out:
    if (w) {
        kv_status ignored = kv_trace_writer_close(w, false);
        (void)ignored;
    }
    free(q);
    free(k);
    free(v);
    free(token);
    free(layer_id);
    free(kind);
    free(scored);
    return st;
}

#endif
