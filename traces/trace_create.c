/* Everything of a new trace that does not depend on its tensors' values: attributes, dimension scales, tokens, empty tensors. */
#include <hdf5_hl.h>

#include "reference/core/mem.h"
#include "traces/trace_writer.h"

const uint16_t kv_trace_stripe[KV_REQUEST_ITEMS] = {
    [KV_ITEM_Q] = 256,     [KV_ITEM_K] = 256,    [KV_ITEM_V] = 256,
    [KV_ITEM_HIDDEN] = 64, [KV_ITEM_LSE] = 4096,
};

static const char *const long_name[KV_REQUEST_ITEMS] = {
    [KV_ITEM_TOKEN] = "token ids",
    [KV_ITEM_DOC_START] = "first token of each document: attention was cut before it",
    [KV_ITEM_POSITION] = "RoPE positions",
    [KV_ITEM_KIND] = "kind of token",
    [KV_ITEM_SCORED] = "how the token counts in accuracy",
    [KV_ITEM_QUERY_POS] = "positions with recorded queries",
    [KV_ITEM_Q] = "queries after RoPE",
    [KV_ITEM_K] = "keys after RoPE, as cached",
    [KV_ITEM_V] = "values, as cached",
    [KV_ITEM_HIDDEN] = "residual stream entering the layer, before its norm",
    [KV_ITEM_LSE] = "log-sum-exp of the causal logits of each query, natural logarithm",
};

/* shape and chunk: n_dim extents; chunk NULL: contiguous. A float type is closed by the caller. */
static kv_status create_set(hid_t group, const char *name, hid_t type, int n_dim,
                            const hsize_t *shape, const hsize_t *chunk, hid_t *out) {
    kv_status st = KV_OK;
    hid_t space = H5Screate_simple(n_dim, shape, NULL);
    hid_t creation = chunk ? kv_h5_chunked(n_dim, chunk) : kv_h5_creation(H5P_DATASET_CREATE);
    KV_H5_TRY(*out, H5Dcreate2(group, name, type, space, H5P_DEFAULT, creation, H5P_DEFAULT),
              KV_E_IO, "%s: cannot be created", name);
out:
    kv_h5_close(creation);
    kv_h5_close(space);
    return st;
}

/* One-dimensional data set with its values. */
static kv_status put_vector(hid_t group, const char *name, hid_t file_type, hid_t memory_type,
                            int32_t n, bool chunked, const void *value, hid_t *out) {
    kv_status st = KV_OK;
    hsize_t shape = (hsize_t)n;
    *out = -1;
    KV_TRY(create_set(group, name, file_type, 1, &shape, chunked ? &shape : NULL, out));
    if (H5Dwrite(*out, memory_type, H5S_ALL, H5S_ALL, H5P_DEFAULT, value) < 0)
        KV_H5_RAISE(KV_E_IO, "%s: cannot be written", name);
out:
    return st;
}

static kv_status put_named(hid_t loc, const char *name, const char *text) {
    return text ? kv_h5_put_text(loc, name, text) : KV_OK;
}

static kv_status put_i32(hid_t loc, const char *name, int32_t value) {
    return kv_h5_put(loc, name, H5T_STD_I32LE, H5T_NATIVE_INT32, 0, &value);
}

static kv_status put_f64(hid_t loc, const char *name, double value) {
    return kv_h5_put(loc, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, 0, &value);
}

static kv_status put_root(kv_trace_writer *w, const kv_trace_spec *spec) {
    kv_status st = KV_OK;
    const uint32_t version[3] = {1, 0, 0};
    KV_TRY(kv_h5_put_text(w->file, "Conventions", "KVTRACE-1.0"));
    KV_TRY(kv_h5_put(w->file, "schema_version", H5T_STD_U32LE, H5T_NATIVE_UINT32, 3, version));
    KV_TRY(put_named(w->file, "title", spec->title));
    KV_TRY(put_named(w->file, "source", spec->source));
    KV_TRY(put_named(w->file, "history", spec->history));
    KV_TRY(put_named(w->file, "producer", spec->producer));
    KV_TRY(kv_h5_put_text(w->file, "profile", spec->hidden ? "qk hidden" : "qk"));
out:
    return st;
}

/* A scale 0, 1, … or `value`, attachable to the dimensions of tensors. */
static kv_status put_scale(kv_trace_writer *w, kv_model_item item, int32_t n,
                           const int32_t *value) {
    kv_status st = KV_OK;
    int32_t *count = NULL;
    const char *name = kv_model_item_path[item] + 1;
    KV_NEW(count, n);
    for (int32_t i = 0; i < n; i++) count[i] = value ? value[i] : i;
    KV_TRY(put_vector(w->file, name, H5T_STD_I32LE, H5T_NATIVE_INT32, n, false, count,
                      &w->scale[item]));
    if (H5DSset_scale(w->scale[item], name) < 0)
        KV_H5_RAISE(KV_E_IO, "%s: cannot become a dimension scale", name);
out:
    free(count);
    return st;
}

static kv_status put_model(kv_trace_writer *w, const kv_trace_spec *spec) {
    kv_status st = KV_OK;
    int32_t *window = NULL;
    hid_t model = -1, set = -1, creation = kv_h5_creation(H5P_GROUP_CREATE);
    KV_H5_TRY(model, H5Gcreate2(w->file, "model", H5P_DEFAULT, creation, H5P_DEFAULT), KV_E_IO,
              "/model: cannot be created");
    KV_TRY(put_i32(model, "n_layer",
                   spec->n_model_layer > spec->n_layer ? spec->n_model_layer : spec->n_layer));
    KV_TRY(put_i32(model, "n_q_head", spec->n_q_head));
    KV_TRY(put_i32(model, "n_kv_head", spec->n_kv_head));
    KV_TRY(put_i32(model, "head_dim", spec->head_dim));
    KV_TRY(put_i32(model, "d_model", spec->d_model));
    KV_TRY(put_f64(model, "rope_theta", spec->rope_theta));
    KV_TRY(kv_h5_put_text(model, "rope_kind", "rotate_half"));
    KV_TRY(put_f64(model, "softmax_scale", spec->softmax_scale));
    KV_TRY(put_f64(model, "logit_softcap", spec->logit_softcap));
    KV_TRY(put_i32(model, "keys_are_rotated", 1));
    KV_TRY(put_named(model, "weights_xxh3", spec->model_hash));
    KV_NEW(window, spec->n_layer);
    for (int32_t i = 0; i < spec->n_layer; i++) window[i] = -1;
    KV_TRY(put_vector(model, "window", H5T_STD_I32LE, H5T_NATIVE_INT32, spec->n_layer, false,
                      window, &set));
    if (spec->inv_freq) {
        kv_h5_close(set);
        KV_TRY(put_vector(model, "inv_freq", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, spec->head_dim / 2,
                          false, spec->inv_freq, &set));
    }
    KV_TRY(put_scale(w, KV_SCALE_LAYER, spec->n_layer, spec->layer_id));
    KV_TRY(put_scale(w, KV_SCALE_KV_HEAD, spec->n_kv_head, NULL));
    KV_TRY(put_scale(w, KV_SCALE_Q_HEAD, spec->n_q_head, NULL));
    KV_TRY(put_scale(w, KV_SCALE_DIM, spec->head_dim, NULL));
out:
    kv_h5_close(set);
    kv_h5_close(model);
    kv_h5_close(creation);
    free(window);
    return st;
}

/* flag_meanings of u8 data sets: kind and scored. */
static kv_status put_flags(hid_t set, const char *meanings, size_t n) {
    kv_status st = KV_OK;
    uint8_t value[16];
    for (size_t i = 0; i < n; i++) value[i] = (uint8_t)i;
    KV_TRY(kv_h5_put(set, "flag_values", H5T_STD_U8LE, H5T_NATIVE_UINT8, n, value));
    KV_TRY(kv_h5_put_text(set, "flag_meanings", meanings));
out:
    return st;
}

static kv_status put_tokens(kv_trace_writer *w, const kv_trace_spec *spec) {
    kv_status st = KV_OK;
    int32_t *count = NULL, zero = 0;
    KV_NEW(count, spec->n_token);
    for (int32_t i = 0; i < spec->n_token; i++) count[i] = i;
    const struct {
        kv_request_item item;
        const void *value;
        int32_t n;
        bool byte;
        const char *meanings;
        size_t n_meaning;
    } set[] = {
        {KV_ITEM_TOKEN, spec->token, spec->n_token, false, NULL, 0},
        {KV_ITEM_DOC_START, spec->doc_start ? spec->doc_start : &zero,
         spec->doc_start ? spec->n_document : 1, false, NULL, 0},
        {KV_ITEM_POSITION, spec->position ? spec->position : count, spec->n_token, false, NULL, 0},
        {KV_ITEM_KIND, spec->kind, spec->n_token, true,
         "special value scratch name structure filler equation", 7},
        {KV_ITEM_SCORED, spec->scored, spec->n_token, true, "none deterministic recall result", 4},
        {KV_ITEM_QUERY_POS, count, spec->n_token, false, NULL, 0},
    };
    for (size_t i = 0; i < sizeof set / sizeof *set; i++) {
        hid_t *id = &w->tensor[set[i].item];
        if (!set[i].value) continue;
        KV_TRY(put_vector(w->request, kv_request_item_name[set[i].item],
                          set[i].byte ? H5T_STD_U8LE : H5T_STD_I32LE,
                          set[i].byte ? H5T_NATIVE_UINT8 : H5T_NATIVE_INT32, set[i].n, true,
                          set[i].value, id));
        KV_TRY(kv_h5_put_text(*id, "long_name", long_name[set[i].item]));
        KV_TRY(kv_h5_put_text(*id, "units", "1"));
        if (set[i].meanings) KV_TRY(put_flags(*id, set[i].meanings, set[i].n_meaning));
    }
    if (H5DSset_scale(w->tensor[KV_ITEM_QUERY_POS], "query_pos") < 0)
        KV_H5_RAISE(KV_E_IO, "query_pos: cannot become a dimension scale");
out:
    free(count);
    return st;
}

/* A tensor [layer]([head])[token]([width]) with dimension scales; scales are given per dimension, -1: none. */
static kv_status create_tensor(kv_trace_writer *w, kv_request_item item, kv_dtype type, int n_dim,
                               const hsize_t *shape, int token_axis, const hid_t *scale) {
    kv_status st = KV_OK;
    hsize_t chunk[4], stripe = kv_trace_stripe[item];
    hid_t id = kv_h5_float_type(type);
    for (int i = 0; i < n_dim; i++)
        chunk[i] = i < token_axis ? 1 : i > token_axis || shape[i] < stripe ? shape[i] : stripe;
    KV_TRY(create_set(w->request, kv_request_item_name[item], id, n_dim, shape, chunk,
                      &w->tensor[item]));
    KV_TRY(kv_h5_put_text(w->tensor[item], "long_name", long_name[item]));
    KV_TRY(kv_h5_put_text(w->tensor[item], "units", "1"));
    for (unsigned i = 0; i < (unsigned)n_dim; i++)
        if (scale[i] >= 0 && H5DSattach_scale(w->tensor[item], scale[i], i) < 0)
            KV_H5_RAISE(KV_E_IO, "%s: a dimension scale cannot be attached",
                        kv_request_item_name[item]);
out:
    kv_h5_close(id);
    return st;
}

static kv_status create_tensors(kv_trace_writer *w, const kv_trace_spec *spec) {
    kv_status st = KV_OK;
    hsize_t L = (hsize_t)w->n_layer, T = (hsize_t)w->n_token, d = (hsize_t)w->head_dim;
    hsize_t q_shape[] = {L, (hsize_t)w->n_q_head, T, d},
            k_shape[] = {L, (hsize_t)w->n_kv_head, T, d};
    hsize_t hidden_shape[] = {L, T, (hsize_t)w->d_model};
    hid_t layer = w->scale[KV_SCALE_LAYER], dim = w->scale[KV_SCALE_DIM];
    hid_t query = w->tensor[KV_ITEM_QUERY_POS];
    hid_t q_scale[] = {layer, w->scale[KV_SCALE_Q_HEAD], query, dim};
    hid_t k_scale[] = {layer, w->scale[KV_SCALE_KV_HEAD], -1, dim};
    hid_t hidden_scale[] = {layer, -1, -1};
    KV_TRY(create_tensor(w, KV_ITEM_Q, w->type, 4, q_shape, 2, q_scale));
    KV_TRY(create_tensor(w, KV_ITEM_K, w->type, 4, k_shape, 2, k_scale));
    KV_TRY(create_tensor(w, KV_ITEM_V, w->type, 4, k_shape, 2, k_scale));
    if (spec->hidden)
        KV_TRY(create_tensor(w, KV_ITEM_HIDDEN, KV_BF16, 3, hidden_shape, 1, hidden_scale));
    if (spec->lse) KV_TRY(create_tensor(w, KV_ITEM_LSE, KV_F32, 3, q_shape, 2, q_scale));
out:
    return st;
}

static kv_status put_request(kv_trace_writer *w, const kv_trace_spec *spec) {
    kv_status st = KV_OK;
    hid_t requests = -1, creation = kv_h5_creation(H5P_GROUP_CREATE);
    KV_H5_TRY(requests, H5Gcreate2(w->file, "requests", H5P_DEFAULT, creation, H5P_DEFAULT),
              KV_E_IO, "/requests: cannot be created");
    KV_H5_TRY(w->request, H5Gcreate2(requests, "r00000", H5P_DEFAULT, creation, H5P_DEFAULT),
              KV_E_IO, "/requests/r00000: cannot be created");
    KV_TRY(put_i32(w->request, "n_prompt", 0));
    KV_TRY(put_i32(w->request, "n_total", spec->n_token));
    KV_TRY(put_i32(w->request, "n_query", spec->n_token));
    KV_TRY(kv_h5_put_text(w->request, "sampler", "teacher forcing"));
    KV_TRY(put_named(w->request, "task", spec->task));
    if (spec->has_corpus) {
        KV_TRY(put_named(w->request, "corpus", spec->corpus));
        KV_TRY(
            kv_h5_put(w->request, "seed", H5T_STD_U64LE, H5T_NATIVE_UINT64, 0, &spec->corpus_seed));
    }
    KV_TRY(put_tokens(w, spec));
    KV_TRY(create_tensors(w, spec));
out:
    kv_h5_close(requests);
    kv_h5_close(creation);
    return st;
}

kv_status kv_trace_writer_create(kv_trace_writer *w, const kv_trace_spec *spec) {
    kv_status st = KV_OK;
    KV_TRY(put_root(w, spec));
    KV_TRY(put_model(w, spec));
    KV_TRY(put_request(w, spec));
out:
    return st;
}
