/* Writes scorer weights as safetensors: tensor names, shapes and metadata of contract.md 2. Read by reference/scorer.c. */
#ifndef KV_SCORER_FILE_H
#define KV_SCORER_FILE_H

#include "reference/scorer_net.h"

typedef struct kv_scorer_file {
    const char *policy; /* kvpop or kvpop_mlp */
    kv_net_spec spec;
    int32_t n_layer, n_kv_head;
    const int32_t *layer_id; /* [n_layer] */
    const float *param;      /* [n_layer][n_kv_head][n_param] in the order of kv_net_part */
    const float *theta;      /* [n_layer][n_kv_head] */
    int32_t budget, sinks;
    double target_power; /* INFINITY: max */
    bool target_mean, sparse_lse;
    const char *const *more; /* further metadata: key, value, …, NULL; NULL: none */
} kv_scorer_file;

kv_status kv_scorer_file_write(const char *path, const kv_scorer_file *file);

#endif
