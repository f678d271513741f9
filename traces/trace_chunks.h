/* Chunks of a data set, decoded on all cores: HDF5 undoes its filters on one core, under one lock. */
#ifndef KV_TRACE_CHUNKS_H
#define KV_TRACE_CHUNKS_H

#include "traces/trace_file.h"

/* Rows [first, first + count) of dimension 0 of floats of `type`, widened to fp32. *done is false, and out without meaning, when the
 * data set is not stored as `record` stores it (little endian, in chunks, at most shuffle, deflate and Fletcher's checksum in this
 * order) or when a chunk looks wrong: the caller then reads through HDF5, which names the damage. */
kv_status kv_chunks_read(const kv_trace *t, const kv_found *f, int64_t first, int64_t count,
                         kv_dtype type, float *out, bool *done);

#endif
