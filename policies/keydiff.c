/* keydiff: keys unlike the mean direction stay; priority -cos(k_t, a_t), a_t = mean of k_x/|k_x| over 0 <= x <= min(t+w, end-1),
 * evicted keys included; known w tokens after the key. anchor=all takes the mean over the whole document, as kvpress does, and
 * therefore sees the future. Source: NVIDIA/kvpress keydiff_press.py; contract.md 2. */
#include "policies/policy.h"

#include <stdlib.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/ops.h"
#include "reference/priority.h"

enum { WINDOW, ALL };

static const kv_param params[] = {
    {.name = "anchor",
     .help =
         "keys whose mean direction is compared: up to the window's end, or all (sees the future)",
     .type = KV_PARAM_CHOICE,
     .choices = "window|all"},
    {0}};

static kv_status priority(const kv_policy_input *input, float *out) {
    const kv_span *span = input->span;
    bool all = kv_params_int(input->params, "anchor") == ALL;
    int32_t n = span->n_token, lead = all || input->run->window > n ? n : input->run->window;
    return input->ops->cosine_priorities(span, lead, out);
}

/* Running sum of directions, and the keys of the window, whose cosine is taken when they leave it. */
typedef struct running {
    int32_t n_head, head_dim, n_recent, n_seen;
    double *sum;   /* [n_head][head_dim] */
    float *recent; /* [n_recent = window + 1][n_head][head_dim], token t at t % n_recent */
} running;

static void stream_close(void *state) {
    running *r = state;
    free(r->sum);
    free(r->recent);
    free(r);
}

static kv_status stream_open(const kv_policy_input *input, void **state) {
    kv_status st = KV_OK;
    const kv_span *span = input->span;
    running *r = NULL;
    if (kv_params_int(input->params, "anchor") == ALL)
        KV_RAISE(KV_E_USAGE, "keydiff:anchor=all sees the future: it cannot decode token by token");
    KV_NEW(r, 1);
    *state = r;
    r->n_head = span->n_kv_head;
    r->head_dim = span->head_dim;
    r->n_recent = input->run->window + 1;
    KV_NEW(r->sum, r->n_head * r->head_dim);
    KV_NEW(r->recent, (int64_t)r->n_recent * r->n_head * r->head_dim);
out:
    return st;
}

static float *recent_keys(const running *r, int32_t t) {
    return r->recent + (int64_t)(t % r->n_recent) * r->n_head * r->head_dim;
}

static kv_status stream_push(void *state, int32_t u, const float *k, const float *v,
                             const float *hidden) {
    (void)v, (void)hidden;
    running *r = state;
    memcpy(recent_keys(r, u), k, (size_t)(r->n_head * r->head_dim) * sizeof *k);
    for (int32_t h = 0; h < r->n_head; h++)
        kv_direction_add(r->sum + h * r->head_dim, k + h * r->head_dim, r->head_dim);
    r->n_seen = u + 1;
    return KV_OK;
}

static kv_status stream_priority(void *state, int32_t t, float *out) {
    const running *r = state;
    for (int32_t h = 0; h < r->n_head; h++)
        out[h] = kv_cosine_priority(recent_keys(r, t) + h * r->head_dim, r->sum + h * r->head_dim,
                                    r->n_seen, r->head_dim);
    return KV_OK;
}

static const kv_stream_hooks hooks = {stream_open, stream_push, stream_priority, stream_close};

const kv_policy kv_policy_keydiff = {
    .name = "keydiff",
    .summary = "keys unlike the mean key direction stay",
    .source = "NVIDIA/kvpress keydiff_press.py; contract.md 2",
    .kind = KV_PRIORITY,
    .params = params,
    .priority = priority,
    .stream = &hooks,
};
