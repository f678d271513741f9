/* knorm: keys of small norm stay; priority -|k|. Source: NVIDIA/kvpress knorm_press.py; contract.md 2. */
#include "policies/policy.h"

#include <stdlib.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/ops.h"
#include "reference/priority.h"

static kv_status priority(const kv_policy_input *input, float *out) {
    return input->ops->norm_priorities(input->span, out);
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
        r->priority[u % r->n * r->n_head + h] = kv_norm_priority(k + h * r->head_dim, r->head_dim);
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
