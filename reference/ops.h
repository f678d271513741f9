/* The device table: one function per operation that an experiment spends time in. The CPU table holds the reference functions; the
 * GPU build starts from it and overrides entries (kernels/kernels.h), so a missing GPU operation is visible per operation. All
 * pointers are host pointers; a device may keep copies between calls. */
#ifndef KV_OPS_H
#define KV_OPS_H

#include "reference/attention.h"
#include "reference/model.h"
#include "reference/select.h"

struct kv_metrics_item; /* reference/metrics.h */
struct kv_layer_sums;   /* reference/metrics_sums.h */

typedef struct kv_ops {
    const char *name; /* "cpu" or "gpu" */
    /* Attention outputs stay on the device: measure does not need dense->o, and host copies of dense results gain nothing. */
    bool resident;
    /* Brings q, k, v of a span to the device, where they serve every operation on the span and its copies until release; the host
     * arrays must not change in between. On the CPU nothing happens. */
    kv_status (*hold)(kv_span *span);
    void (*release)(kv_span *span); /* a span that was never held is legal */
    kv_status (*dense)(const kv_span *span, const kv_dense_request *request, kv_dense *out);
    kv_status (*masked)(const kv_span *span, const kv_masked_request *request, kv_masked *out);
    kv_status (*attend)(const kv_span *span, float *o, float *lse);
    /* Sums behind the metrics of one document (kv_metrics_measure). */
    kv_status (*measure)(const kv_run *run, const struct kv_metrics_item *item,
                         struct kv_layer_sums *sums);
    /* oracle_step (kv_oracle_step_mass): step_mass [n_kv_head][stride]; dense: of the span, with lse. */
    kv_status (*step_mass)(const kv_span *span, const kv_run *run, const kv_dense *dense,
                           double *step_mass);
    kv_status (*select)(const kv_span *span, const kv_run *run, const float *priority,
                        int32_t *evict_at);
    kv_status (*replay_attention)(const kv_span *span, const kv_attention_rule *rule,
                                  int32_t budget, int32_t *evict_at);
    /* Policies knorm and keydiff (reference/priority.h): priority [n_kv_head][stride] of every token, the same bytes everywhere. */
    kv_status (*norm_priorities)(const kv_span *span, float *priority);
    kv_status (*cosine_priorities)(const kv_span *span, int32_t lead, float *priority);
    /* Scorers (reference/scorer.h): rhat [n_kv_head][stride] of every token of the span. */
    kv_status (*mlp_scores)(const kv_policy_input *input, float *rhat);
    kv_status (*mlstm_scores)(const kv_policy_input *input, float *rhat);
    /* Gates of dms from weights (kv_dms_gate). */
    kv_status (*gate_logits)(const kv_policy_input *input, float *logit, int32_t *shift);
    /* C[m][n] = A[m][k] * W[n][k]^T, row-major, W in its stored format (the model's weight products). */
    kv_status (*linear)(int32_t m, int32_t n, int32_t k, const float *a, kv_dtype w_type,
                        const void *w, float *c);
    /* The whole forward pass of a model (hooks->ops is this table); NULL: kv_model_forward goes through linear and attend. */
    kv_status (*forward)(const kv_model *model, const int32_t *token, const int32_t *position,
                         int32_t n_token, const kv_model_hooks *hooks);
} kv_ops;

extern const kv_ops kv_ops_cpu;

#endif
