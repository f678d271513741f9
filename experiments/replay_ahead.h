/* Closed-loop replay of several layers at a time. A rule that is shared by all heads of a layer (tova, cumulative) is one chain of
 * dependent steps: threads can only share the layers, the documents and the rows. */
#ifndef KV_EXPERIMENTS_REPLAY_AHEAD_H
#define KV_EXPERIMENTS_REPLAY_AHEAD_H

#include "experiments/plan.h"
#include "reference/ops.h"

/* Layers at a time. Two keep memory the same for any depth and any number of threads. */
enum { KV_AHEAD_LAYERS = 2 };

typedef struct kv_ahead kv_ahead;

/* *out is NULL where nothing is gained: no row with an attention rule, one thread, or another device than the CPU. */
kv_status kv_ahead_open(const kv_plan *plan, kv_trace *trace, const kv_ops *ops, kv_ahead **out);

/* Replays the attention rows over all documents of `n_layer` <= KV_AHEAD_LAYERS layers from index `first` on. seconds [n_row] of the
 * plan grow by each row's share of the time. A replay that fails is left out: who asks for it runs it again and gets the message. */
kv_status kv_ahead_run(kv_ahead *a, const kv_trace_layer *layer, int32_t first, int32_t n_layer,
                       double *const *seconds);

/* evict_at [n_kv_head][span->stride] of row `row` over this span, NULL when it is not known. */
const int32_t *kv_ahead_find(const kv_ahead *a, size_t row, const kv_span *span);

void kv_ahead_free(kv_ahead *a);

#endif
