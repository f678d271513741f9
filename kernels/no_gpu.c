/* Stands in for the CUDA kernels in a build without them: every function says what is missing. */
#include "kernels/kernels.h"

#include <string.h>

static kv_status unavailable(void) {
    return KV_FAIL(
        KV_E_UNAVAILABLE,
        "no GPU: this kvlab was built without CUDA (when `make` ran there was no nvcc in PATH "
        "or /usr/local/cuda, or no NVIDIA driver, or CUDA=0); install them, or `make "
        "CUDA=1` for a GPU elsewhere; everything but verify runs with --device cpu");
}

kv_status kv_gpu_ops(const kv_ops **out) {
    *out = &kv_ops_cpu;
    return unavailable();
}

kv_status kv_gpu_shared(kv_gpu **out) {
    *out = NULL;
    return unavailable();
}
kv_status kv_gpu_open(kv_gpu **out) { return kv_gpu_shared(out); }

/* Without a handle nothing below can be called; it lets the callers link. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

void kv_gpu_begin(void) {}
void kv_gpu_settle(void) {}
void kv_gpu_close(kv_gpu *g) {}
void kv_gpu_describe(kv_gpu *g, kv_gpu_info *out) { memset(out, 0, sizeof *out); }
size_t kv_gpu_bytes(const kv_gpu_buffer *b) { return 0; }
void kv_gpu_span_free(kv_gpu_span *s) {}
kv_dtype kv_gpu_span_type(const kv_gpu_span *s) { return KV_F32; }
void kv_gpu_span_shape(const kv_gpu_span *s, int32_t *n_q_head, int32_t *n_token,
                       int32_t *head_dim) {}
void kv_gpu_plan_free(kv_gpu_plan *p) {}
kv_status kv_gpu_use_hopper(kv_gpu *g, bool hopper) { return unavailable(); }
void kv_gpu_use_loop_blocks(kv_gpu *g, int32_t n) {}
kv_status kv_gpu_sync(kv_gpu *g) { return unavailable(); }
kv_status kv_gpu_new(kv_gpu *g, size_t bytes, kv_gpu_buffer **out) { return unavailable(); }
kv_status kv_gpu_free(kv_gpu_buffer *b) { return unavailable(); }
kv_status kv_gpu_put(kv_gpu_buffer *b, const void *host, size_t bytes) { return unavailable(); }
kv_status kv_gpu_get(const kv_gpu_buffer *b, void *host, size_t bytes) { return unavailable(); }
kv_status kv_gpu_tick(kv_gpu *g, int i) { return unavailable(); }
kv_status kv_gpu_ms(kv_gpu *g, int from, int to, float *ms) { return unavailable(); }
kv_status kv_gpu_copy_ceiling(kv_gpu *g, size_t bytes, double *tb_per_s) { return unavailable(); }
kv_status kv_gpu_matmul_ceiling(kv_gpu *g, int32_t n, double *tflop_per_s) { return unavailable(); }
kv_status kv_gpu_span_upload(kv_gpu *g, const kv_span *span, bool want_v, kv_gpu_span **out) {
    return unavailable();
}
kv_status kv_gpu_span_random(kv_gpu *g, int32_t n_q_head, int32_t n_kv_head, int32_t n_token,
                             int32_t head_dim, kv_dtype type, uint64_t seed, kv_gpu_span **out) {
    return unavailable();
}
kv_status kv_gpu_span_adopt(kv_gpu *g, const kv_span *span, const kv_gpu_buffer *q,
                            const kv_gpu_buffer *k, const kv_gpu_buffer *v, kv_gpu_span **out) {
    return unavailable();
}
kv_status kv_gpu_span_floats(const kv_gpu_span *s, kv_gpu_buffer **k, kv_gpu_buffer **v) {
    return unavailable();
}
kv_status kv_gpu_measure(kv_gpu *g, const kv_run *run, const kv_gpu_measure_input *in,
                         kv_layer_sums *sums) {
    return unavailable();
}
kv_status kv_gpu_lse(const kv_gpu_span *s, int32_t sinks, int32_t window, kv_gpu_buffer *lse,
                     kv_gpu_buffer *long_mass, kv_gpu_buffer *top_p, kv_gpu_buffer *top_t) {
    return unavailable();
}
kv_status kv_gpu_column(const kv_gpu_span *s, int32_t window, double power,
                        const kv_gpu_buffer *lse, bool sparse, kv_gpu_buffer *column) {
    return unavailable();
}
kv_status kv_gpu_target(const kv_gpu_span *s, int32_t window, bool maximum, bool mean, double eps,
                        const kv_gpu_buffer *column, kv_gpu_buffer *r) {
    return unavailable();
}
kv_status kv_gpu_plan_new(kv_gpu *g, int32_t n_kv_head, int32_t n_token, int32_t sinks,
                          int32_t window, const kv_gpu_buffer *evict_at, kv_gpu_plan **out) {
    return unavailable();
}
kv_status kv_gpu_plan_fill(kv_gpu_plan *p, const kv_gpu_buffer *evict_at) { return unavailable(); }
kv_status kv_gpu_plan_pairs(kv_gpu_plan *p, int32_t n_q_head, double *pairs) {
    return unavailable();
}
kv_status kv_gpu_attend(const kv_gpu_span *s, const kv_gpu_plan *plan, bool exact, kv_gpu_buffer *o,
                        kv_gpu_buffer *lse, kv_gpu_buffer *lse_long) {
    return unavailable();
}
kv_status kv_gpu_attend_turned(const kv_gpu_span *s, const kv_gpu_buffer *evict_at,
                               const int32_t *position, const double *inv_freq, kv_gpu_buffer *o,
                               kv_gpu_buffer *lse) {
    return unavailable();
}
kv_status kv_gpu_step_mass(const kv_gpu_span *s, const kv_run *run, const kv_gpu_buffer *lse,
                           kv_gpu_buffer *mass) {
    return unavailable();
}
kv_status kv_gpu_norm_priorities(const kv_gpu_span *s, kv_gpu_buffer *priority) {
    return unavailable();
}
kv_status kv_gpu_cosine_priorities(const kv_gpu_span *s, int32_t lead, kv_gpu_buffer *priority) {
    return unavailable();
}
kv_status kv_gpu_select(kv_gpu *g, int32_t n_head, int32_t n_token, const kv_run *run,
                        const kv_gpu_buffer *priority, kv_gpu_buffer *evict_at) {
    return unavailable();
}
kv_status kv_gpu_scores(kv_gpu *g, const kv_scorer *s, int32_t n_token, const kv_gpu_buffer *k,
                        const kv_gpu_buffer *v, const kv_gpu_buffer *hidden, kv_gpu_buffer *rhat) {
    return unavailable();
}
kv_status kv_gpu_linear(kv_gpu *g, int32_t m, int32_t n, int32_t k, const kv_gpu_buffer *a,
                        kv_dtype w_type, const void *w, kv_gpu_buffer *c) {
    return unavailable();
}
kv_status kv_gpu_replay_attention(const kv_gpu_span *s, const kv_attention_rule *rule,
                                  int32_t layer_heads, int32_t budget, const kv_gpu_buffer *forced,
                                  kv_gpu_buffer *gap, kv_gpu_buffer *evict_at) {
    return unavailable();
}
void kv_gpu_net_free(kv_gpu_net *net) {}
kv_status kv_gpu_net_new(kv_gpu *g, const kv_net_spec *spec, int32_t n_lane, int32_t group,
                         bool exact, kv_gpu_net **out) {
    return unavailable();
}
kv_status kv_gpu_net_input(kv_gpu_net *net, int32_t n_token, int32_t n_doc,
                           const int64_t *doc_first, const kv_gpu_buffer *k, const kv_gpu_buffer *v,
                           const kv_gpu_buffer *hidden) {
    return unavailable();
}
kv_status kv_gpu_net_forward(kv_gpu_net *net, const kv_gpu_buffer *param, kv_gpu_buffer *rhat) {
    return unavailable();
}
kv_status kv_gpu_net_backward(kv_gpu_net *net, const kv_gpu_buffer *param, const kv_gpu_buffer *e,
                              kv_gpu_buffer *grad) {
    return unavailable();
}
void kv_gpu_boundary_free(kv_gpu_boundary *b) {}
kv_status kv_gpu_boundary_new(kv_gpu *g, const kv_run *run, const kv_loss_options *o,
                              int32_t n_lane, int32_t n_token, int32_t n_doc,
                              const int64_t *doc_first, const float *target,
                              kv_gpu_boundary **out) {
    return unavailable();
}
kv_status kv_gpu_boundary_pairs(kv_gpu_boundary *b, int32_t step, const double *log_gamma) {
    return unavailable();
}
kv_status kv_gpu_boundary_get(const kv_gpu_boundary *b, int32_t *n_pair, kv_pair *pair) {
    return unavailable();
}
kv_status kv_gpu_boundary_loss(kv_gpu_boundary *b, const kv_gpu_buffer *rhat, kv_gpu_buffer *e,
                               kv_gpu_buffer *loss) {
    return unavailable();
}
kv_status kv_gpu_adamw(kv_gpu *g, const kv_adamw *o, int64_t step, double clip, int64_t n,
                       const kv_gpu_buffer *grad, kv_gpu_buffer *param, kv_gpu_buffer *moment1,
                       kv_gpu_buffer *moment2, kv_gpu_buffer *sum) {
    return unavailable();
}
kv_status kv_gpu_soft_attend(const kv_gpu_span *s, const kv_gpu_window *w,
                             const kv_gpu_buffer *log_keep, kv_gpu_buffer *o, kv_gpu_buffer *dense,
                             kv_gpu_buffer *lse) {
    return unavailable();
}
kv_status kv_gpu_soft_backward(const kv_gpu_span *s, const kv_gpu_window *w,
                               const kv_gpu_buffer *log_keep, const kv_gpu_buffer *o,
                               const kv_gpu_buffer *lse, const kv_gpu_buffer *d_o,
                               kv_gpu_buffer *d_keep) {
    return unavailable();
}
kv_status kv_gpu_soft_match(const kv_gpu_span *s, const kv_gpu_window *w, const kv_gpu_buffer *o,
                            kv_gpu_buffer *dense, kv_gpu_buffer *off) {
    return unavailable();
}
kv_status kv_gpu_gates_new(kv_gpu *g, const kv_dms_spec *spec, int32_t n_lane, int32_t group,
                           kv_gpu_gates **out) {
    return unavailable();
}
void kv_gpu_gates_free(kv_gpu_gates *gates) {}
kv_status kv_gpu_gates_input(kv_gpu_gates *gates, const kv_gpu_buffer *x, int32_t n_token,
                             int32_t first, int32_t n) {
    return unavailable();
}
kv_status kv_gpu_gates_input_keys(kv_gpu_gates *gates, const kv_gpu_buffer *k,
                                  const kv_gpu_buffer *v, int32_t n_token, int32_t head_dim) {
    return unavailable();
}
kv_status kv_gpu_gate_kept(kv_gpu *g, const kv_dms_cache *cache, int64_t n_lane,
                           const kv_gpu_buffer *logit, double offset, int64_t *kept) {
    return unavailable();
}
kv_status kv_gpu_gate_gap(kv_gpu *g, int64_t n, const kv_gpu_buffer *logit, double offset,
                          float *below, float *above) {
    return unavailable();
}
kv_status kv_gpu_gates_logits(kv_gpu_gates *gates, const kv_gpu_buffer *param,
                              kv_gpu_buffer *logit) {
    return unavailable();
}
kv_status kv_gpu_gates_decide(kv_gpu_gates *gates, const kv_gpu_draw *draw,
                              const kv_gpu_buffer *logit, kv_gpu_buffer *log_keep,
                              kv_gpu_buffer *marked) {
    return unavailable();
}
kv_status kv_gpu_gates_backward(kv_gpu_gates *gates, int32_t queries, const kv_gpu_buffer *d_keep,
                                const kv_gpu_buffer *off, double push, kv_gpu_buffer *grad) {
    return unavailable();
}
