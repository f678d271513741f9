/* The scorer of one KV head, straight from maths.md 5, 6.1-6.4 and 6.11 in the parallel, unstabilised form: all pairs, double. */
#ifndef KV_NAIVE_SCORER_H
#define KV_NAIVE_SCORER_H

#include "reference/scorer_net.h"

/* param in the order of kv_net_part; rhat [n_token]. Output biases b and b2 of maths.md do not exist (contract.md 2). */
void naive_scorer(const kv_net_spec *spec, const double *param, const kv_net_input_f64 *in,
                  double *rhat);

/* Gradient of sum_t e_t rhat_t by central differences. grad [n_param] */
void naive_scorer_gradient(const kv_net_spec *spec, const double *param, const kv_net_input_f64 *in,
                           const double *e, double *grad);

#endif
