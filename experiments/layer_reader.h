/* Reads the layers of a trace ahead of the work, on a thread of its own, so that decoding overlaps with what a GPU computes. */
#ifndef KV_EXPERIMENTS_LAYER_READER_H
#define KV_EXPERIMENTS_LAYER_READER_H

#include "traces/trace.h"

typedef struct kv_layer_reader kv_layer_reader;

/* Starts at layer 0; at most `ahead` layers (>= 1) wait to be taken. The trace must outlive the reader. */
kv_status kv_layer_reader_open(kv_trace *trace, bool want_hidden, int32_t ahead,
                               kv_layer_reader **out);
/* The next layer, as kv_trace_read_layer gives it; the caller frees it. */
kv_status kv_layer_reader_next(kv_layer_reader *r, kv_trace_layer *out);
void kv_layer_reader_close(kv_layer_reader *r); /* at any time; NULL is legal */

#endif
