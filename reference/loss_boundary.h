/* Boundary loss (KVpop; maths.md 4): at every query the newcomer is compared with the worst key that the teacher's ranking keeps. */
#ifndef KV_LOSS_BOUNDARY_H
#define KV_LOSS_BOUNDARY_H

#include "policies/policy.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kv_loss_options {
    double margin; /* target margins below it weigh less; 0: all pairs weigh the same */
    double temp;
    bool balance;   /* keep and drop pairs weigh the same in sum */
    int32_t sample; /* queries per document, one from each of as many equal bins; 0: every one */
    int32_t tail;   /* last queries of a document that are left out: their targets are noisy */
} kv_loss_options;

extern const kv_loss_options kv_loss_defaults; /* contract.md 2 */

typedef struct kv_pair {
    int32_t fresh, bound; /* newcomer and worst kept token */
    bool keep;            /* the teacher keeps the newcomer */
    double margin;        /* of the teacher, >= 0; 0 when both are the same token */
} kv_pair;

/* Queries of one document of n tokens that give pairs: [budget, n - tail), ascending. `step` and `document` address the random draws.
 * query [n]; returns how many. */
int32_t kv_boundary_queries(int32_t n, const kv_run *run, const kv_loss_options *o, uint64_t seed,
                            int32_t step, int32_t document, int32_t *query);

/* The pairs of these queries on one KV head of a document: r [n] is the target, log_gamma the teacher's decay. Tokens get `offset`
 * added. pair [n_query]. KV_E_DATA on a NaN target. */
kv_status kv_boundary_pairs(const float *r, int32_t n, const kv_run *run, double log_gamma,
                            const int32_t *query, int32_t n_query, int32_t offset, kv_pair *pair);

typedef struct kv_loss {
    double loss;      /* 0 when no pair has weight */
    double log_gamma; /* gradient by log gamma of the student */
    double right; /* share of the pairs with a margin that the student decides like the teacher */
    double keep;  /* share of these that the teacher keeps */
    int64_t n;    /* their number */
} kv_loss;

/* One KV head, all pairs of a minibatch. rhat [tokens]; d_rhat [tokens] is set to dL/drhat. */
kv_loss kv_boundary_loss(const kv_pair *pair, int32_t n_pair, const kv_loss_options *o,
                         const double *rhat, int64_t n_token, double log_gamma, double *d_rhat);

#ifdef __cplusplus
}
#endif

#endif
