/* Minimum-cost assignment (Hungarian method by shortest augmenting paths). */
#ifndef KV_ASSIGNMENT_H
#define KV_ASSIGNMENT_H

#include <stdint.h>

#include "reference/core/status.h"

/* cost [n_row][n_column], n_row <= n_column, INFINITY where a pair is not allowed. column_of [n_row] are distinct columns of least
 * total cost. KV_E_INTERNAL if some row cannot be served. O(n_row^2 * n_column). */
kv_status kv_assign(const double *cost, int32_t n_row, int32_t n_column, int32_t *column_of);

#endif
