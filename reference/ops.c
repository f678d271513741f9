/* The CPU's device table. */
#include "reference/ops.h"

#include "reference/replay.h"
#include "reference/scorer.h"

const kv_ops kv_ops_cpu = {
    .name = "cpu",
    .dense = kv_dense_compute,
    .masked = kv_masked_compute,
    .attend = kv_attend,
    .select = kv_select,
    .replay_attention = kv_replay_attention,
    .mlp_scores = kv_mlp_scores,
    .mlstm_scores = kv_mlstm_scores,
    .linear = kv_linear,
};
