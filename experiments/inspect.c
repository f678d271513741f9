/* Tells the kinds of files apart by their content; describes weights. */
#include "experiments/inspect.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/mem.h"
#include "traces/h5.h"
#include "traces/safetensors.h"

static kv_status check_finite(const kv_tensors *set, const kv_tensor *t) {
    float *x = kv_mem_new((size_t)t->n_element, sizeof *x);
    if (!x) return KV_E_INTERNAL;
    kv_status st = kv_tensor_read(set, t, x);
    free(x);
    return st;
}

static kv_status inspect_weights(const char *path, bool deep, FILE *out) {
    kv_status st = KV_OK;
    kv_tensors set = {0};
    int64_t elements = 0;
    KV_TRY(kv_safetensors_open(path, &set));
    fprintf(out, "weights    %s\n", path);
    for (int32_t i = 0; i < set.n_meta; i++)
        fprintf(out, "metadata   %s = %s\n", set.key[i], set.value[i]);
    for (int32_t i = 0; i < set.n_tensor; i++) {
        const kv_tensor *t = &set.tensor[i];
        fprintf(out, "tensor     %s %s", t->name, kv_dtype_name(t->type));
        for (int32_t j = 0; j < t->n_dim; j++) fprintf(out, "[%" PRId64 "]", t->shape[j]);
        fprintf(out, "\n");
        elements += t->n_element;
        if (deep) KV_TRY(check_finite(&set, t));
    }
    fprintf(out, "total      %d tensors, %" PRId64 " numbers%s\n", set.n_tensor, elements,
            deep ? ", all finite" : "");
    fprintf(out, "content    xxh3 %016" PRIx64 "%016" PRIx64 "\n", set.hash[0], set.hash[1]);
out:
    kv_tensors_free(&set);
    return st;
}

static bool ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

kv_status kv_inspect(const char *path, bool deep, FILE *out) {
    kv_status st = KV_OK;
    char magic[9] = "";
    hid_t file = -1;
    FILE *f = fopen(path, "rb");
    if (!f) KV_RAISE(KV_E_NOINPUT, "%s: cannot be read: %s; check the path", path, strerror(errno));
    size_t got = fread(magic, 1, 9, f);
    fclose(f);
    if (got < 8 || memcmp(magic, "\x89HDF\r\n\x1a\n", 8) != 0) {
        if (magic[8] != '{' && !ends_with(path, ".safetensors") && !ends_with(path, ".index.json"))
            KV_RAISE(KV_E_DATA,
                     "%s: is neither an HDF5 file (trace, decisions) nor a safetensors file", path);
        KV_TRY(inspect_weights(path, deep, out));
        goto out;
    }
    KV_TRY(kv_h5_open(path, &file));
    bool decisions = H5Lexists(file, "evict_at", H5P_DEFAULT) > 0;
    kv_h5_close(file);
    file = -1;
    KV_TRY(decisions ? kv_inspect_evict(path, deep, out) : kv_inspect_trace(path, deep, out));
out:
    kv_h5_close(file);
    return st;
}
