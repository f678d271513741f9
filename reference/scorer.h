/* Learned scorers over one document of one layer (maths.md 5, 6; contract.md 2). Weights by name from input->weights.
 * rhat [n_kv_head][stride]: score of every token, before the decay term. */
#ifndef KV_SCORER_H
#define KV_SCORER_H

#include "policies/policy.h"

kv_status kv_mlp_scores(const kv_policy_input *input, float *rhat);
kv_status kv_mlstm_scores(const kv_policy_input *input, float *rhat);

#endif
