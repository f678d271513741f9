/* knorm: keys of small norm stay; priority -|k|. Source: NVIDIA/kvpress knorm_press.py; contract.md 2. */
#include "policies/policy.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/mem.h"

static float minus_norm(const float *k, int32_t d) {
    double sum = 0;
    for (int32_t c = 0; c < d; c++) sum += (double)k[c] * (double)k[c];
    return (float)-sqrt(sum);
}

static kv_status priority(const kv_policy_input *input, float *out) {
    const kv_span *span = input->span;
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) {
            int64_t i = h * span->stride + t;
            out[i] = minus_norm(span->k + i * span->head_dim, span->head_dim);
        }
    return KV_OK;
}

/* Priorities of the tokens in the window, computed as they enter. */
typedef struct recent {
    int32_t n_head, head_dim, n;
    float priority[]; /* [n = window + 1][n_head], token t at t % n */
} recent;

static kv_status stream_open(const kv_policy_input *input, void **state) {
    const kv_span *span = input->span;
    size_t n = (size_t)input->run->window + 1, values = n * (size_t)span->n_kv_head;
    recent *r = kv_mem_new(1, sizeof *r + values * sizeof *r->priority);
    if (!r) return KV_E_INTERNAL;
    r->n_head = span->n_kv_head;
    r->head_dim = span->head_dim;
    r->n = (int32_t)n;
    *state = r;
    return KV_OK;
}

static kv_status stream_push(void *state, int32_t u, const float *k, const float *v,
                             const float *hidden) {
    (void)v, (void)hidden;
    recent *r = state;
    for (int32_t h = 0; h < r->n_head; h++)
        r->priority[u % r->n * r->n_head + h] = minus_norm(k + h * r->head_dim, r->head_dim);
    return KV_OK;
}

static kv_status stream_priority(void *state, int32_t t, float *out) {
    const recent *r = state;
    memcpy(out, r->priority + t % r->n * r->n_head, (size_t)r->n_head * sizeof *out);
    return KV_OK;
}

static const kv_stream_hooks hooks = {stream_open, stream_push, stream_priority, free};

const kv_policy kv_policy_knorm = {
    .name = "knorm",
    .summary = "keys of small norm stay",
    .source = "NVIDIA/kvpress knorm_press.py; contract.md 2",
    .kind = KV_PRIORITY,
    .priority = priority,
    .stream = &hooks,
};
