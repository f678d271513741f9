/* Replay of a policy on one document of one layer: what the policy supplies becomes evict_at. Source: design.md "Three kinds of
 * policy", contract.md 1. */
#include "reference/replay.h"

#include <inttypes.h>
#include <stdlib.h>

#include "reference/core/mem.h"
#include "reference/ops.h"

kv_status kv_run_check(const kv_run *run) {
    if (run->sinks < 0)
        return KV_FAIL(KV_E_USAGE, "--sinks is %d; it must be at least 0", run->sinks);
    if (run->window < 1)
        return KV_FAIL(KV_E_USAGE, "--window is %d; it must be at least 1 (the query itself)",
                       run->window);
    if (run->budget < 1)
        return KV_FAIL(KV_E_USAGE, "--budget is %d; it must be at least 1", run->budget);
    if (run->budget < (int64_t)run->sinks + run->window)
        return KV_FAIL(KV_E_USAGE,
                       "--budget is %d, but --sinks %d and --window %d alone need %" PRId64
                       "; raise the budget or lower them",
                       run->budget, run->sinks, run->window, (int64_t)run->sinks + run->window);
    return KV_OK;
}

kv_status kv_replay_check(const kv_policy *policy, const kv_policy_input *input) {
    kv_status st = kv_run_check(input->run);
    if (st != KV_OK) return st;
    if (policy->no_evict_at)
        return KV_FAIL(KV_E_USAGE, "%s is a bound without a cache: it has no evict_at to replay",
                       policy->name);
    if (policy->max_token > 0 && input->span->n_token > policy->max_token)
        return KV_FAIL(KV_E_USAGE,
                       "%s accepts documents of at most %d tokens, document %d has %d; use a "
                       "shorter trace",
                       policy->name, policy->max_token, input->span->document,
                       input->span->n_token);
    return KV_OK;
}

kv_status kv_replay_gate(const kv_span *span, int32_t window, const uint8_t *leaves,
                         int32_t *evict_at) {
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) {
            int64_t i = h * span->stride + t;
            evict_at[i] = leaves[i] && t < span->n_token - window ? t + window : KV_NEVER;
        }
    return KV_OK;
}

static kv_status by_priority(const kv_policy *policy, const kv_policy_input *input, float *priority,
                             int32_t *evict_at) {
    kv_status st = KV_OK;
    const kv_span *span = input->span;
    float *own = NULL; /* [n_kv_head][stride] */
    if (!priority) {
        KV_NEW(own, span->n_kv_head * span->stride);
        priority = own;
    }
    KV_TRY(policy->priority(input, priority));
    KV_TRY(input->ops->select(span, input->run, priority, evict_at));
out:
    free(own);
    return st;
}

static kv_status by_gate(const kv_policy *policy, const kv_policy_input *input, float *priority,
                         int32_t *evict_at) {
    (void)priority;
    kv_status st = KV_OK;
    const kv_span *span = input->span;
    uint8_t *leaves = NULL; /* [n_kv_head][stride] */
    KV_NEW(leaves, span->n_kv_head * span->stride);
    KV_TRY(policy->gate(input, leaves));
    KV_TRY(kv_replay_gate(span, input->run->window, leaves, evict_at));
out:
    free(leaves);
    return st;
}

static kv_status by_attention(const kv_policy *policy, const kv_policy_input *input,
                              float *priority, int32_t *evict_at) {
    (void)priority;
    kv_attention_rule rule = {0};
    kv_status st = policy->rule(input, &rule);
    if (st != KV_OK) return st;
    return input->ops->replay_attention(input->span, &rule, input->run->budget, evict_at);
}

/* Values past the document's end become KV_NEVER, so that arrays compare byte by byte; a token that leaves before its own query
 * has been served is a defect of whoever decided. */
static kv_status canonicalise(const kv_policy *policy, const kv_span *span, int32_t *evict_at) {
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) {
            int32_t *e = &evict_at[h * span->stride + t];
            if (*e <= t)
                return KV_FAIL(KV_E_INTERNAL,
                               "%s evicts token %d of KV head %d, layer %d, at query %d; %d is the "
                               "earliest possible",
                               policy->name, t, h, span->layer_id, *e, t + 1);
            if (*e >= span->n_token) *e = KV_NEVER;
        }
    return KV_OK;
}

kv_status kv_replay(const kv_policy *policy, const kv_policy_input *input, int32_t *evict_at) {
    return kv_replay_priority(policy, input, NULL, evict_at);
}

kv_status kv_replay_priority(const kv_policy *policy, const kv_policy_input *input, float *priority,
                             int32_t *evict_at) {
    typedef kv_status by_kind(const kv_policy *, const kv_policy_input *, float *, int32_t *);
    static by_kind *const kind[] = {
        [KV_PRIORITY] = by_priority, [KV_GATE] = by_gate, [KV_ATTENTION] = by_attention};
    kv_status st = KV_OK;
    KV_TRY(kv_replay_check(policy, input));
    KV_TRY(policy->decide ? policy->decide(input, evict_at)
                          : kind[policy->kind](policy, input, priority, evict_at));
    KV_TRY(canonicalise(policy, input->span, evict_at));
out:
    return st;
}
