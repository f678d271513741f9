/* safetensors files: 8-byte little-endian header length, JSON header (dtype, shape, data_offsets), then bytes. */
#ifndef KV_SAFETENSORS_H
#define KV_SAFETENSORS_H

#include "reference/tensors.h"

/* Maps one file, or with a *.index.json all its shards. Header checked against the file's size; overlaps, gaps beyond the file,
 * unknown dtypes, duplicate names and headers above 100 MB are refused (KV_E_DATA). kv_tensors_free releases. */
kv_status kv_safetensors_open(const char *path, kv_tensors *out);

typedef struct kv_tensor_out {
    const char *name;
    int32_t n_dim;
    int64_t shape[KV_TENSOR_DIMS];
    const float *data;
} kv_tensor_out;

/* Writes fp32 tensors and metadata (key, value pairs, NULL-terminated) to `path` by rename; the same input gives the same bytes. */
kv_status kv_safetensors_write(const char *path, const kv_tensor_out *tensor, int32_t n,
                               const char *const *meta);

#endif
