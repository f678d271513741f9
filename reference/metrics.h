/* Every number of contract.md 3 except accuracy, from evict_at and the dense results, one document of one layer at a time.
 *
 * Use: kv_metrics_open once per (policy, budget); kv_metrics_add for every document of every layer; kv_metrics_finish. Calls for
 * different layers may run at the same time; the documents of a layer come one after the other, in order. Sums over
 * counted queries are in double; documents and requests are pooled with equal weight per query. Undefined values are NAN here and
 * null in the files. */
#ifndef KV_METRICS_H
#define KV_METRICS_H

#include "reference/attention.h"
#include "reference/ops.h"

typedef struct kv_metrics kv_metrics;

enum { KV_KINDS = 256 };

/* Arrays [n_layer][n_kv_head] or [n_layer] or [n_layer][n_q_head], owned by the result. */
typedef struct kv_metrics_result {
    int64_t n_counted; /* counted queries (u >= B), pooled over documents */
    double recall_mean, recall_chance, recall_adjusted, recall_own, long_kept_mean;
    double retained_mass, retained_mass_long, retrieval_hit, future_mass_ratio, output_error;
    double kept_mean, cache_bytes;
    int64_t kept_max, n_retrieval;
    double recall_by_kind[KV_KINDS]; /* NAN where the denominator is 0 */
    double *recall, *chance, *own, *ratio, *kept, *adjusted, *long_kept; /* [n_layer][n_kv_head] */
    double *mass, *mass_long, *error;                                    /* [n_layer][n_q_head] */
    int64_t *hits, *retrievals;                                          /* [n_layer][n_q_head] */
    double *mass_by_layer, *hit_by_layer, *error_by_layer, *kept_by_layer; /* [n_layer] */
} kv_metrics_result;

typedef struct kv_metrics_shape {
    int32_t n_layer, n_q_head, n_kv_head, head_dim;
    int32_t element_size; /* bytes of a stored k or v element, for cache_bytes */
} kv_metrics_shape;

kv_status kv_metrics_open(const kv_metrics_shape *shape, const kv_run *run, kv_metrics **out);

/* One document of one layer. dense: power 1 at least, output, events (a resident device needs the columns alone and finds the rest
 * itself). evict_at, evict_oracle [n_kv_head][stride]: the policy's and the power-1 oracle's decisions; evict_own: recall_own's
 * reference or NULL. kind [n_token] of the document or NULL. masked: o, lse, lse_long (lse_orig with rerotate) under evict_at, or
 * NULL: they are computed and forgotten. ops: who computes; NULL: the CPU. */
typedef struct kv_metrics_item {
    const kv_span *span;
    const kv_dense *dense;
    const kv_masked *masked;
    const int32_t *evict_at, *evict_oracle, *evict_own;
    const uint8_t *kind;
    bool rerotate; /* as in kv_masked_request, where masked is NULL */
    const kv_ops *ops;
} kv_metrics_item;
kv_status kv_metrics_add(kv_metrics *m, const kv_metrics_item *item);

/* The CPU's kv_ops.measure: adds the sums of one document over its counted queries to `sums` (metrics_sums.h). */
struct kv_layer_sums;
kv_status kv_metrics_measure(const kv_run *run, const kv_metrics_item *item,
                             struct kv_layer_sums *sums);

/* oracle_step (contract.md 2): only retained mass. step_mass [n_kv_head][stride]: mass of each query under the step oracle. */
kv_status kv_oracle_step_mass(const kv_span *span, const kv_run *run, const kv_dense *dense,
                              double *step_mass);
kv_status kv_metrics_add_step(kv_metrics *m, const kv_span *span, const double *step_mass);

kv_status kv_metrics_finish(kv_metrics *m, kv_metrics_result *out);
void kv_metrics_free(kv_metrics *m);
void kv_metrics_result_free(kv_metrics_result *r);

#endif
