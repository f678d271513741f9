/* full: nothing is ever evicted; the dense cache that every policy is compared with. The budget does not act. */
#include "policies/policy.h"

static kv_status decide(const kv_policy_input *input, int32_t *evict_at) {
    const kv_span *span = input->span;
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) evict_at[h * span->stride + t] = KV_NEVER;
    return KV_OK;
}

const kv_policy kv_policy_full = {
    .name = "full",
    .summary = "keeps everything (dense attention)",
    .source = "contract.md 1",
    .kind = KV_PRIORITY,
    .decide = decide,
};
