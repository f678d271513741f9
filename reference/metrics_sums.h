/* Sums behind the metrics: what kv_ops.measure adds to. Those of one layer are touched by calls for that layer only. */
#ifndef KV_METRICS_SUMS_H
#define KV_METRICS_SUMS_H

#include "reference/metrics.h"

/* Over counted queries unless said otherwise; common, own, kept and long_kept are sums of set sizes. */
typedef struct kv_head_sums {
    int64_t common; /* |KT n KS| */
    int64_t own;    /* |KT' n KS|, KT' by the policy's own target */
    int64_t kept;
    int64_t kept_max;  /* over all queries */
    int64_t long_kept; /* |KS| */
    double chance;     /* |KS| / n(u) */
    double ratio;      /* sum_KS m / sum_KT m */
} kv_head_sums;

typedef struct kv_query_sums {
    double mass, long_kept, long_all; /* sum over u of sum p: visible keys, KS, E(u) */
    double difference, output;        /* |o_S - o_D|^2, |o_D|^2 */
    int64_t hits, retrievals;
} kv_query_sums;

typedef struct kv_layer_sums {
    /* queries; this and the next two are counted by kv_metrics_add, not by measure */
    int64_t counted;
    int64_t decided; /* those that come with evict_at; 0 for a bound without a cache */
    bool has_own;
    int64_t kind_common[KV_KINDS], kind_all[KV_KINDS]; /* |KT n KS n kind|, |KT n kind| */
    kv_head_sums *head;                                /* [n_kv_head] */
    kv_query_sums *query;                              /* [n_q_head] */
} kv_layer_sums;

struct kv_metrics {
    kv_metrics_shape shape;
    kv_run run;
    kv_layer_sums *layer; /* [n_layer] */
};

/* The span fits the shape of the metrics; KV_E_INTERNAL otherwise. */
kv_status kv_metrics_check(const kv_metrics *m, const kv_span *span);

#endif
