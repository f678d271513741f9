/* Entries of the device table that decide: selection, closed loop, weight products. */
#include "kernels/gpu_ops.h"

#include <math.h>

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

static kv_status scores_locked(kv_gpu *g, const kv_scorer *s, const kv_span *span, float *rhat) {
    kv_status st = KV_OK;
    enum { K, V, HIDDEN, RHAT, BUFFERS };
    kv_gpu_buffer *b[BUFFERS] = {NULL};
    const size_t rows = (size_t)span->n_kv_head, n = (size_t)span->n_token,
                 stride = (size_t)span->stride, d = (size_t)span->head_dim;
    if (span->held) {
        KV_TRY(kv_gpu_span_floats(span->held->span, &b[K], &b[V]));
    } else {
        KV_TRY(kv_gpu_ops_send(g, span->k, rows, n * d, stride * d, &b[K]));
        KV_TRY(kv_gpu_ops_send(g, span->v, rows, n * d, stride * d, &b[V]));
    }
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
