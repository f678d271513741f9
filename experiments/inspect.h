/* What a file holds, in words: a trace, a file of decisions (evict.h5) or weights (.safetensors). */
#ifndef KV_INSPECT_H
#define KV_INSPECT_H

#include <stdbool.h>
#include <stdio.h>

#include "traces/trace.h"

/* Describes `path` on `out`. deep: also reads everything and compares what can be compared: the content hash, finite values, lse
 * against a recomputation at sampled queries, rising positions, decisions after their token. KV_E_DATA at the first thing that does
 * not agree, after everything was printed; KV_E_NOINPUT when the file is missing. */
kv_status kv_inspect(const char *path, bool deep, FILE *out);

/* The parts (inspect_trace.c, inspect_deep.c, inspect_evict.c). */
kv_status kv_inspect_trace(const char *path, bool deep, FILE *out);
kv_status kv_inspect_deep(kv_trace *trace, FILE *out);
kv_status kv_inspect_evict(const char *path, bool deep, FILE *out);

#endif
