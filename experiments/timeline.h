/* timeline.csv: which share of the cells (query bin x token bin) is in the cache, the retained-set picture of a policy. Columns
 * policy,variant,budget,layer,kv_head,query_bin,token_bin,kept_share; bins are numbered along the whole trace; cells above the
 * diagonal are left out. */
#ifndef KV_EXPERIMENTS_TIMELINE_H
#define KV_EXPERIMENTS_TIMELINE_H

#include "experiments/plan.h"

enum { KV_TIMELINE_BINS = 64 };

typedef struct kv_timeline kv_timeline;

kv_status kv_timeline_open(const char *folder, const kv_plan *plan, const kv_trace_info *trace,
                           kv_timeline **out);
/* One document of the current layer under row `row` of the plan. evict_at [n_kv_head][stride] */
void kv_timeline_add(kv_timeline *t, size_t row, const kv_span *span, const int32_t *evict_at);
kv_status kv_timeline_write_layer(kv_timeline *t, int32_t layer_id); /* and starts the next one */
kv_status kv_timeline_close(kv_timeline *t); /* KV_E_IO when writing failed */

#endif
