/* kvpop_mlp: a small network per KV head scores every token from its cached key and value (KVpop's stateless scorer; maths.md 5,
 * contract.md 2). */
#include "policies/policy.h"
#include "reference/core/num.h"
#include "reference/ops.h"
#include "reference/scorer.h"

static kv_status priority(const kv_policy_input *input, float *out) {
    return kv_scorer_priority(input, input->ops->mlp_scores, out);
}

static kv_status open(const kv_policy_input *input, void **state) {
    return kv_scorer_stream_open(input, "kvpop_mlp", state);
}

static const kv_stream_hooks stream = {
    open,
    kv_scorer_stream_push,
    kv_scorer_stream_priority,
    kv_scorer_stream_close,
};

const kv_policy kv_policy_kvpop_mlp = {
    .name = "kvpop_mlp",
    .summary = "learned score from the token's key and value (two-layer network per KV head)",
    .source = "KVpop arXiv 2607.05061, MLP scorer; maths.md 5",
    .kind = KV_PRIORITY,
    .learned = true,
    .priority = priority,
    .stream = &stream,
    .own_target = kv_scorer_target,
};
