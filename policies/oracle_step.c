/* oracle_step: the bound that chooses the best keys anew at every query, evicted ones included. No cache reaches it, so it has no
 * evict_at; its retained mass is kv_oracle_step_mass (reference/metrics.h). Source: contract.md 2. */
#include "policies/policy.h"

const kv_policy kv_policy_oracle_step = {
    .name = "oracle_step",
    .summary = "best keys anew at each query: bound on retained mass",
    .source = "contract.md 2",
    .kind = KV_PRIORITY,
    .non_causal = true,
    .no_evict_at = true,
};
