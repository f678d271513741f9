/* The main job: trace x policies x budgets -> every number of contract.md 3.
 *
 * Layers are outermost, so that memory holds one layer whatever the depth; then documents; then policies and budgets. What does not
 * depend on the policy (dense attention, targets, retrieval events) is computed once per layer and document, and kept on disk. */
#ifndef KV_EXPERIMENTS_EXPERIMENT_H
#define KV_EXPERIMENTS_EXPERIMENT_H

#include "experiments/decisions.h"
#include "experiments/layer_reader.h"
#include "experiments/plan.h"
#include "reference/metrics.h"
#include "reference/ops.h"

typedef struct kv_row_result {
    kv_metrics_result metrics; /* all zero for an accuracy-only run */
    kv_decisions decisions;    /* learned policies: against their own target */
    double seconds;            /* replay, masked attention, metrics, decoding of this row */
    /* by decoding: sum over layers, each at its largest document; 0: not decoded */
    double cache_bytes_allocated;
    int32_t *evict_at; /* [n_layer][n_kv_head][n_token], only on request; absolute positions */
} kv_row_result;

typedef struct kv_experiment {
    kv_trace *trace;
    /* its layers, from the first on; NULL: they are read when their turn comes */
    kv_layer_reader *reader;
    const kv_plan *plan;
    const kv_ops *ops;
    const char *cache_folder;    /* of dense results, NULL: none */
    const char *timeline_folder; /* gets timeline.csv and the tables of pattern.h, NULL: none */
    bool keep_evict_at;
    bool decode; /* also decode every causal row over a real cache and compare (decode_check.h) */
    double read_seconds, dense_seconds; /* out: waiting for layers; the policy-independent part */
} kv_experiment;

/* Whether a row may look at hidden states, and the trace has them. */
bool kv_plan_reads_hidden(const kv_plan *plan, const kv_trace_info *trace);

/* result [plan->n_row], owned by the caller even on failure (kv_row_result_free). */
kv_status kv_experiment_run(kv_experiment *e, kv_row_result *result);
void kv_row_result_free(kv_row_result *r);

/* True when the row's keys are re-rotated by their index in the cache (streaming:pos=cache). */
bool kv_row_rerotates(const kv_row *row);

/* metrics.cache_bytes and dense_bytes count elements of the trace's storage type. */
double kv_dense_bytes(const kv_trace_info *trace);

#endif
