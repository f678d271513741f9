/* Inside of the device table over host arrays: the device under its lock, held spans, copies, the entries by file. */
#ifndef KV_KERNELS_GPU_OPS_H
#define KV_KERNELS_GPU_OPS_H

#include "kernels/kernels.h"
#include "reference/metrics.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The device of kv_gpu_ops, locked for this thread until kv_gpu_ops_leave. Not recursive: leave before calling the table. */
kv_gpu *kv_gpu_ops_enter(void);
void kv_gpu_ops_leave(void);

/* What the device keeps of a span between hold and release. */
typedef struct kv_held {
    kv_gpu_span *span;
    /* Dense results, NULL until asked for: rows [n_q_head][n_token] for E(u) of sinks and window, o [n_q_head][n_token][head_dim]. */
    int32_t sinks, window;
    kv_gpu_buffer *lse, *long_mass, *top_p, *top_t, *o;
} kv_held;

/* Everything below: inside the lock. */

/* What is held of the span, or an upload that kv_gpu_ops_return frees. */
kv_status kv_gpu_ops_borrow(kv_gpu *g, const kv_span *span, bool want_v, kv_held **out);
/* Returns st, or what freeing found. held may be NULL. */
kv_status kv_gpu_ops_return(kv_status st, const kv_span *span, kv_held *held);
kv_status kv_gpu_ops_drop(kv_status st, kv_held *held); /* frees it, held or not */
/* Holds the span by its arrays on the device (kv_gpu_span_adopt), until kv_gpu_ops_drop of span->held. */
kv_status kv_gpu_ops_adopt(kv_gpu *g, kv_span *span, const kv_gpu_buffer *q, const kv_gpu_buffer *k,
                           const kv_gpu_buffer *v);
/* The rows of the dense sweep and its output, computed at the first call. */
kv_status kv_gpu_ops_dense_rows(kv_gpu *g, kv_held *held, int32_t sinks, int32_t window);
kv_status kv_gpu_ops_dense_output(kv_gpu *g, kv_held *held);

/* Attention of a held span under evict_at on the device; sinks, window and rerotate of `request` count. o, lse, lse_long as in
 * kv_masked, each may be NULL; recorded, with rerotate: lse_orig, which otherwise is lse. */
kv_status kv_gpu_ops_attend_masked(kv_gpu *g, const kv_span *span, const kv_held *held,
                                   const kv_masked_request *request, const kv_gpu_buffer *evict_at,
                                   kv_gpu_buffer *o, kv_gpu_buffer *lse, kv_gpu_buffer *lse_long,
                                   kv_gpu_buffer *recorded);

/* Host [rows][stride] words of 4 bytes -> a new device array [rows][n]. */
kv_status kv_gpu_ops_send(kv_gpu *g, const void *from, size_t rows, size_t n, size_t stride,
                          kv_gpu_buffer **to);
/* Device [rows][n] elements of `size` bytes -> host [rows][stride]; what lies between n and stride is left alone. */
kv_status kv_gpu_ops_fetch(const kv_gpu_buffer *from, size_t rows, size_t n, size_t stride,
                           size_t size, void *to);
/* Frees b[n]; returns st, or what freeing found. */
kv_status kv_gpu_ops_free(kv_status st, kv_gpu_buffer *const *b, size_t n);

/* cuBLAS: maps the library (any thread, no device needed); makes its handle. */
void kv_gpu_blas_map(void);
void kv_gpu_blas_warm(kv_gpu *g);

/* Entries of the table. */
kv_status kv_gpu_ops_hold(kv_span *span);
void kv_gpu_ops_release(kv_span *span);
kv_status kv_gpu_ops_dense(const kv_span *span, const kv_dense_request *request, kv_dense *out);
kv_status kv_gpu_ops_masked(const kv_span *span, const kv_masked_request *request, kv_masked *out);
kv_status kv_gpu_ops_attend(const kv_span *span, float *o, float *lse);
kv_status kv_gpu_ops_measure(const kv_run *run, const kv_metrics_item *item, kv_layer_sums *sums);
kv_status kv_gpu_ops_select(const kv_span *span, const kv_run *run, const float *priority,
                            int32_t *evict_at);
kv_status kv_gpu_ops_replay_attention(const kv_span *span, const kv_attention_rule *rule,
                                      int32_t budget, int32_t *evict_at);
kv_status kv_gpu_ops_step_mass(const kv_span *span, const kv_run *run, const kv_dense *dense,
                               double *step_mass);
kv_status kv_gpu_ops_norm_priorities(const kv_span *span, float *priority);
kv_status kv_gpu_ops_cosine_priorities(const kv_span *span, int32_t lead, float *priority);
kv_status kv_gpu_ops_gate_logits(const kv_policy_input *input, float *logit, int32_t *shift);
kv_status kv_gpu_ops_mlp_scores(const kv_policy_input *input, float *rhat);
kv_status kv_gpu_ops_mlstm_scores(const kv_policy_input *input, float *rhat);
kv_status kv_gpu_ops_linear(int32_t m, int32_t n, int32_t k, const float *a, kv_dtype w_type,
                            const void *w, float *c);
kv_status kv_gpu_ops_forward(const kv_model *model, const int32_t *token, const int32_t *position,
                             int32_t n_token, const kv_model_hooks *hooks);

#ifdef __cplusplus
}
#endif

#endif
