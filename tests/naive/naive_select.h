/* Selection and decisions by definition, one query at a time (maths.md 1, 3.1, 3.4; contract.md 2). */
#ifndef KV_NAIVE_SELECT_H
#define KV_NAIVE_SELECT_H

#include "policies/policy.h"

/* Whether query q sees token t: sink, window, or fewer than k eligible tokens precede t in the order of maths.md 3.4. */
bool naive_keep(const float *priority, const kv_run *run, int32_t q, int32_t t);

/* First query from t on that does not see t, KV_NEVER if there is none. evict_at [n] */
void naive_evict_at(const float *priority, const kv_run *run, int32_t n, int32_t *evict_at);

/* Rank of t among all n tokens, and the rank of the k-th best of E(q), n if E(q) has fewer. */
int32_t naive_rank(const float *priority, int32_t n, int32_t t);
int32_t naive_tau(const float *priority, const kv_run *run, int32_t n, int32_t q);

/* Group mean of the dense p(u->t) of KV head h. mass [n_token][n_token], row u, 0 for t > u */
void naive_group_mass(const kv_span *span, int32_t h, double *mass);

/* Mass retained by query u >= budget on average over those queries: sum over t <= u < evict_at[t] (contract.md 3). evict_at
 * [n_token] of one KV head */
double naive_retained(const double *mass, int32_t n, int32_t budget, const int32_t *evict_at);

/* oracle_step: sinks, window and the k best of E(u) by mass[u][.], at each u. */
double naive_step_bound(const double *mass, int32_t n, const kv_run *run);

/* Least total cost of a choice of distinct columns, one per row, by trying all. INFINITY if there is none. */
double naive_assign(const double *cost, int32_t n_row, int32_t n_column);

/* Scores of contract.md 2 in double: -|k_t|, and -cos(k_t, a_t). */
double naive_knorm(const kv_span *span, int32_t h, int32_t t);
double naive_keydiff(const kv_span *span, int32_t window, bool all, int32_t h, int32_t t);

/* Attention output of query head i at u over t <= u < evict_at[h][t]. o [head_dim] */
void naive_masked_output(const kv_span *span, const int32_t *evict_at, int32_t i, int32_t u,
                         double *o);

#endif
