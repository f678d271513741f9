/* From static priorities to evict_at: ranks, running cutoffs, the kept set as an interval in time (maths.md 3.3-3.7). */
#ifndef KV_SELECT_H
#define KV_SELECT_H

#include "policies/policy.h"

/* Total order: larger priority first, equal priority smaller t first. rank[t] and at[rank] are permutations of 0..n-1.
 * KV_E_DATA on NaN (names the position). */
kv_status kv_rank(const float *priority, int32_t n, int32_t *rank, int32_t *at);

/* Running cutoff by the bitmap pointer (maths.md 3.6). evict_at [n], tau [n] or NULL: cutoff rank at every q, n while every
 * eligible token is kept. k = 0 is handled (evict_at[t] = t + window; tau is -1: no rank is kept). */
kv_status kv_cutoff_pointer(const int32_t *rank, const int32_t *at, int32_t n, int32_t sinks,
                            int32_t window, int32_t k, int32_t *evict_at, int32_t *tau);
/* The same tau by Algorithm 2 of the paper (Fenwick tree, maths.md 3.5); k >= 1. */
kv_status kv_cutoff_fenwick(const int32_t *rank, int32_t n, int32_t sinks, int32_t window,
                            int32_t k, int32_t *tau);

/* All KV heads of a span: priority [n_kv_head][stride] -> evict_at [n_kv_head][stride], KV_NEVER where the token stays. */
kv_status kv_select(const kv_span *span, const kv_run *run, const float *priority,
                    int32_t *evict_at);

#endif
