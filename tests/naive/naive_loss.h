/* Boundary loss of one KV head over one document, straight from maths.md 4: the kept set is sorted anew at every query. */
#ifndef KV_NAIVE_LOSS_H
#define KV_NAIVE_LOSS_H

#include "reference/loss_boundary.h"

typedef struct naive_loss_count {
    int keep, drop, same;
} naive_loss_count;

/* r, rhat [n]; teacher and student log gamma; query [n_query]. count may be NULL. */
double naive_boundary_loss(const double *r, const double *rhat, int32_t n, const kv_run *run,
                           double teacher, double student, const kv_loss_options *o,
                           const int32_t *query, int32_t n_query, naive_loss_count *count);

#endif
