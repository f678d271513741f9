/* Small data sets and descriptive attributes of a trace: their values, checked, into kv_trace_info. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "traces/trace_file.h"

enum { MAX_POSITION = 1 << 30 }; /* differences and successors of positions stay within 32 bits */

/* Messages about attributes name their object; this adds the file. */
static kv_status in_file(const kv_trace *t, kv_status st) {
    return st == KV_OK ? st : kv_error_context(st, "%s", t->path);
}

/* True if every request has the item. */
static bool in_all(const kv_trace *t, kv_request_item item) {
    int32_t n = 0;
    for (int32_t r = 0; r < t->desc.n_request; r++)
        n += t->desc.request[r].item[item].presence == KV_DATASET;
    if (n > 0 && n < t->desc.n_request)
        kv_log(KV_LOG_WARN, "trace", "%s: only %d of %d requests have %s; it is ignored", t->path,
               n, t->desc.n_request, kv_request_item_name[item]);
    return n == t->desc.n_request;
}

/* The integers of one item of request r, each within [min, max]: x [its tokens]. */
static kv_status read_ints(const kv_trace *t, int32_t r, kv_request_item item, int64_t min,
                           int64_t max, int64_t *x) {
    kv_status st = KV_OK;
    const kv_found *f = &t->desc.request[r].item[item];
    KV_TRY(kv_found_read_ints(t, f, x));
    for (int64_t i = 0; i < f->dim[0]; i++)
        if (x[i] < min || x[i] > max)
            KV_RAISE(KV_E_DATA, "%s: %s is %lld at token %lld, expected %lld..%lld", t->path,
                     f->path, (long long)x[i], (long long)i, (long long)min, (long long)max);
out:
    return st;
}

/* Tokens or positions of all requests; a request without the item gets 0, 1, … */
static kv_status load_i32(kv_trace *t, kv_request_item item, int32_t **out) {
    kv_status st = KV_OK;
    int64_t *x = NULL;
    const int64_t max = item == KV_ITEM_POSITION ? MAX_POSITION : INT32_MAX;
    KV_NEW(*out, t->info.n_token);
    KV_NEW(x, t->info.n_token);
    for (int32_t r = 0; r < t->desc.n_request; r++) {
        int64_t first = t->request_first[r], n = t->request_first[r + 1] - first;
        for (int64_t i = 0; i < n; i++) x[i] = i;
        if (t->desc.request[r].item[item].presence == KV_DATASET)
            KV_TRY(read_ints(t, r, item, 0, max, x));
        for (int64_t i = 0; i < n; i++) (*out)[first + i] = (int32_t)x[i];
    }
out:
    free(x);
    return st;
}

static kv_status load_u8(kv_trace *t, kv_request_item item, int64_t max, uint8_t **out) {
    kv_status st = KV_OK;
    int64_t *x = NULL;
    if (!in_all(t, item)) goto out;
    KV_NEW(*out, t->info.n_token);
    KV_NEW(x, t->info.n_token);
    for (int32_t r = 0; r < t->desc.n_request; r++)
        KV_TRY(read_ints(t, r, item, 0, max, x + t->request_first[r]));
    for (int64_t i = 0; i < t->info.n_token; i++) (*out)[i] = (uint8_t)x[i];
out:
    free(x);
    return st;
}

static kv_status load_tokens(kv_trace *t) {
    kv_status st = KV_OK;
    int32_t n_request = t->desc.n_request;
    KV_NEW(t->request_first, n_request + 1);
    for (int32_t r = 0; r < n_request; r++)
        t->request_first[r + 1] =
            t->request_first[r] + t->desc.request[r].item[KV_ITEM_TOKEN].dim[0];
    t->info.n_request = n_request;
    t->info.n_token = t->request_first[n_request];
    if (t->info.n_token > INT32_MAX)
        KV_RAISE(KV_E_DATA, "%s: holds %lld tokens, at most %d are handled; split the trace",
                 t->path, (long long)t->info.n_token, INT32_MAX);
    KV_TRY(load_i32(t, KV_ITEM_TOKEN, &t->token));
    KV_TRY(load_i32(t, KV_ITEM_POSITION, &t->position));
    t->info.token = t->token;
    t->info.position = t->position;
    KV_TRY(load_u8(t, KV_ITEM_KIND, KV_MOST_KINDS - 1, &t->kind));
    KV_TRY(load_u8(t, KV_ITEM_SCORED, 3, &t->scored));
    t->info.kind = t->kind;
    t->info.scored = t->scored;
out:
    return st;
}

static kv_status check_query_pos(const kv_trace *t) {
    kv_status st = KV_OK;
    int64_t *x = NULL;
    for (int32_t r = 0; r < t->desc.n_request; r++) {
        const kv_found *f = &t->desc.request[r].item[KV_ITEM_QUERY_POS];
        if (f->presence != KV_DATASET) continue;
        KV_NEW(x, f->dim[0]);
        KV_TRY(kv_found_read_ints(t, f, x));
        for (int64_t i = 0; i < f->dim[0]; i++)
            if (x[i] != i)
                KV_RAISE(KV_E_DATA,
                         "%s: %s is %lld at index %lld, expected 0..T-1; version 1 needs the "
                         "queries of all positions",
                         t->path, f->path, (long long)x[i], (long long)i);
        free(x);
        x = NULL;
    }
out:
    free(x);
    return st;
}

/* Starts of the documents of request r, relative to it: *start [*n], owned. */
static kv_status read_doc_start(const kv_trace *t, int32_t r, int64_t **start, int64_t *n) {
    kv_status st = KV_OK;
    const kv_found *f = &t->desc.request[r].item[KV_ITEM_DOC_START];
    int64_t n_token = t->request_first[r + 1] - t->request_first[r];
    *n = f->presence == KV_DATASET ? f->dim[0] : 1;
    KV_NEW(*start, *n);
    if (f->presence != KV_DATASET) goto out;
    KV_TRY(kv_found_read_ints(t, f, *start));
    for (int64_t i = 0; i < *n; i++) {
        int64_t low = i ? (*start)[i - 1] + 1 : 0, high = i ? n_token - 1 : 0;
        if ((*start)[i] < low || (*start)[i] > high)
            KV_RAISE(KV_E_DATA,
                     "%s: %s is %lld at index %lld, expected %lld..%lld: the first document starts "
                     "at 0, the others strictly later and below %lld tokens",
                     t->path, f->path, (long long)(*start)[i], (long long)i, (long long)low,
                     (long long)high, (long long)n_token);
    }
out:
    return st;
}

static kv_status load_documents(kv_trace *t) {
    kv_status st = KV_OK;
    int64_t *start = NULL, n, most = 0;
    for (int32_t r = 0; r < t->desc.n_request; r++) {
        const kv_found *f = &t->desc.request[r].item[KV_ITEM_DOC_START];
        most += f->presence == KV_DATASET ? f->dim[0] : 1;
    }
    KV_NEW(t->doc_first, most + 1);
    KV_NEW(t->doc_request, most);
    KV_NEW(t->doc_in_request, most);
    for (int32_t r = 0; r < t->desc.n_request; r++) {
        KV_TRY(read_doc_start(t, r, &start, &n));
        for (int64_t i = 0; i < n; i++) {
            int32_t doc = t->info.n_document++;
            t->doc_first[doc] = t->request_first[r] + start[i];
            t->doc_request[doc] = r;
            t->doc_in_request[doc] = (int32_t)i;
        }
        free(start);
        start = NULL;
    }
    t->doc_first[most] = t->info.n_token;
    for (int64_t i = 0; i < most; i++) {
        int64_t length = t->doc_first[i + 1] - t->doc_first[i];
        if (length > t->info.longest) t->info.longest = (int32_t)length;
    }
    t->info.doc_first = t->doc_first;
    t->info.doc_request = t->doc_request;
    t->info.doc_in_request = t->doc_in_request;
out:
    free(start);
    return st;
}

static kv_status load_model(kv_trace *t) {
    kv_status st = KV_OK;
    kv_trace_info *info = &t->info;
    const kv_found *found = t->desc.model;
    int64_t *x = NULL;
    int32_t n_layer = t->shape.n_layer, half = t->shape.head_dim / 2;
    KV_NEW(x, n_layer);
    KV_NEW(t->layer_id, n_layer);
    if (found[KV_MODEL_WINDOW].presence == KV_DATASET) {
        KV_TRY(kv_found_read_ints(t, &found[KV_MODEL_WINDOW], x));
        for (int32_t i = 0; i < n_layer; i++)
            if (x[i] >= 0)
                KV_RAISE(KV_E_DATA,
                         "%s: /model/window is %lld at layer index %d, expected -1 (full "
                         "attention); sliding-window layers are not read by version 1",
                         t->path, (long long)x[i], i);
    }
    for (int32_t i = 0; i < n_layer; i++) x[i] = i;
    if (found[KV_SCALE_LAYER].presence == KV_DATASET)
        KV_TRY(kv_found_read_ints(t, &found[KV_SCALE_LAYER], x));
    info->n_model_layer = t->shape.n_model_layer;
    for (int32_t i = 0; i < n_layer; i++) {
        if (x[i] < 0 || x[i] > 1 << 16 || (i && x[i] <= x[i - 1]))
            KV_RAISE(
                KV_E_DATA,
                "%s: /layer is %lld at index %d, expected the model's layer numbers in strictly "
                "ascending order",
                t->path, (long long)x[i], i);
        t->layer_id[i] = (int32_t)x[i];
        if (t->layer_id[i] < info->n_model_layer) continue;
        info->n_model_layer = t->layer_id[i] + 1;
        info->depth_is_guess = true;
    }
    info->layer_id = t->layer_id;
    KV_NEW(t->inv_freq, half);
    info->rope_theta = t->desc.attribute[KV_ATTR_ROPE_THETA].value;
    info->softmax_scale = t->desc.attribute[KV_ATTR_SOFTMAX_SCALE].value;
    info->logit_softcap = t->desc.attribute[KV_ATTR_LOGIT_SOFTCAP].value;
    for (int32_t i = 0; i < half; i++)
        t->inv_freq[i] = pow(info->rope_theta, -2.0 * i / t->shape.head_dim);
    if (found[KV_MODEL_INV_FREQ].presence == KV_DATASET)
        KV_TRY(kv_found_read_doubles(t, &found[KV_MODEL_INV_FREQ], t->inv_freq));
    for (int32_t i = 0; i < half; i++)
        if (!isfinite(t->inv_freq[i]))
            KV_RAISE(KV_E_DATA, "%s: /model/inv_freq is %g at index %d, expected finite numbers",
                     t->path, t->inv_freq[i], i);
    info->inv_freq = t->inv_freq;
out:
    free(x);
    return st;
}

/* Provenance of a corpus: attributes seed and corpus (or task) of the requests. The smallest seed counts, because `train` must
 * not see a single held-out one. */
static kv_status load_corpus(kv_trace *t, hid_t group, const char *path) {
    kv_status st = KV_OK;
    char *corpus = NULL;
    kv_h5_number seed;
    KV_TRY(in_file(t, kv_h5_get_number(group, path, "seed", &seed)));
    KV_TRY(in_file(t, kv_h5_get_text(group, path, "corpus", &corpus)));
    if (!corpus) KV_TRY(in_file(t, kv_h5_get_text(group, path, "task", &corpus)));
    if (!corpus || strncmp(corpus, "reasoning", 9) != 0) goto out;
    if (!seed.present) t->info.has_unknown_seed = true;
    if (!seed.present) goto out;
    if (!t->info.has_corpus || seed.bits < t->info.corpus_seed) t->info.corpus_seed = seed.bits;
    t->info.has_corpus = true;
out:
    free(corpus);
    return st;
}

static kv_status load_provenance(kv_trace *t) {
    kv_status st = KV_OK;
    char *hash = NULL;
    hid_t object = -1;
    KV_TRY(in_file(t, kv_h5_get_text(t->file, "/", "trace_id", &t->trace_id)));
    KV_TRY(in_file(t, kv_h5_get_text(t->file, "/", "title", &t->title)));
    KV_TRY(in_file(t, kv_h5_get_text(t->file, "/", "source", &t->source)));
    KV_TRY(in_file(t, kv_h5_get_text(t->file, "/", "content_xxh3", &hash)));
    KV_H5_TRY(object, H5Oopen(t->file, "/model", H5P_DEFAULT), KV_E_DATA,
              "%s: /model cannot be opened", t->path);
    KV_TRY(in_file(t, kv_h5_get_text(object, "/model", "weights_xxh3", &t->model_hash)));
    snprintf(t->info.content_hash, sizeof t->info.content_hash, "%s", hash ? hash : "");
    t->info.trace_id = t->trace_id;
    t->info.title = t->title ? t->title : "";
    t->info.source = t->source ? t->source : "";
    t->info.model_hash = t->model_hash ? t->model_hash : "";
    for (int32_t r = 0; r < t->desc.n_request; r++) {
        const char *path = t->desc.request[r].path;
        kv_h5_close(object);
        KV_H5_TRY(object, H5Oopen(t->file, path, H5P_DEFAULT), KV_E_DATA, "%s: %s cannot be opened",
                  t->path, path);
        KV_TRY(load_corpus(t, object, path));
    }
out:
    free(hash);
    kv_h5_close(object);
    return st;
}

static kv_status load_gate_shift(kv_trace *t) {
    kv_status st = KV_OK;
    const kv_found *f = &t->desc.request[0].item[KV_ITEM_GATE];
    kv_h5_number shift = {0};
    hid_t set = -1;
    t->info.gate_shift = -1;
    if (!t->info.has_gate) goto out;
    KV_H5_TRY(set, H5Dopen2(t->file, f->path, H5P_DEFAULT), KV_E_DATA, "%s: %s cannot be opened",
              t->path, f->path);
    KV_TRY(in_file(t, kv_h5_get_number(set, f->path, "shift", &shift)));
    if (shift.present && shift.whole && fabs(shift.value) < 1e6)
        t->info.gate_shift = (int32_t)shift.value;
out:
    kv_h5_close(set);
    return st;
}

kv_status kv_trace_load_values(kv_trace *t) {
    kv_status st = KV_OK;
    kv_trace_info *info = &t->info;
    kv_element k = t->desc.request[0].item[KV_ITEM_K].element;
    info->path = t->path;
    info->n_layer = t->shape.n_layer;
    info->n_q_head = t->shape.n_q_head;
    info->n_kv_head = t->shape.n_kv_head;
    info->head_dim = t->shape.head_dim;
    info->d_model = t->shape.d_model;
    info->type = k == KV_EL_F16 ? KV_F16 : k == KV_EL_BF16 ? KV_BF16 : KV_F32;
    info->has_hidden = in_all(t, KV_ITEM_HIDDEN);
    info->has_gate = in_all(t, KV_ITEM_GATE);
    info->has_lse = in_all(t, KV_ITEM_LSE);
    KV_TRY(load_tokens(t));
    KV_TRY(check_query_pos(t));
    KV_TRY(load_documents(t));
    KV_TRY(load_model(t));
    KV_TRY(kv_trace_load_kinds(t));
    KV_TRY(load_gate_shift(t));
    KV_TRY(load_provenance(t));
out:
    return st;
}
