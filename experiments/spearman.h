/* Spearman's rank correlation. */
#ifndef KV_EXPERIMENTS_SPEARMAN_H
#define KV_EXPERIMENTS_SPEARMAN_H

#include <stddef.h>

#include "reference/core/status.h"

/* Pearson correlation of the ranks of x[n] and y[n]; equal values share the mean of their ranks. NAN where it is undefined: fewer
 * than two points, or all values of x or of y equal. x and y must not hold NaN. KV_E_INTERNAL when memory is short. */
kv_status kv_spearman(const double *x, const double *y, size_t n, double *rho);

#endif
