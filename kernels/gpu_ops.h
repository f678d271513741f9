/* Inside of the device table over host arrays: the device under its lock, copies, the entries that have their own file. */
#ifndef KV_KERNELS_GPU_OPS_H
#define KV_KERNELS_GPU_OPS_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The device of kv_gpu_ops, locked for this thread until kv_gpu_ops_leave. Not recursive: leave before calling the table. */
kv_gpu *kv_gpu_ops_enter(void);
void kv_gpu_ops_leave(void);

/* Inside the lock. Host [rows][stride] words of 4 bytes -> a new device array [rows][n]. */
kv_status kv_gpu_ops_send(const void *from, size_t rows, size_t n, size_t stride,
                          kv_gpu_buffer **to);
/* Frees b[n]; returns st, or what freeing found. */
kv_status kv_gpu_ops_free(kv_status st, kv_gpu_buffer *const *b, size_t n);

/* Entries of the table. */
kv_status kv_gpu_ops_select(const kv_span *span, const kv_run *run, const float *priority,
                            int32_t *evict_at);
kv_status kv_gpu_ops_replay_attention(const kv_span *span, const kv_attention_rule *rule,
                                      int32_t budget, int32_t *evict_at);
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
