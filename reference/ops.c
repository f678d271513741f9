/* The CPU's device table. */
#include "reference/ops.h"

#include "reference/metrics.h"
#include "reference/replay.h"
#include "reference/scorer.h"

static kv_status hold(kv_span *span) {
    span->held = NULL;
    return KV_OK;
}

static void release(kv_span *span) { (void)span; }

const kv_ops kv_ops_cpu = {
    .name = "cpu",
    .hold = hold,
    .release = release,
    .dense = kv_dense_compute,
    .masked = kv_masked_compute,
    .attend = kv_attend,
    .measure = kv_metrics_measure,
    .select = kv_select,
    .replay_attention = kv_replay_attention,
    .mlp_scores = kv_mlp_scores,
    .mlstm_scores = kv_mlstm_scores,
    .linear = kv_linear,
};
