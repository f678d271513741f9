/* A small deterministic trace in memory, and a way to write it: shared by the trace tests and the fuzz target. */
#ifndef KV_NAIVE_SMALL_TRACE_H
#define KV_NAIVE_SMALL_TRACE_H

#include "traces/trace.h"

enum { FX_LAYER = 2, FX_Q = 4, FX_KV = 2, FX_DIM = 8, FX_WIDTH = 12, FX_TOKEN = 300 };

typedef struct small_trace {
    kv_trace_spec spec;
    int32_t layer_id[FX_LAYER], token[FX_TOKEN], position[FX_TOKEN], doc_start[3];
    uint8_t kind[FX_TOKEN], scored[FX_TOKEN];
    double inv_freq[FX_DIM / 2];
    float q[FX_LAYER][FX_Q][FX_TOKEN][FX_DIM], k[FX_LAYER][FX_KV][FX_TOKEN][FX_DIM],
        v[FX_LAYER][FX_KV][FX_TOKEN][FX_DIM];
    float hidden[FX_LAYER][FX_TOKEN][FX_WIDTH], lse[FX_LAYER][FX_Q][FX_TOKEN];
} small_trace;

/* Values on a coarse grid that all three storage types hold exactly. spec has everything: hidden, lse, kinds, three documents. */
void small_trace_make(small_trace *f);
kv_status small_trace_write(const small_trace *f, const char *path);

#endif
