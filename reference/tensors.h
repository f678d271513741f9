/* A set of named tensors with text metadata, as safetensors files hold it. Data stay in the file's format until asked for. */
#ifndef KV_TENSORS_H
#define KV_TENSORS_H

#include <stdint.h>

#include "reference/core/num.h"
#include "reference/core/status.h"

enum { KV_TENSOR_DIMS = 8 };

typedef struct kv_tensor {
    char *name;
    kv_dtype type;
    int32_t n_dim;
    int64_t shape[KV_TENSOR_DIMS];
    int64_t n_element;
    const void *data; /* n_element elements of `type`, little endian, aligned to 2 bytes at least */
} kv_tensor;

typedef struct kv_tensors {
    char *path;        /* where they came from, for messages */
    kv_tensor *tensor; /* [n_tensor], sorted by name */
    int32_t n_tensor;
    char **key, **value; /* [n_meta] metadata, sorted by key */
    int32_t n_meta;
    uint64_t hash[2]; /* XXH3-128 of the whole content (high, low) */
    void *backing;    /* owned by the loader */
    void (*release)(void *backing);
    void (*rest)(void *backing); /* NULL: nothing to give back */
} kv_tensors;

const kv_tensor *kv_tensors_find(const kv_tensors *set, const char *name); /* NULL if absent */
const char *kv_tensors_meta(const kv_tensors *set, const char *key);       /* NULL if absent */

/* The tensor with exactly this shape, or KV_E_DATA that names file, tensor, found and expected shape. */
kv_status kv_tensors_get(const kv_tensors *set, const char *name, int32_t n_dim,
                         const int64_t *shape, const kv_tensor **out);

/* Elements widened to fp32 into out[n_element]; KV_E_DATA on NaN or infinity. */
kv_status kv_tensor_read(const kv_tensors *set, const kv_tensor *t, float *out);

/* Data that were read leave memory until they are read again (a file behind them stays open), so that a walk over the layers of a
 * model needs the memory of one. */
void kv_tensors_rest(const kv_tensors *set);

void kv_tensors_free(kv_tensors *set);

#endif
