/* Future-attention targets from the dense sweep (maths.md 2, 2.6; contract.md 2 oracle). */
#ifndef KV_TARGET_H
#define KV_TARGET_H

#include "reference/attention.h"

/* m_t per KV head: mean over N_t = max(1, S-t-w) later queries of p^power (or the maximum), reduced over the group by max or mean.
 * m [n_kv_head][stride], double. KV_E_INTERNAL if the sweep lacks `power`. */
kv_status kv_target_mass(const kv_span *span, const kv_dense *dense, double power, bool mean,
                         double *m);

/* r_t = log(eps_power + m_t), rounded to fp32 once. eps_power: eps for power <= 2 and for max, else exp(power * log 1e-8)
 * (maths.md 2.6). r [n_kv_head][stride]. */
kv_status kv_target_log(const kv_span *span, const kv_dense *dense, double power, bool mean,
                        double eps, float *r);

/* Same, from input->dense when it has the power, else by a sweep through input->ops. */
kv_status kv_target_of(const kv_policy_input *input, double power, bool mean, float *r);

/* From the dense target to the sparse one (maths.md 2.4), in place: the normaliser takes in the keys alone that the dense target r
 * would keep at the run's budget under the decay log_gamma [n_kv_head]. */
kv_status kv_target_sparse(const kv_policy_input *input, double power, bool mean,
                           const double *log_gamma, float *r);

#endif
