/* contract.md 3 in double precision, one query at a time, every set written out. */
#ifndef KV_NAIVE_METRICS_H
#define KV_NAIVE_METRICS_H

#include "reference/metrics.h"

typedef struct naive_document {
    const kv_span *span;                                /* layer_index tells the layer */
    const int32_t *evict_at, *evict_oracle, *evict_own; /* [n_kv_head][stride]; evict_own or NULL */
    const uint8_t *kind;                                /* [n_token] or NULL */
} naive_document;

/* All documents of all layers, pooled. `out` is freed by kv_metrics_result_free. */
void naive_metrics(const naive_document *doc, int32_t n_doc, const kv_metrics_shape *shape,
                   const kv_run *run, kv_metrics_result *out);

/* Mass of sinks, window and the k best of E(u) by the group mean of p(u->.), for u >= B; 1 before. mass [n_kv_head][stride] */
void naive_step_mass(const kv_span *span, const kv_run *run, double *mass);

#endif
