/* Policy-independent dense results of a span, kept on disk between runs.
 *
 * A cached array is addressed by its content: XXH3-128 over q, k, v as they are used, shapes, scale, softcap, device, instruction
 * set and the sources that compute it, plus the settings that the array depends on (sinks and window for the retrieval events, window
 * and power for column sums, nothing else for lse and o). See cache.h. */
#ifndef KV_EXPERIMENTS_DENSE_CACHE_H
#define KV_EXPERIMENTS_DENSE_CACHE_H

#include "reference/ops.h"

/* Fills `out` as ops->dense would for `request` (request->lse must be NULL), from `folder` where possible; what had to be computed
 * is stored there. folder NULL: no cache. */
kv_status kv_dense_cached(const kv_ops *ops, const kv_span *span, const kv_dense_request *request,
                          const char *folder, kv_dense *out);

#endif
