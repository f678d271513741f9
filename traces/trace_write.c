/* Writes a trace of one request, layer by layer: memory holds one head of one tensor at a time.
 *
 * The same input gives the same bytes: object times are off, there is no date_created, and trace_id is a name-based UUID (version 8
 * of RFC 9562) formed from content_xxh3. */
#include <stdio.h>
#include <unistd.h>

#include "reference/core/mem.h"
#include "traces/chunks.h"
#include "traces/trace_writer.h"

kv_status kv_trace_writer_open(const char *path, const kv_trace_spec *spec, kv_trace_writer **out) {
    kv_status st = KV_OK;
    kv_trace_writer *w = NULL;
    *out = NULL;
    KV_NEW(w, 1);
    w->file = w->request = -1;
    for (int i = 0; i < KV_MODEL_ITEMS; i++) w->scale[i] = -1;
    for (int i = 0; i < KV_REQUEST_ITEMS; i++) w->tensor[i] = -1;
    w->n_layer = spec->n_layer, w->n_token = spec->n_token, w->type = spec->type;
    w->n_q_head = spec->n_q_head, w->n_kv_head = spec->n_kv_head;
    w->head_dim = spec->head_dim, w->d_model = spec->d_model;
    if (w->n_layer < 1 || w->n_token < 1 || w->n_q_head < 1 || w->n_kv_head < 1 || w->head_dim < 2)
        KV_RAISE(KV_E_USAGE, "%s: a trace needs at least one layer, head and token", path);
    w->path = kv_strdup(path);
    int32_t widest = w->d_model > w->head_dim ? w->d_model : w->head_dim;
    w->narrow = kv_mem_new((size_t)w->n_token * (size_t)widest, sizeof(float));
    if (!w->path || !w->narrow) KV_TRY(KV_E_INTERNAL);
    KV_TRY(kv_h5_create(path, &w->temporary, &w->file));
    KV_TRY(kv_trace_writer_create(w, spec));
    *out = w;
    w = NULL;
out:
    if (st != KV_OK && w && w->file >= 0) st = kv_error_context(st, "%s", path);
    kv_trace_writer_close(w, false);
    return st;
}

static bool any_not_finite(kv_dtype type, const void *x, size_t n) {
    bool bad = false;
    const uint16_t mask = type == KV_F16 ? 0x7c00u : 0x7f80u;
    const uint16_t *half = x;
    const float *full = x;
    if (type == KV_F32)
        for (size_t i = 0; i < n; i++) bad |= (kv_bits(full[i]) & 0x7f800000u) == 0x7f800000u;
    else
        for (size_t i = 0; i < n; i++) bad |= (half[i] & mask) == mask;
    return bad;
}

/* x [n_token][width] at (layer, head); head < 0: the tensor has no head axis. */
static kv_status put_rows(kv_trace_writer *w, kv_request_item item, kv_dtype type, int32_t head,
                          int32_t width, const float *x) {
    kv_status st = KV_OK;
    const char *name = kv_request_item_name[item];
    const size_t n = (size_t)w->n_token * (size_t)width, stripe = kv_trace_stripe[item];
    kv_chunk_rows rows = {.set = w->tensor[item],
                          .axis = head < 0 ? 1 : 2,
                          .start = {(hsize_t)w->written, head < 0 ? 0 : (hsize_t)head},
                          .n_row = (size_t)w->n_token,
                          .row_size = (size_t)width * kv_dtype_size(type),
                          .stripe = (size_t)w->n_token < stripe ? (size_t)w->n_token : stripe,
                          .element_size = kv_dtype_size(type)};
    kv_narrow(type, x, w->narrow, n);
    if (any_not_finite(type, w->narrow, n)) {
        bool finite = !any_not_finite(KV_F32, x, n);
        w->overflowed = finite;
        KV_RAISE(KV_E_DATA, "%s: %s of layer index %d, head %d %s", w->path, name, w->written,
                 head < 0 ? 0 : head,
                 finite ? "exceeds the range of the stored type; store f32" : "is not finite");
    }
    st = kv_h5_write_chunks(&rows, w->narrow);
    if (st != KV_OK) return kv_error_context(st, "%s: %s", w->path, name);
out:
    return st;
}

kv_status kv_trace_writer_layer(kv_trace_writer *w, const kv_span *span, const float *lse) {
    kv_status st = KV_OK;
    int64_t step = span->stride * w->head_dim;
    kv_h5_begin();
    if (w->written == w->n_layer || span->n_token != w->n_token || span->n_q_head != w->n_q_head ||
        span->n_kv_head != w->n_kv_head || span->head_dim != w->head_dim ||
        (w->tensor[KV_ITEM_LSE] >= 0) != (lse != NULL) ||
        (w->tensor[KV_ITEM_HIDDEN] >= 0 && !span->hidden))
        KV_RAISE(KV_E_USAGE, "%s: layer index %d does not fit what the trace was opened for",
                 w->path, w->written);
    for (int32_t h = 0; h < w->n_q_head; h++) {
        KV_TRY(put_rows(w, KV_ITEM_Q, w->type, h, w->head_dim, span->q + h * step));
        if (lse) KV_TRY(put_rows(w, KV_ITEM_LSE, KV_F32, h, 1, lse + h * span->stride));
    }
    for (int32_t h = 0; h < w->n_kv_head; h++) {
        KV_TRY(put_rows(w, KV_ITEM_K, w->type, h, w->head_dim, span->k + h * step));
        KV_TRY(put_rows(w, KV_ITEM_V, w->type, h, w->head_dim, span->v + h * step));
    }
    if (w->tensor[KV_ITEM_HIDDEN] >= 0)
        KV_TRY(put_rows(w, KV_ITEM_HIDDEN, KV_BF16, -1, w->d_model, span->hidden));
    w->written++;
out:
    return st;
}

bool kv_trace_writer_overflowed(const kv_trace_writer *w) { return w->overflowed; }

/* Reads the finished file back through the reader's own rules and stores its hash and the identity derived from it. */
static kv_status seal(kv_trace_writer *w) {
    kv_status st = KV_OK;
    char hash[33], id[37];
    kv_trace *view = NULL;
    KV_NEW(view, 1);
    view->file = w->file;
    view->path = kv_strdup(w->path);
    if (!view->path) KV_TRY(KV_E_INTERNAL);
    KV_TRY(kv_trace_describe(w->file, view->path, &view->desc));
    KV_TRY(kv_trace_check(&view->desc, &view->shape));
    KV_TRY(kv_trace_load_values(view));
    KV_TRY(kv_trace_content_hash(view, hash));
    snprintf(id, sizeof id, "%.8s-%.4s-8%.3s-%c%.3s-%.12s", hash, hash + 8, hash + 13,
             "89ab"[hash[16] & 3], hash + 17, hash + 20);
    KV_TRY(kv_h5_put_text(w->file, "content_xxh3", hash));
    KV_TRY(kv_h5_put_text(w->file, "trace_id", id));
out:
    if (view) view->file = -1; /* the writer's */
    kv_trace_close(view);
    return st;
}

kv_status kv_trace_writer_close(kv_trace_writer *w, bool keep) {
    kv_status st = KV_OK;
    if (!w) return KV_OK;
    kv_h5_begin();
    bool written = true;
    for (int i = 0; i < KV_MODEL_ITEMS; i++) written &= kv_h5_close(w->scale[i]);
    for (int i = 0; i < KV_REQUEST_ITEMS; i++) written &= kv_h5_close(w->tensor[i]);
    written &= kv_h5_close(w->request);
    if (!keep) goto out;
    if (!written) KV_H5_RAISE(KV_E_IO, "%s: writing failed; is the disk full?", w->path);
    if (w->written != w->n_layer)
        KV_RAISE(KV_E_USAGE, "%s: closed after %d of %d layers", w->path, w->written, w->n_layer);
    KV_TRY(seal(w));
    KV_TRY(kv_h5_publish(&w->file, w->temporary, w->path));
out:
    kv_h5_close(w->file);
    if (w->temporary && (!keep || st != KV_OK)) unlink(w->temporary);
    free(w->temporary);
    free(w->path);
    free(w->narrow);
    free(w);
    return st;
}
