/* Files of decisions (evict.h5, contract.md 2 and 4): /evict_at/<policy>[:<variant>]/b<budget>, i32[layer][kv_head][n_token], absolute
 * positions over all requests. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "reference/core/mem.h"
#include "traces/trace_file.h"

typedef struct decisions {
    hid_t file, set, space;
    kv_found found;
} decisions;

static void close_decisions(decisions *d) {
    kv_h5_close(d->space);
    kv_h5_close(d->set);
    kv_h5_close(d->file);
    free(d->found.path);
}

/* Every group on the way to `path` must exist; HDF5 cannot look a path up whose beginning is missing. */
static bool path_exists(hid_t file, char *path) {
    bool found = true;
    for (char *slash = strchr(path, '/'); slash && found; slash = strchr(slash + 1, '/')) {
        if (slash == path) continue;
        *slash = '\0';
        found = H5Lexists(file, path, H5P_DEFAULT) > 0;
        *slash = '/';
    }
    return found && H5Lexists(file, path, H5P_DEFAULT) > 0;
}

static kv_status open_decisions(const char *path, const char *item, int32_t budget, decisions *d) {
    kv_status st = KV_OK;
    char name[1024];
    *d = (decisions){.file = -1, .set = -1, .space = -1};
    KV_TRY(kv_h5_open(path, &d->file));
    if (snprintf(name, sizeof name, "/evict_at/%s/b%d", item, budget) >= (int)sizeof name)
        KV_RAISE(KV_E_USAGE, "%s: the item name %.60s… is too long", path, item);
    if (!path_exists(d->file, name))
        KV_RAISE(KV_E_NOINPUT, "%s: %s is missing; `kvlab inspect %s` lists what is there", path,
                 name, path);
    char *last = strrchr(name, '/');
    *last = '\0';
    kv_h5_close(d->set);
    KV_H5_TRY(d->set, H5Gopen2(d->file, name, H5P_DEFAULT), KV_E_DATA, "%s: %s is not a group",
              path, name);
    KV_TRY(kv_found_describe(d->set, name, last + 1, &d->found));
    kv_h5_close(d->set);
    d->set = -1;
    KV_TRY(kv_found_check(path, &d->found));
    if (d->found.element != KV_EL_INT || d->found.n_dim != 3)
        KV_RAISE(KV_E_DATA, "%s: %s is not an integer array [layer][kv_head][token]", path,
                 d->found.path);
    KV_H5_TRY(d->set, H5Dopen2(d->file, d->found.path, H5P_DEFAULT), KV_E_DATA,
              "%s: %s cannot be opened", path, d->found.path);
    KV_H5_TRY(d->space, H5Dget_space(d->set), KV_E_DATA, "%s: %s has no shape", path,
              d->found.path);
out:
    return st;
}

/* One head of one layer, tokens [first, first + n). */
static kv_status read_head(const char *path, const decisions *d, int64_t layer, int64_t head,
                           int64_t first, int64_t n, int32_t *out) {
    kv_status st = KV_OK;
    hid_t memory = -1;
    const hsize_t start[] = {(hsize_t)layer, (hsize_t)head, (hsize_t)first};
    const hsize_t count[] = {1, 1, (hsize_t)n};
    KV_H5_TRY(memory, H5Screate_simple(3, count, NULL), KV_E_INTERNAL, "%s: no memory space", path);
    if (H5Sselect_hyperslab(d->space, H5S_SELECT_SET, start, NULL, count, NULL) < 0 ||
        H5Dread(d->set, H5T_NATIVE_INT32, memory, d->space, H5P_DEFAULT, out) < 0)
        KV_H5_RAISE(KV_E_DATA, "%s: %s cannot be read; the file is damaged, copy it again", path,
                    d->found.path);
out:
    kv_h5_close(memory);
    return st;
}

static kv_status misfit(const char *path, const decisions *d, const char *expected) {
    const int64_t *n = d->found.dim;
    return KV_FAIL(
        KV_E_DATA, "%s: %s has shape [%lld][%lld][%lld], expected %s; it belongs to another trace",
        path, d->found.path, (long long)n[0], (long long)n[1], (long long)n[2], expected);
}

kv_status kv_evict_check(const char *path, const char *item, int32_t budget, int32_t n_layer,
                         int32_t n_kv_head, int64_t n_token) {
    kv_status st = KV_OK;
    decisions d;
    char expected[96];
    KV_TRY(open_decisions(path, item, budget, &d));
    snprintf(expected, sizeof expected, "[%d][%d][%lld]", n_layer, n_kv_head, (long long)n_token);
    if (d.found.dim[0] != n_layer || d.found.dim[1] != n_kv_head || d.found.dim[2] != n_token)
        KV_TRY(misfit(path, &d, expected));
out:
    close_decisions(&d);
    return st;
}

kv_status kv_evict_read(const char *path, const char *item, int32_t budget, int32_t n_layer,
                        int32_t n_kv_head, int64_t n_token, int32_t *out) {
    kv_status st = KV_OK;
    decisions d = {.file = -1, .set = -1, .space = -1};
    KV_TRY(kv_evict_check(path, item, budget, n_layer, n_kv_head, n_token));
    KV_TRY(open_decisions(path, item, budget, &d));
    for (int64_t l = 0; l < n_layer; l++)
        for (int64_t h = 0; h < n_kv_head; h++)
            KV_TRY(read_head(path, &d, l, h, 0, n_token, out + (l * n_kv_head + h) * n_token));
out:
    close_decisions(&d);
    return st;
}

kv_status kv_evict_read_span(const char *path, const char *item, int32_t budget,
                             const kv_span *span, int32_t *out) {
    kv_status st = KV_OK;
    decisions d;
    char expected[128];
    KV_TRY(open_decisions(path, item, budget, &d));
    snprintf(expected, sizeof expected, "more than %d layers, %d KV heads and at least %lld tokens",
             span->layer_index, span->n_kv_head, (long long)(span->first + span->n_token));
    if (d.found.dim[0] <= span->layer_index || d.found.dim[1] != span->n_kv_head ||
        d.found.dim[2] < span->first + span->n_token)
        KV_TRY(misfit(path, &d, expected));
    for (int64_t h = 0; h < span->n_kv_head; h++)
        KV_TRY(read_head(path, &d, span->layer_index, h, span->first, span->n_token,
                         out + h * span->stride));
out:
    close_decisions(&d);
    return st;
}

struct kv_evict_writer {
    char *path, *temporary;
    hid_t file;
    bool failed; /* an item could not be added: the file is not kept */
};

static void free_writer(kv_evict_writer *w) {
    if (!w) return;
    kv_h5_close(w->file);
    free(w->path);
    free(w->temporary);
    free(w);
}

kv_status kv_evict_writer_open(const char *path, kv_evict_writer **out) {
    kv_status st = KV_OK;
    kv_evict_writer *w = NULL;
    *out = NULL;
    KV_NEW(w, 1);
    w->file = -1;
    w->path = kv_strdup(path);
    if (!w->path) KV_TRY(KV_E_INTERNAL);
    KV_TRY(kv_h5_create(path, &w->temporary, &w->file));
    *out = w;
    w = NULL;
out:
    free_writer(w);
    return st;
}

kv_status kv_evict_writer_add(kv_evict_writer *w, const char *item, int32_t budget, int32_t n_layer,
                              int32_t n_kv_head, int64_t n_token, const int32_t *evict_at) {
    enum { STRIPE = 16384 };
    kv_status st = KV_OK;
    char name[1024];
    hid_t set = -1, space = -1, creation = -1, group = -1;
    const hsize_t shape[] = {(hsize_t)n_layer, (hsize_t)n_kv_head, (hsize_t)n_token};
    const hsize_t chunk[] = {1, 1, (hsize_t)(n_token < STRIPE ? n_token : STRIPE)};
    kv_h5_begin();
    bool failed_before = w->failed;
    w->failed = true;
    if (n_layer < 1 || n_kv_head < 1 || n_token < 1)
        KV_RAISE(KV_E_USAGE, "%s: decisions %s of shape [%d][%d][%lld] are empty", w->path, item,
                 n_layer, n_kv_head, (long long)n_token);
    if (snprintf(name, sizeof name, "/evict_at/%s/b%d", item, budget) >= (int)sizeof name)
        KV_RAISE(KV_E_USAGE, "%s: the item name %.60s… is too long", w->path, item);
    /* Groups are made one by one, because intermediate ones would carry times. */
    for (char *slash = strchr(name + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (H5Lexists(w->file, name, H5P_DEFAULT) == 0) {
            kv_h5_close(creation);
            creation = kv_h5_creation(H5P_GROUP_CREATE);
            KV_H5_TRY(group, H5Gcreate2(w->file, name, H5P_DEFAULT, creation, H5P_DEFAULT), KV_E_IO,
                      "%s: %s cannot be created", w->path, name);
            kv_h5_close(group);
        }
        *slash = '/';
    }
    kv_h5_close(creation);
    KV_H5_TRY(creation, kv_h5_chunked(3, chunk), KV_E_INTERNAL, "%s: filters cannot be set", name);
    KV_H5_TRY(space, H5Screate_simple(3, shape, NULL), KV_E_INTERNAL, "%s: no space", name);
    KV_H5_TRY(set,
              H5Dcreate2(w->file, name, H5T_STD_I32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT),
              KV_E_IO, "%s: %s cannot be created", w->path, name);
    if (H5Dwrite(set, H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, evict_at) < 0)
        KV_H5_RAISE(KV_E_IO, "%s: %s cannot be written; is the disk full?", w->path, name);
    bool stored = kv_h5_close(set);
    set = -1;
    if (!stored) KV_H5_RAISE(KV_E_IO, "%s: %s cannot be written; is the disk full?", w->path, name);
    w->failed = failed_before;
out:
    kv_h5_close(set);
    kv_h5_close(space);
    kv_h5_close(creation);
    return st;
}

kv_status kv_evict_writer_close(kv_evict_writer *w) {
    kv_status st = KV_OK;
    if (!w) return KV_OK;
    kv_h5_begin();
    if (w->failed)
        KV_RAISE(KV_E_IO, "%s: not written, because an item of it could not be added", w->path);
    KV_TRY(kv_h5_publish(&w->file, w->temporary, w->path));
out:
    kv_h5_close(w->file);
    w->file = -1;
    if (st != KV_OK) unlink(w->temporary);
    free_writer(w);
    return st;
}
