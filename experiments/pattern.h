/* What a policy evicts: three tables of a run, taken from evict_at (maths.md 10.3, 10.5; figures 6 and 8 of the KVpop paper).
 *
 *   pattern.csv      policy,variant,budget,layer,token,kind,kept_heads
 *                    how many KV heads hold the token at the last query; the last 112 tokens that a policy could have evicted by
 *                    then, t = S-w-112 … S-w-1, of the longest document (the first of them); `token` counts from its start
 *   evict_kind.csv   policy,variant,budget,tokens,kind,n_token,evict_rate,base_rate
 *                    share of the cells (token, layer, KV head) evicted by the last query, for one kind of token and (base_rate) for
 *                    all kinds; tokens: `last` those of pattern.csv, `all` every t = s … S-w-1 of that document
 *   evict_ratio.csv  policy,variant,budget,layer,kv_head,evict_ratio
 *                    share of the tokens t <= S-w-1 evicted by the last query, documents pooled: 0 dense, 1 the window alone;
 *                    of priority policies t >= s only, for they always keep the sinks
 *
 * Without token kinds in the trace `kind` is empty and evict_kind.csv has no rows. */
#ifndef KV_EXPERIMENTS_PATTERN_H
#define KV_EXPERIMENTS_PATTERN_H

#include "experiments/plan.h"

enum { KV_PATTERN_TOKENS = 112 };

typedef struct kv_pattern kv_pattern;

/* The plan and the trace must outlive it. KV_E_CANTCREATE names the table. */
kv_status kv_pattern_open(const char *folder, const kv_plan *plan, const kv_trace_info *trace,
                          kv_pattern **out);
/* One document of the current layer under row `row` of the plan. evict_at [n_kv_head][stride] */
void kv_pattern_add(kv_pattern *p, size_t row, const kv_span *span, const int32_t *evict_at);
void kv_pattern_write_layer(kv_pattern *p, int32_t layer_id); /* and starts the next one */
kv_status kv_pattern_close(kv_pattern *p); /* writes the rates; KV_E_IO when writing failed */

#endif
