/* Lookup, shape checks and widening of named tensors; the files behind them are traces/safetensors.c. */
#include "reference/tensors.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int compare_tensor(const void *name, const void *tensor) {
    return strcmp(name, ((const kv_tensor *)tensor)->name);
}

const kv_tensor *kv_tensors_find(const kv_tensors *set, const char *name) {
    if (set->n_tensor == 0) return NULL;
    return bsearch(name, set->tensor, (size_t)set->n_tensor, sizeof *set->tensor, compare_tensor);
}

static int compare_key(const void *name, const void *key) {
    return strcmp(name, *(char *const *)key);
}

const char *kv_tensors_meta(const kv_tensors *set, const char *key) {
    if (set->n_meta == 0) return NULL;
    char **found = bsearch(key, set->key, (size_t)set->n_meta, sizeof *set->key, compare_key);
    return found ? set->value[found - set->key] : NULL;
}

static void print_shape(int32_t n_dim, const int64_t *shape, char *out, size_t size) {
    int n = snprintf(out, size, "[");
    for (int32_t i = 0; i < n_dim && n >= 0 && (size_t)n < size; i++)
        n += snprintf(out + n, size - (size_t)n, "%s%" PRId64, i ? ", " : "", shape[i]);
    if (n >= 0 && (size_t)n < size) snprintf(out + n, size - (size_t)n, "]");
}

kv_status kv_tensors_get(const kv_tensors *set, const char *name, int32_t n_dim,
                         const int64_t *shape, const kv_tensor **out) {
    char expected[192], found[192];
    print_shape(n_dim, shape, expected, sizeof expected);
    const kv_tensor *t = kv_tensors_find(set, name);
    if (!t)
        return KV_FAIL(KV_E_DATA, "%s: tensor \"%s\" of shape %s is missing", set->path, name,
                       expected);
    bool same = t->n_dim == n_dim;
    for (int32_t i = 0; same && i < n_dim; i++) same = t->shape[i] == shape[i];
    if (!same) {
        print_shape(t->n_dim, t->shape, found, sizeof found);
        return KV_FAIL(KV_E_DATA, "%s: tensor \"%s\" has shape %s, expected %s", set->path, name,
                       found, expected);
    }
    *out = t;
    return KV_OK;
}

kv_status kv_tensor_read(const kv_tensors *set, const kv_tensor *t, float *out) {
    kv_widen(t->type, t->data, out, (size_t)t->n_element);
    for (int64_t i = 0; i < t->n_element; i++)
        if (!isfinite(out[i]))
            return KV_FAIL(KV_E_DATA,
                           "%s: tensor \"%s\", element %" PRId64 " is %g: weights must be finite",
                           set->path, t->name, i, (double)out[i]);
    return KV_OK;
}

void kv_tensors_rest(const kv_tensors *set) {
    if (set->rest) set->rest(set->backing);
}

void kv_tensors_free(kv_tensors *set) {
    for (int32_t i = 0; i < set->n_tensor; i++) free(set->tensor[i].name);
    for (int32_t i = 0; i < set->n_meta; i++) {
        free(set->key[i]);
        free(set->value[i]);
    }
    free(set->tensor);
    free(set->key);
    free(set->value);
    free(set->path);
    if (set->release) set->release(set->backing);
    memset(set, 0, sizeof *set);
}
