/* Replay: any policy on one document of one layer -> evict_at; and the token-by-token form over slots. */
#ifndef KV_REPLAY_H
#define KV_REPLAY_H

#include "policies/policy.h"

/* evict_at [n_kv_head][stride]. Applies the kind's shared code through input->ops, checks evict_at >= t+1 and turns values past the
 * document's end into KV_NEVER (contract.md 1). Refuses what kv_replay_check refuses. */
kv_status kv_replay(const kv_policy *policy, const kv_policy_input *input, int32_t *evict_at);

/* The same, and the static priorities that a priority policy decided by: priority [n_kv_head][stride] (NULL: not wanted). Other
 * kinds leave it alone. */
kv_status kv_replay_priority(const kv_policy *policy, const kv_policy_input *input, float *priority,
                             int32_t *evict_at);

/* B >= sinks + window, window >= 1, B >= 1, sinks >= 0; KV_E_USAGE names the options. */
kv_status kv_run_check(const kv_run *run);

/* Closed loop over slots (contract.md 1, attend-then-evict). */
kv_status kv_replay_attention(const kv_span *span, const kv_attention_rule *rule, int32_t budget,
                              int32_t *evict_at);

/* Delayed removal of marked tokens: evict_at[t] = t + window where leaves[t] (dms). */
kv_status kv_replay_gate(const kv_span *span, int32_t window, const uint8_t *leaves,
                         int32_t *evict_at);

/* What kv_replay and kv_stream refuse before any work: kv_run_check, bounds without a cache, documents above max_token.
 * KV_E_USAGE. */
kv_status kv_replay_check(const kv_policy *policy, const kv_policy_input *input);

/* Token-by-token decoding over slots: the same evict_at as kv_replay for causal policies, plus what the cache really allocated.
 * bytes_allocated counts K and V slots of this layer at `element_size` bytes an element. KV_E_USAGE for policies that see the
 * future. */
kv_status kv_stream(const kv_policy *policy, const kv_policy_input *input, int32_t element_size,
                    int32_t *evict_at, uint64_t *bytes_allocated);

/* Same, and every query attends over the slots that are held: o [n_q_head][stride][head_dim] (NULL: not wanted), original
 * rotation. */
kv_status kv_stream_attend(const kv_policy *policy, const kv_policy_input *input,
                           int32_t element_size, int32_t *evict_at, uint64_t *bytes_allocated,
                           float *o);

#endif
