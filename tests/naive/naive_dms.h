/* Attention under the soft mask of dms, one query head, straight from maths.md 7.3: double, all pairs. */
#ifndef KV_NAIVE_DMS_H
#define KV_NAIVE_DMS_H

#include "reference/dms.h"

/* o [n][dim] */
void naive_dms_attention(const kv_dms_head_f64 *head, double *o);

#endif
