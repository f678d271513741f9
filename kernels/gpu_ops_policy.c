/* Entries of the device table that decide: priorities, gates, selection, closed loop; weight products. */
#include "kernels/gpu_ops.h"

#include <math.h>
#include <stdlib.h>

#include "reference/core/mem.h"

kv_status kv_gpu_ops_select(const kv_span *span, const kv_run *run, const float *priority,
                            int32_t *evict_at) {
    kv_status st = KV_OK;
    kv_gpu_buffer *b[2] = {NULL, NULL};
    const size_t rows = (size_t)span->n_kv_head, n = (size_t)span->n_token,
                 stride = (size_t)span->stride;
    kv_gpu *g = kv_gpu_ops_enter();
    for (size_t h = 0; h < rows; h++)
        for (size_t t = 0; t < n; t++)
            if (isnan(priority[h * stride + t]))
                KV_RAISE(
                    KV_E_DATA,
                    "layer %d, KV head %d: the priority of token %d is NaN; a policy must give "
                    "numbers",
                    span->layer_id, (int)h, (int)t);
    KV_TRY(kv_gpu_ops_send(g, priority, rows, n, stride, &b[0]));
    KV_TRY(kv_gpu_new(g, rows * n * 4, &b[1]));
    KV_TRY(kv_gpu_select(g, span->n_kv_head, span->n_token, run, b[0], b[1]));
    KV_TRY(kv_gpu_ops_fetch(b[1], rows, n, stride, 4, evict_at));
out:
    st = kv_gpu_ops_free(st, b, 2);
    kv_gpu_ops_leave();
    return st;
}

/* Of every key, from the span alone; lead < 0: norms, otherwise cosines. */
static kv_status priorities(const kv_span *span, int32_t lead, float *priority) {
    kv_status st = KV_OK;
    kv_gpu_buffer *b = NULL;
    kv_held *held = NULL;
    const size_t rows = (size_t)span->n_kv_head, n = (size_t)span->n_token;
    kv_gpu *g = kv_gpu_ops_enter();
    KV_TRY(kv_gpu_ops_borrow(g, span, false, &held));
    KV_TRY(kv_gpu_new(g, rows * n * 4, &b));
    KV_TRY(lead < 0 ? kv_gpu_norm_priorities(held->span, b)
                    : kv_gpu_cosine_priorities(held->span, lead, b));
    KV_TRY(kv_gpu_ops_fetch(b, rows, n, (size_t)span->stride, 4, priority));
out:
    st = kv_gpu_ops_return(kv_gpu_ops_free(st, &b, 1), span, held);
    kv_gpu_ops_leave();
    return st;
}

kv_status kv_gpu_ops_norm_priorities(const kv_span *span, float *priority) {
    return priorities(span, -1, priority);
}

kv_status kv_gpu_ops_cosine_priorities(const kv_span *span, int32_t lead, float *priority) {
    return priorities(span, lead, priority);
}

kv_status kv_gpu_ops_replay_attention(const kv_span *span, const kv_attention_rule *rule,
                                      int32_t budget, int32_t *evict_at) {
    kv_status st = KV_OK;
    kv_gpu_buffer *b = NULL;
    kv_held *held = NULL;
    const size_t rows = (size_t)span->n_kv_head, n = (size_t)span->n_token;
    kv_gpu *g = kv_gpu_ops_enter();
    KV_TRY(kv_gpu_ops_borrow(g, span, false, &held));
    KV_TRY(kv_gpu_new(g, rows * n * 4, &b));
    KV_TRY(kv_gpu_replay_attention(held->span, rule, span->n_kv_head, budget, NULL, NULL, b));
    KV_TRY(kv_gpu_ops_fetch(b, rows, n, (size_t)span->stride, 4, evict_at));
out:
    st = kv_gpu_ops_return(kv_gpu_ops_free(st, &b, 1), span, held);
    kv_gpu_ops_leave();
    return st == KV_OK ? st : kv_error_context(st, "layer %d", span->layer_id);
}

/* k, v of a span as fp32 [n_kv_head][n_token][head_dim] on the device, new. */
static kv_status floats(kv_gpu *g, const kv_span *span, kv_gpu_buffer **k, kv_gpu_buffer **v) {
    kv_status st = KV_OK;
    const size_t rows = (size_t)span->n_kv_head, n = (size_t)span->n_token,
                 stride = (size_t)span->stride, d = (size_t)span->head_dim;
    if (span->held) return kv_gpu_span_floats(span->held->span, k, v);
    KV_TRY(kv_gpu_ops_send(g, span->k, rows, n * d, stride * d, k));
    KV_TRY(kv_gpu_ops_send(g, span->v, rows, n * d, stride * d, v));
out:
    return st;
}

static kv_status scores_locked(kv_gpu *g, const kv_scorer *s, const kv_span *span, float *rhat) {
    kv_status st = KV_OK;
    enum { K, V, HIDDEN, RHAT, BUFFERS };
    kv_gpu_buffer *b[BUFFERS] = {NULL};
    const size_t rows = (size_t)span->n_kv_head, n = (size_t)span->n_token,
                 stride = (size_t)span->stride;
    KV_TRY(floats(g, span, &b[K], &b[V]));
    if (s->spec.n_hidden)
        KV_TRY(kv_gpu_ops_send(g, span->hidden, 1, n * (size_t)span->d_model,
                               n * (size_t)span->d_model, &b[HIDDEN]));
    KV_TRY(kv_gpu_new(g, rows * n * 4, &b[RHAT]));
    KV_TRY(kv_gpu_scores(g, s, span->n_token, b[K], b[V], b[HIDDEN], b[RHAT]));
    KV_TRY(kv_gpu_ops_fetch(b[RHAT], rows, n, stride, 4, rhat));
out:
    return kv_gpu_ops_free(st, b, BUFFERS);
}

static kv_status scores(const kv_policy_input *input, const char *policy, float *rhat) {
    kv_scorer s;
    kv_status st = kv_scorer_open(input, policy, &s);
    if (st != KV_OK) return st;
    st = scores_locked(kv_gpu_ops_enter(), &s, input->span, rhat);
    kv_gpu_ops_leave();
    kv_scorer_close(&s);
    return st;
}

kv_status kv_gpu_ops_mlp_scores(const kv_policy_input *input, float *rhat) {
    return scores(input, "kvpop_mlp", rhat);
}

kv_status kv_gpu_ops_mlstm_scores(const kv_policy_input *input, float *rhat) {
    return scores(input, "kvpop", rhat);
}

/* Input of gates that read hidden states, normalised on the host: x [n_token][n_input]. */
static kv_status send_states(kv_gpu *g, const kv_dms_spec *spec, const kv_span *span,
                             kv_gpu_buffer **to) {
    kv_status st = KV_OK;
    const size_t n = (size_t)span->n_token, width = (size_t)spec->n_input;
    float *x = NULL;
    KV_NEW(x, n * width);
    kv_dms_input(spec, span->n_token, span->head_dim, NULL, NULL, 0, span->hidden, x);
    KV_TRY(kv_gpu_ops_send(g, x, 1, n * width, n * width, to));
out:
    free(x);
    return st;
}

static kv_status gate_logits_locked(kv_gpu *g, const kv_dms_gates *w, const kv_span *span,
                                    float *logit) {
    kv_status st = KV_OK;
    enum { K, V, X, PARAM, LOGIT, BUFFERS };
    kv_gpu_buffer *b[BUFFERS] = {NULL};
    kv_gpu_gates *gates = NULL;
    const int32_t heads = span->n_kv_head, n = span->n_token;
    const size_t rows = (size_t)heads, count = (size_t)kv_dms_param(&w->spec);
    KV_TRY(kv_gpu_gates_new(g, &w->spec, heads, heads, &gates));
    if (w->spec.source == KV_DMS_HIDDEN) {
        KV_TRY(send_states(g, &w->spec, span, &b[X]));
        KV_TRY(kv_gpu_gates_input(gates, b[X], n, 0, n));
    } else {
        KV_TRY(floats(g, span, &b[K], &b[V]));
        KV_TRY(kv_gpu_gates_input_keys(gates, b[K], b[V], n, span->head_dim));
    }
    KV_TRY(kv_gpu_ops_send(g, w->param, rows, count, count, &b[PARAM]));
    KV_TRY(kv_gpu_new(g, rows * (size_t)n * 4, &b[LOGIT]));
    KV_TRY(kv_gpu_gates_logits(gates, b[PARAM], b[LOGIT]));
    KV_TRY(kv_gpu_ops_fetch(b[LOGIT], rows, (size_t)n, (size_t)span->stride, 4, logit));
out:
    kv_gpu_gates_free(gates);
    return kv_gpu_ops_free(st, b, BUFFERS);
}

kv_status kv_gpu_ops_gate_logits(const kv_policy_input *input, float *logit, int32_t *shift) {
    kv_dms_gates gates;
    kv_status st = kv_dms_gates_open(input, &gates);
    if (st != KV_OK) return st;
    *shift = gates.shift;
    st = gate_logits_locked(kv_gpu_ops_enter(), &gates, input->span, logit);
    kv_gpu_ops_leave();
    kv_dms_gates_close(&gates);
    return st;
}

kv_status kv_gpu_ops_linear(int32_t m, int32_t n, int32_t k, const float *a, kv_dtype w_type,
                            const void *w, float *c) {
    kv_status st = KV_OK;
    kv_gpu_buffer *b[2] = {NULL, NULL};
    kv_gpu *g = kv_gpu_ops_enter();
    if (m <= 0 || n <= 0 || k <= 0)
        KV_RAISE(KV_E_INTERNAL, "weight product of %d x %d x %d: every size must be positive", m, n,
                 k);
    KV_TRY(kv_gpu_ops_send(g, a, (size_t)m, (size_t)k, (size_t)k, &b[0]));
    KV_TRY(kv_gpu_new(g, (size_t)m * (size_t)n * 4, &b[1]));
    KV_TRY(kv_gpu_linear(g, m, n, k, b[0], w_type, w, b[1]));
    KV_TRY(kv_gpu_get(b[1], c, (size_t)m * (size_t)n * 4));
out:
    st = kv_gpu_ops_free(st, b, 2);
    kv_gpu_ops_leave();
    return st;
}
