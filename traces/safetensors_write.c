/* Writer of safetensors files: fp32 tensors in name order, an 8-byte aligned header, no time stamp, so that the same input gives
 * the same bytes; the file appears by rename. */
#include "traces/safetensors.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "reference/core/mem.h"
#include "traces/output.h"

enum { ALIGNMENT = 8 };

static int compare_out(const void *a, const void *b) {
    return strcmp(((const kv_tensor_out *)a)->name, ((const kv_tensor_out *)b)->name);
}

static int64_t n_element(const kv_tensor_out *t) {
    int64_t n = 1;
    for (int32_t i = 0; i < t->n_dim; i++) n *= t->shape[i];
    return n;
}

static kv_status check(const char *path, const kv_tensor_out *t) {
    for (int64_t i = 0; i < n_element(t); i++)
        if (!isfinite(t->data[i]))
            return KV_FAIL(KV_E_DATA,
                           "%s: tensor \"%s\", element %" PRId64 " is %g: only finite weights are "
                           "written",
                           path, t->name, i, (double)t->data[i]);
    return KV_OK;
}

static json_t *describe(const kv_tensor_out *t, int64_t begin) {
    json_t *shape = json_array();
    for (int32_t i = 0; i < t->n_dim; i++) json_array_append_new(shape, json_integer(t->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", "F32", "shape", shape, "data_offsets",
                     (json_int_t)begin, (json_int_t)(begin + 4 * n_element(t)));
}

/* The JSON text of sorted tensors, padded with blanks to a multiple of 8 bytes. */
static kv_status build_header(const char *path, const kv_tensor_out *tensor, int32_t n,
                              const char *const *meta, char **out, size_t *length) {
    kv_status st = KV_OK;
    json_t *root = json_object(), *text = json_object();
    char *dump = NULL;
    int64_t begin = 0;
    for (int32_t i = 0; meta && meta[2 * i]; i++)
        if (json_object_set_new(text, meta[2 * i], json_string(meta[2 * i + 1])) != 0)
            KV_RAISE(KV_E_DATA, "%s: metadata \"%s\" is not UTF-8", path, meta[2 * i]);
    if (json_object_size(text)) json_object_set(root, "__metadata__", text);
    for (int32_t i = 0; i < n; i++) {
        if (json_object_get(root, tensor[i].name))
            KV_RAISE(KV_E_INTERNAL, "%s: tensor \"%s\" is given twice", path, tensor[i].name);
        if (json_object_set_new(root, tensor[i].name, describe(&tensor[i], begin)) != 0)
            KV_RAISE(KV_E_INTERNAL, "%s: tensor name \"%s\" is not UTF-8", path, tensor[i].name);
        begin += 4 * n_element(&tensor[i]);
    }
    dump = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS);
    if (!dump) KV_RAISE(KV_E_INTERNAL, "out of memory for the header of %s", path);
    size_t used = strlen(dump);
    *length = (used + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    KV_NEW(*out, *length);
    memset(*out, ' ', *length);
    memcpy(*out, dump, used);
out:
    free(dump);
    json_decref(text);
    json_decref(root);
    return st;
}

static kv_status write_all(const char *path, const char *header, size_t length,
                           const kv_tensor_out *tensor, int32_t n) {
    kv_status st = KV_OK;
    unsigned char prefix[8];
    FILE *f = fopen(path, "wb");
    if (!f) return KV_FAIL(KV_E_CANTCREATE, "%s: cannot be created: %s", path, strerror(errno));
    for (int i = 0; i < 8; i++) prefix[i] = (unsigned char)(length >> (8 * i));
    fwrite(prefix, 1, sizeof prefix, f);
    fwrite(header, 1, length, f);
    for (int32_t i = 0; i < n; i++)
        fwrite(tensor[i].data, sizeof(float), (size_t)n_element(&tensor[i]), f);
    int failed = fflush(f) != 0 || ferror(f) || fsync(fileno(f)) != 0;
    if (fclose(f) != 0 || failed)
        st = KV_FAIL(KV_E_IO, "%s: writing failed: %s", path, strerror(errno));
    return st;
}

kv_status kv_safetensors_write(const char *path, const kv_tensor_out *tensor, int32_t n,
                               const char *const *meta) {
    kv_status st = KV_OK;
    kv_tensor_out *sorted = NULL;
    char *temporary = NULL, *header = NULL;
    size_t length = 0;
    bool created = false;
    KV_TRY(kv_output_begin(path, &temporary));
    KV_NEW(sorted, n);
    for (int32_t i = 0; i < n; i++) sorted[i] = tensor[i];
    qsort(sorted, (size_t)n, sizeof *sorted, compare_out);
    for (int32_t i = 0; i < n; i++) KV_TRY(check(path, &sorted[i]));
    KV_TRY(build_header(path, sorted, n, meta, &header, &length));
    created = true;
    KV_TRY(write_all(temporary, header, length, sorted, n));
    if (rename(temporary, path) != 0)
        KV_RAISE(KV_E_CANTCREATE, "%s: cannot be renamed from %s: %s", path, temporary,
                 strerror(errno));
    created = false;
out:
    if (created) unlink(temporary);
    free(sorted);
    free(temporary);
    free(header);
    return st;
}
