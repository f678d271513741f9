/* cumulative: the least accumulated attention leaves; one set per layer, nothing protected, the newest key included. Source:
 * contract.md 2. */
#include "policies/policy.h"

static kv_status rule(const kv_policy_input *input, kv_attention_rule *out) {
    (void)input;
    *out = (kv_attention_rule){
        .per_layer = true, .reduce = KV_REDUCE_MEAN, .decay = 1, .protect_recent = 0};
    return KV_OK;
}

const kv_policy kv_policy_cumulative = {
    .name = "cumulative",
    .summary = "least accumulated attention of the layer leaves",
    .source = "contract.md 2",
    .kind = KV_ATTENTION,
    .rule = rule,
};
