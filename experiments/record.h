/* Recording: model + tokens -> trace. */
#ifndef KV_RECORD_H
#define KV_RECORD_H

#include <stdbool.h>
#include <stdint.h>

#include "reference/core/num.h"
#include "reference/ops.h"

typedef struct kv_record_options {
    const char *model_dir;
    /* exactly one: name of a built-in corpus; token file (token_file.h) */
    const char *corpus, *tokens;
    int32_t length; /* tokens; 0: 16384 of a corpus, all of a file */
    uint64_t seed;  /* of the corpus */
    const char *output;
    bool hidden;    /* also the residual stream entering each layer */
    bool any_dtype; /* store f16, or f32 when a value would overflow; else exactly `dtype` */
    kv_dtype dtype;
    bool force;        /* replace an existing trace */
    const kv_ops *ops; /* device */
} kv_record_options;

/* Runs the model over the tokens as one document and writes every layer's q, k, v and lse as it is computed: memory holds one layer.
 * KV_E_USAGE on contradictory options or too few tokens, KV_E_DATA on ids beyond the vocabulary, KV_E_CANTCREATE when the output exists
 * (without force) or cannot be made. */
kv_status kv_record(const kv_record_options *options);

#endif
