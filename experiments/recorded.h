/* What a row reads of the recording beside its tokens: gates of dms, scores of kvpop:scores=trace, decisions of file. The replay gets
 * it layer by layer with q, k, v; accuracy, where the model forms its own q, k, v, reads it here. */
#ifndef KV_EXPERIMENTS_RECORDED_H
#define KV_EXPERIMENTS_RECORDED_H

#include "experiments/plan.h"
#include "traces/trace.h"

/* [layer of the trace] arrays of [n_kv_head][n_token], delta [layer][n_kv_head]; NULL where the row does not read them. */
typedef struct kv_recorded {
    int32_t n_layer;
    float **gate, **score;
    double *delta;
} kv_recorded;

/* Decides by the recording instead of by weights or by q, k, v. */
bool kv_row_reads_recording(const kv_row *row);

/* Of a row that reads it. KV_E_NOINPUT, KV_E_DATA: missing or not finite. */
kv_status kv_recorded_read(kv_trace *trace, const kv_row *row, kv_recorded *out);
/* What belongs to the document of `span` (layer_index, first), as arrays [n_kv_head][stride of the span], owned; NULL: not read. */
kv_status kv_recorded_cut(const kv_recorded *r, const kv_trace_info *trace, const kv_span *span,
                          float **gate, float **score);
void kv_recorded_free(kv_recorded *r);

#endif
