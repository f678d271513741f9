/* keydiff: keys unlike the mean direction stay; priority -cos(k_t, a_t), a_t = mean of k_x/|k_x| over 0 <= x <= min(t+w, end-1),
 * evicted keys included; known w tokens after the key. anchor=all takes the mean over the whole document, as kvpress does, and
 * therefore sees the future. Source: NVIDIA/kvpress keydiff_press.py; contract.md 2. */
#include "policies/policy.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/mem.h"

enum { WINDOW, ALL };
enum { FORK_VALUES = 1 << 16 }; /* below, waking threads costs more than the work */

static const kv_param params[] = {
    {.name = "anchor",
     .help =
         "keys whose mean direction is compared: up to the window's end, or all (sees the future)",
     .type = KV_PARAM_CHOICE,
     .choices = "window|all"},
    {0}};

static double norm(const float *k, int32_t d) {
    double sum = 0;
    for (int32_t c = 0; c < d; c++) sum += (double)k[c] * (double)k[c];
    return sqrt(sum);
}

static void add_direction(double *sum, const float *k, int32_t d) {
    double length = norm(k, d);
    for (int32_t c = 0; c < d && length > 0; c++) sum[c] += (double)k[c] / length;
}

/* sum [d] of n directions; their mean is the anchor. */
static float minus_cos(const float *k, const double *sum, int32_t n, int32_t d) {
    double dot = 0, square = 0, length = norm(k, d);
    for (int32_t c = 0; c < d; c++) {
        double a = sum[c] / n;
        dot += (double)k[c] * a;
        square += a * a;
    }
    double scale = length * sqrt(square);
    return scale > 0 ? (float)(-dot / scale) : 0.0f;
}

static kv_status priority(const kv_policy_input *input, float *out) {
    kv_status st = KV_OK;
    const kv_span *span = input->span;
    int32_t d = span->head_dim, n = span->n_token;
    bool all = kv_params_int(input->params, "anchor") == ALL;
    int32_t lead = all || input->run->window > n ? n : input->run->window;
    double *sum = NULL; /* [n_kv_head][head_dim] */
    KV_NEW(sum, span->n_kv_head * d);
#pragma omp parallel for if (span->n_kv_head * (int64_t)n * d >= FORK_VALUES)
    for (int32_t h = 0; h < span->n_kv_head; h++) {
        const float *k = span->k + h * span->stride * d;
        double *a = sum + h * d;
        int32_t used = 0;
        for (int32_t t = 0; t < n; t++) {
            int32_t until = lead < n - t ? t + lead + 1 : n;
            for (; used < until; used++) add_direction(a, k + (int64_t)used * d, d);
            out[h * span->stride + t] = minus_cos(k + (int64_t)t * d, a, used, d);
        }
    }
out:
    free(sum);
    return st;
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
        add_direction(r->sum + h * r->head_dim, k + h * r->head_dim, r->head_dim);
    r->n_seen = u + 1;
    return KV_OK;
}

static kv_status stream_priority(void *state, int32_t t, float *out) {
    const running *r = state;
    for (int32_t h = 0; h < r->n_head; h++)
        out[h] = minus_cos(recent_keys(r, t) + h * r->head_dim, r->sum + h * r->head_dim, r->n_seen,
                           r->head_dim);
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
