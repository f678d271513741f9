/* --decode: a row is also carried out token by token over a slot cache that is really allocated, and compared with its mask. */
#ifndef KV_EXPERIMENTS_DECODE_CHECK_H
#define KV_EXPERIMENTS_DECODE_CHECK_H

#include "experiments/plan.h"

/* One document of one layer: decodes it, compares the decisions with evict_at [n_kv_head][stride] exactly and the outputs with those
 * of masked attention within fp32 rounding (pos=cache turns keys anew at every step, which slots do not: decisions only). *bytes: K
 * and V slots that were allocated, at element_size bytes an element; 0 for a row that cannot decode: it sees the future, has no
 * cache, or takes its scores from the trace. KV_E_INTERNAL names the first difference. */
kv_status kv_decode_check(const kv_row *row, const kv_policy_input *input, int32_t element_size,
                          const int32_t *evict_at, double *bytes);

#endif
