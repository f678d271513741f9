/* h2o: heavy hitters by accumulated attention, the newest share of the budget protected; per KV head. Source: FMInference/H2O
 * h2o_hf/utils_real_drop/modify_llama.py; contract.md 2. */
#include "policies/policy.h"

#include <math.h>

static const kv_param params[] = {
    {.name = "recent_share",
     .help = "share of the budget held by the newest tokens, rounded down",
     .type = KV_PARAM_REAL,
     .default_value = 0.5,
     .min = 0,
     .max = 1},
    {.name = "reduce",
     .help = "reduction of the attention over the query heads of a group",
     .type = KV_PARAM_CHOICE,
     .choices = "sum|mean|max"},
    {0}};

static kv_status rule(const kv_policy_input *input, kv_attention_rule *out) {
    static const kv_reduce reduce[] = {KV_REDUCE_SUM, KV_REDUCE_MEAN, KV_REDUCE_MAX};
    double recent = floor(input->run->budget * kv_params_real(input->params, "recent_share"));
    *out = (kv_attention_rule){.per_layer = false,
                               .reduce = reduce[kv_params_int(input->params, "reduce")],
                               .decay = 1,
                               .protect_recent = (int32_t)recent};
    return KV_OK;
}

const kv_policy kv_policy_h2o = {
    .name = "h2o",
    .summary = "heavy hitters by accumulated attention, newest share protected",
    .source = "FMInference/H2O; contract.md 2",
    .kind = KV_ATTENTION,
    .params = params,
    .rule = rule,
};
