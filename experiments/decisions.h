/* Keep/drop decisions of a learned policy against its own target (maths.md 10.2 c): at every query that evicts, does the policy rank
 * the token that leaves the window against the target's worst kept token as the target does? */
#ifndef KV_EXPERIMENTS_DECISIONS_H
#define KV_EXPERIMENTS_DECISIONS_H

#include "policies/policy.h"

typedef struct kv_decisions { /* by what the target does: [0] drops the newcomer, [1] keeps it */
    int64_t n[2], right[2];
} kv_decisions;

/* One document of one layer, queries u >= B, all KV heads; pairs of a token with itself do not count. target, priority
 * [n_kv_head][stride]: the target r before its decay, and the policy's static priorities; log_gamma [n_kv_head] the decay.
 * KV_E_DATA on a NaN target. */
kv_status kv_decisions_add(kv_decisions *d, const kv_span *span, const kv_run *run,
                           const float *target, const double *log_gamma, const float *priority);

/* Share of right decisions, and the mean of the two classes' shares; NAN when there is none, or a class is empty. */
double kv_decisions_plain(const kv_decisions *d);
double kv_decisions_balanced(const kv_decisions *d);

#endif
