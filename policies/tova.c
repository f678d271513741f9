/* tova: the key that the newest query attends least leaves, the newest key included. Source: schwartz-lab-NLP/TOVA
 * src/tova_cache.py; contract.md 2. */
#include "policies/policy.h"

enum { LAYER, HEAD };

static const kv_param params[] = {{.name = "reduce",
                                   .help =
                                       "one set per layer (mean over all query heads) or per KV "
                                       "head (mean over its group)",
                                   .type = KV_PARAM_CHOICE,
                                   .choices = "layer|head"},
                                  {0}};

static kv_status rule(const kv_policy_input *input, kv_attention_rule *out) {
    *out = (kv_attention_rule){.per_layer = kv_params_int(input->params, "reduce") == LAYER,
                               .reduce = KV_REDUCE_MEAN,
                               .decay = 0,
                               .protect_recent = 0};
    return KV_OK;
}

const kv_policy kv_policy_tova = {
    .name = "tova",
    .summary = "least attended by the newest query leaves",
    .source = "schwartz-lab-NLP/TOVA; contract.md 2",
    .kind = KV_ATTENTION,
    .params = params,
    .rule = rule,
};
