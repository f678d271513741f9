/* The step-by-step cache of contract.md 1 and 2 in double precision: one query at a time, nothing reused between queries. */
#ifndef KV_NAIVE_REPLAY_H
#define KV_NAIVE_REPLAY_H

#include "policies/policy.h"

/* l(u,t) of query head i (contract.md 3, maths.md 2.1). */
double naive_logit(const kv_span *span, int32_t i, int32_t u, int32_t t);

/* Softmax of query u of head i over the keys with held[t] (t <= u). p [u + 1]; below 2^-126 counts as 0. Returns the natural
 * log-sum-exp. */
double naive_softmax(const kv_span *span, int32_t i, int32_t u, const uint8_t *held, double *p);

/* Attend-then-evict under `rule`. evict_at [n_kv_head][stride] */
void naive_closed_loop(const kv_span *span, const kv_attention_rule *rule, int32_t budget,
                       int32_t *evict_at);

/* Evict-then-attend by a static priority: at query u, if more than B keys are held, the worst of E(u) that is held leaves.
 * priority, evict_at [n_kv_head][stride] */
void naive_priority_loop(const kv_span *span, const kv_run *run, const float *priority,
                         int32_t *evict_at);

/* m_t of the oracle (maths.md 2.1, 2.6): group maximum, or mean, of the mean future p^power. m [n_kv_head][stride] */
void naive_future_mass(const kv_span *span, int32_t window, double power, bool mean, double *m);

/* The oracle of contract.md 2. evict_at [n_kv_head][stride] */
void naive_oracle(const kv_span *span, const kv_run *run, double power, int32_t *evict_at);

#endif
