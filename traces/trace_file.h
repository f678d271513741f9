/* What the parts of the trace reader share: the open file, its description, raw reads. Not for users of traces: those include trace.h. */
#ifndef KV_TRACE_FILE_H
#define KV_TRACE_FILE_H

#include "traces/h5.h"
#include "traces/trace.h"
#include "traces/trace_check.h"

struct kv_trace {
    hid_t file;
    kv_trace_desc desc;
    kv_trace_shape shape;
    kv_trace_info info;
    int64_t *request_first; /* [n_request + 1] absolute token index */
    /* owned arrays behind the const pointers of info */
    char *path, *trace_id, *title, *source, *model_hash;
    double *inv_freq;
    int32_t *layer_id, *doc_request, *doc_in_request, *token, *position;
    int64_t *doc_first;
    uint8_t *kind, *scored;
    char **kind_name; /* [info.n_kind_name] */
};

/* Describes an open file without reading any data set. `out` is released by kv_trace_desc_free in any case. */
kv_status kv_trace_describe(hid_t file, const char *path, kv_trace_desc *out);
void kv_trace_desc_free(kv_trace_desc *desc);

/* Describes one data set below `group`; absent ones are marked so. */
kv_status kv_found_describe(hid_t group, const char *group_path, const char *name, kv_found *out);

/* Integers widened to 64 bits: out [n], n = the number of elements. KV_E_DATA with path on read errors. */
kv_status kv_found_read_ints(const kv_trace *t, const kv_found *f, int64_t *out);

/* Rows [first, first+count) of dimension 0 as stored elements, little endian, into out. */
kv_status kv_found_read_raw(const kv_trace *t, const kv_found *f, int64_t first, int64_t count,
                            void *out);
/* The same widened to fp32; f64 is rounded. */
kv_status kv_found_read_floats(const kv_trace *t, const kv_found *f, int64_t first, int64_t count,
                               float *out);

/* All elements of a one-dimensional data set in double. out [dim[0]] */
kv_status kv_found_read_doubles(const kv_trace *t, const kv_found *f, double *out);

int64_t kv_found_row(const kv_found *f); /* elements of one index of dimension 0 */

enum { KV_MOST_KINDS = 256 };
/* t->kind_name, and t->kind in the numbering of the first request (trace_kinds.c). */
kv_status kv_trace_load_kinds(kv_trace *t);

/* Small data sets and attributes into t->info, after the structure was checked (trace_values.c). */
kv_status kv_trace_load_values(kv_trace *t);

#endif
