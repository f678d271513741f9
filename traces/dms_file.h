/* Writes dms weights as safetensors, read by reference/dms.c.
 *
 * Tensors, f32, first axis KV head, {l} the real layer id: layers.{l}.gate.w1 [H][n_mlp][n_input], gate.b1 and gate.w2 [H][n_mlp], or
 * gate.weight [H][n_input] without a hidden layer; gate.bias [H], the global offset included. Metadata: policy, window, shift, source (kv,
 * hidden, channel), channel, scale, and the budget that the offset was fitted to. */
#ifndef KV_DMS_FILE_H
#define KV_DMS_FILE_H

#include "reference/dms.h"

typedef struct kv_dms_file {
    kv_dms_spec spec;
    int32_t n_layer, n_kv_head;
    const int32_t *layer_id; /* [n_layer] */
    const float *param;      /* [n_layer][n_kv_head][kv_dms_param] */
    int32_t window, shift, budget, sinks;
    const char *const *more; /* further metadata: key, value, …, NULL; NULL: none */
} kv_dms_file;

kv_status kv_dms_file_write(const char *path, const kv_dms_file *file);

#endif
