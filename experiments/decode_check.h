/* --decode: a row is also carried out token by token over a slot cache that is really allocated, and compared with its mask. */
#ifndef KV_EXPERIMENTS_DECODE_CHECK_H
#define KV_EXPERIMENTS_DECODE_CHECK_H

#include "experiments/plan.h"

/* Whether the row can decode at all: causal, a policy with a cache, scores that do not come from the trace. */
bool kv_decodes(const kv_row *row);

/* One document of one layer: decodes it, compares the decisions with evict_at [n_kv_head][stride] exactly and the outputs with
 * o [n_q_head][stride][head_dim] of masked attention (NULL: not compared) within fp32 rounding. *bytes: K and V slots that were
 * allocated, at element_size bytes an element; 0 when this variant of the policy sees the future. KV_E_INTERNAL names the first
 * difference. */
kv_status kv_decode_check(const kv_row *row, const kv_policy_input *input, int32_t element_size,
                          const int32_t *evict_at, const float *o, double *bytes);

#endif
