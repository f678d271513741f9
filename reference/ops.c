/* The CPU's device table. */
#include "reference/ops.h"

#include "reference/dms.h"
#include "reference/metrics.h"
#include "reference/priority.h"
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
    .step_mass = kv_oracle_step_mass,
    .select = kv_select,
    .replay_attention = kv_replay_attention,
    .norm_priorities = kv_norm_priorities,
    .cosine_priorities = kv_cosine_priorities,
    .mlp_scores = kv_mlp_scores,
    .mlstm_scores = kv_mlstm_scores,
    .gate_logits = kv_dms_gate,
    .linear = kv_linear,
};
