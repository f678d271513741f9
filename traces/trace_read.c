/* Opens traces and reads one layer at a time. 16-bit floats are read raw and widened here: HDF5's own conversion is several times
 * slower; chunks in the usual form are decoded on all cores (trace_chunks.c). */
#include <stdio.h>
#include <string.h>

#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "traces/trace_chunks.h"

int64_t kv_found_row(const kv_found *f) {
    int64_t n = 1;
    for (int32_t i = 1; i < f->n_dim; i++) n *= f->dim[i];
    return n;
}

/* Rows [first, first+count) of dimension 0; memory_type < 0: as stored, but little endian. */
static kv_status read_rows(const kv_trace *t, const kv_found *f, hid_t memory_type, int64_t first,
                           int64_t count, void *out) {
    kv_status st = KV_OK;
    hid_t set = -1, space = -1, memory = -1, type = -1, stored = -1;
    hsize_t start[KV_FOUND_DIMS] = {(hsize_t)first}, n[KV_FOUND_DIMS] = {(hsize_t)count};
    for (int32_t i = 1; i < f->n_dim; i++) n[i] = (hsize_t)f->dim[i];
    kv_h5_begin();
    KV_H5_TRY(set, H5Dopen2(t->file, f->path, H5P_DEFAULT), KV_E_DATA, "%s: %s cannot be opened",
              t->path, f->path);
    KV_H5_TRY(space, H5Dget_space(set), KV_E_DATA, "%s: %s has no shape", t->path, f->path);
    KV_H5_TRY(memory, H5Screate_simple(f->n_dim, n, NULL), KV_E_INTERNAL, "%s: no memory space",
              f->path);
    if (memory_type < 0) {
        KV_H5_TRY(type, H5Dget_type(set), KV_E_DATA, "%s: %s has no type", t->path, f->path);
        KV_H5_TRY(stored, H5Tcopy(type), KV_E_INTERNAL, "%s: type cannot be copied", f->path);
        if (H5Tset_order(stored, H5T_ORDER_LE) < 0)
            KV_H5_RAISE(KV_E_DATA, "%s: %s has no byte order", t->path, f->path);
    }
    if (H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, n, NULL) < 0 ||
        H5Dread(set, memory_type < 0 ? stored : memory_type, memory, space, H5P_DEFAULT, out) < 0)
        KV_H5_RAISE(KV_E_DATA, "%s: %s cannot be read; the file is damaged, copy it again", t->path,
                    f->path);
out:
    kv_h5_close(stored);
    kv_h5_close(type);
    kv_h5_close(memory);
    kv_h5_close(space);
    kv_h5_close(set);
    return st;
}

kv_status kv_found_read_ints(const kv_trace *t, const kv_found *f, int64_t *out) {
    return read_rows(t, f, H5T_NATIVE_INT64, 0, f->dim[0], out);
}

kv_status kv_found_read_doubles(const kv_trace *t, const kv_found *f, double *out) {
    return read_rows(t, f, H5T_NATIVE_DOUBLE, 0, f->dim[0], out);
}

kv_status kv_found_read_raw(const kv_trace *t, const kv_found *f, int64_t first, int64_t count,
                            void *out) {
    return read_rows(t, f, -1, first, count, out);
}

static kv_dtype dtype_of(kv_element e) {
    return e == KV_EL_F16 ? KV_F16 : e == KV_EL_BF16 ? KV_BF16 : KV_F32;
}

kv_status kv_found_read_floats(const kv_trace *t, const kv_found *f, int64_t first, int64_t count,
                               float *out) {
    kv_status st = KV_OK;
    void *raw = NULL;
    bool done = false;
    if (f->element != KV_EL_F64)
        KV_TRY(kv_chunks_read(t, f, first, count, dtype_of(f->element), out, &done));
    if (done) return KV_OK;
    if (f->element == KV_EL_F32 || f->element == KV_EL_F64)
        return read_rows(t, f, H5T_NATIVE_FLOAT, first, count, out);
    size_t n = (size_t)(count * kv_found_row(f));
    raw = kv_mem_new(n, 2);
    if (!raw) return KV_E_INTERNAL;
    KV_TRY(kv_found_read_raw(t, f, first, count, raw));
    kv_widen(dtype_of(f->element), raw, out, n);
out:
    free(raw);
    return st;
}

kv_status kv_trace_open(const char *path, kv_trace **out) {
    kv_status st = KV_OK;
    kv_trace *t = NULL;
    *out = NULL;
    KV_NEW(t, 1);
    t->file = -1;
    t->path = kv_strdup(path);
    if (!t->path) KV_TRY(KV_E_INTERNAL);
    KV_TRY(kv_h5_open(path, &t->file));
    KV_TRY(kv_trace_describe(t->file, t->path, &t->desc));
    KV_TRY(kv_trace_check(&t->desc, &t->shape));
    if (t->shape.newer_minor)
        kv_log(KV_LOG_WARN, "trace",
               "%s: written by a later minor version (%s); what is new in it is ignored", path,
               t->desc.conventions);
    KV_TRY(kv_trace_load_values(t));
    *out = t;
    t = NULL;
out:
    kv_trace_close(t);
    return st;
}

void kv_trace_close(kv_trace *t) {
    if (!t) return;
    for (int32_t i = 0; t->kind_name && i < t->info.n_kind_name; i++) free(t->kind_name[i]);
    free(t->kind_name);
    void *owned[] = {t->path,        t->trace_id,       t->title, t->source,   t->model_hash,
                     t->inv_freq,    t->layer_id,       t->token, t->position, t->doc_first,
                     t->doc_request, t->doc_in_request, t->kind,  t->scored,   t->request_first};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    kv_trace_desc_free(&t->desc);
    kv_h5_close(t->file);
    free(t);
}

const kv_trace_info *kv_trace_get(const kv_trace *t) { return &t->info; }

int64_t kv_trace_falling_position(const kv_trace_info *info) {
    for (int32_t d = 0; d < info->n_document; d++)
        for (int64_t t = info->doc_first[d] + 1; t < info->doc_first[d + 1]; t++)
            if (info->position[t] <= info->position[t - 1]) return t;
    return -1;
}

static bool all_finite(const float *x, int64_t n) {
    uint32_t bad = 0;
    for (int64_t i = 0; i < n; i++) bad |= (kv_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
    return !bad;
}

/* One layer of every request of one data set into out [n_head][n_token of all requests][width]; n_head is dimension 1 of a
 * per-head data set, else 1. Values must be finite. */
static kv_status gather(const kv_trace *t, int32_t layer, kv_request_item item, bool per_head,
                        float **out) {
    kv_status st = KV_OK;
    float *part = NULL;
    int64_t total = t->info.n_token;
    const kv_found *first = &t->desc.request[0].item[item];
    int64_t n_head = per_head ? first->dim[1] : 1;
    int32_t axes = per_head ? 3 : 2; /* layer, head, token | layer, token */
    int64_t width = first->n_dim > axes ? first->dim[axes] : 1;
    KV_NEW(*out, n_head * total * width);
    for (int32_t r = 0; r < t->desc.n_request; r++) {
        const kv_found *f = &t->desc.request[r].item[item];
        int64_t at = t->request_first[r], n = t->request_first[r + 1] - at;
        bool whole = t->desc.n_request == 1;
        if (!whole) KV_NEW(part, n_head * n * width);
        float *read = whole ? *out : part;
        KV_TRY(kv_found_read_floats(t, f, layer, 1, read));
        for (int64_t h = 0; h < n_head; h++) {
            const float *row = read + h * n * width;
            if (!all_finite(row, n * width)) {
                int64_t i = 0;
                while (all_finite(row + i, 1)) i++;
                KV_RAISE(KV_E_DATA,
                         "%s: %s holds %g at layer %d, head %lld, token %lld, component %lld; "
                         "expected finite numbers",
                         t->path, f->path, (double)row[i], t->info.layer_id[layer], (long long)h,
                         (long long)(i / width), (long long)(i % width));
            }
            if (!whole)
                memcpy(*out + (h * total + at) * width, row, (size_t)(n * width) * sizeof *row);
        }
        free(part);
        part = NULL;
    }
out:
    free(part);
    return st;
}

kv_status kv_trace_read_gate(kv_trace *t, int32_t layer, float **out) {
    *out = NULL;
    return t->info.has_gate ? gather(t, layer, KV_ITEM_GATE, true, out) : KV_OK;
}

kv_status kv_trace_read_layer(kv_trace *t, int32_t layer, bool want_hidden, kv_trace_layer *out) {
    kv_status st = KV_OK;
    *out = (kv_trace_layer){.n_token = t->info.n_token};
    if (layer < 0 || layer >= t->info.n_layer)
        KV_RAISE(KV_E_USAGE, "%s: layer index %d does not exist, the trace holds %d layers",
                 t->path, layer, t->info.n_layer);
    KV_TRY(gather(t, layer, KV_ITEM_Q, true, &out->q));
    KV_TRY(gather(t, layer, KV_ITEM_K, true, &out->k));
    KV_TRY(gather(t, layer, KV_ITEM_V, true, &out->v));
    if (want_hidden && t->info.has_hidden)
        KV_TRY(gather(t, layer, KV_ITEM_HIDDEN, false, &out->hidden));
    KV_TRY(kv_trace_read_gate(t, layer, &out->gate));
    if (t->info.has_lse) KV_TRY(gather(t, layer, KV_ITEM_LSE, true, &out->lse));
out:
    if (st != KV_OK) kv_trace_layer_free(out);
    return st;
}

void kv_trace_layer_free(kv_trace_layer *l) {
    float *owned[] = {l->q, l->k, l->v, l->hidden, l->gate, l->lse};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    *l = (kv_trace_layer){0};
}

void kv_trace_span(const kv_trace *t, const kv_trace_layer *l, int32_t layer, int32_t doc,
                   kv_span *out) {
    const kv_trace_info *info = &t->info;
    int64_t first = info->doc_first[doc];
    int64_t d = info->head_dim;
    *out = (kv_span){
        .n_token = (int32_t)(info->doc_first[doc + 1] - first),
        .stride = l->n_token,
        .n_q_head = info->n_q_head,
        .n_kv_head = info->n_kv_head,
        .head_dim = info->head_dim,
        .q = l->q + first * d,
        .k = l->k + first * d,
        .v = l->v + first * d,
        .hidden = l->hidden ? l->hidden + first * info->d_model : NULL,
        .d_model = info->d_model,
        .gate = l->gate ? l->gate + first : NULL,
        .position = info->position + first,
        .inv_freq = info->inv_freq,
        .scale = (float)info->softmax_scale,
        .softcap = (float)info->logit_softcap,
        .layer_id = info->layer_id[layer],
        .layer_index = layer,
        .n_layer = info->depth_is_guess ? 0 : info->n_model_layer,
        .request = info->doc_request[doc],
        .document = info->doc_in_request[doc],
        .first = first,
    };
}

kv_status kv_trace_read_score(kv_trace *t, const char *name, int32_t layer, float *out,
                              double *delta) {
    kv_status st = KV_OK;
    float *part = NULL;
    double *all = NULL;
    hid_t set = -1;
    int64_t total = t->info.n_token, n_head = t->info.n_kv_head;
    kv_h5_begin();
    for (int32_t r = 0; r < t->desc.n_request; r++) {
        const kv_found_request *request = &t->desc.request[r];
        int64_t at = t->request_first[r], n = t->request_first[r + 1] - at;
        const kv_found *f = NULL;
        for (int32_t i = 0; i < request->n_score && !f; i++)
            if (strcmp(strrchr(request->score[i].path, '/') + 1, name) == 0) f = &request->score[i];
        if (!f)
            KV_RAISE(KV_E_NOINPUT,
                     "%s: %s/score/%s is missing; record the scores or leave out "
                     "scores=trace",
                     t->path, request->path, name);
        KV_NEW(part, n_head * n);
        KV_TRY(kv_found_read_floats(t, f, layer, 1, part));
        for (int64_t h = 0; h < n_head; h++) {
            if (!all_finite(part + h * n, n))
                KV_RAISE(KV_E_DATA, "%s: %s is not finite in layer %d, head %lld", t->path, f->path,
                         t->info.layer_id[layer], (long long)h);
            memcpy(out + h * total + at, part + h * n, (size_t)n * sizeof *part);
        }
        free(part);
        part = NULL;
        if (!delta || r) continue;
        bool present;
        size_t n_delta = (size_t)(t->info.n_layer * n_head);
        KV_NEW(all, n_delta);
        KV_H5_TRY(set, H5Dopen2(t->file, f->path, H5P_DEFAULT), KV_E_DATA,
                  "%s: %s cannot be opened", t->path, f->path);
        st = kv_h5_get_reals(set, f->path, "delta", n_delta, &present, all);
        if (st != KV_OK) KV_TRY(kv_error_context(st, "%s", t->path));
        if (!present)
            KV_RAISE(KV_E_DATA, "%s: %s has no attribute delta; expected f64[%d][%lld]", t->path,
                     f->path, t->info.n_layer, (long long)n_head);
        for (size_t i = 0; i < n_delta; i++)
            if (!(all[i] >= 0 && all[i] < 1))
                KV_RAISE(KV_E_DATA, "%s: %s attribute delta holds %g at index %zu, expected [0, 1)",
                         t->path, f->path, all[i], i);
        memcpy(delta, all + layer * n_head, (size_t)n_head * sizeof *delta);
    }
out:
    kv_h5_close(set);
    free(part);
    free(all);
    return st;
}
