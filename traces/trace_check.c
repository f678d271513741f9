/* Structural rules of KVTRACE-1.0 (contract.md 4): versions, attributes, types, shapes, storage. */
#include "traces/trace_check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "reference/core/mem.h"
#include "traces/trace.h"

const char *const kv_model_attribute_name[KV_MODEL_ATTRIBUTES] = {
    "n_layer",    "n_q_head",      "n_kv_head",     "head_dim",        "d_model",
    "rope_theta", "softmax_scale", "logit_softcap", "keys_are_rotated"};
const char *const kv_model_item_path[KV_MODEL_ITEMS] = {
    "/model/window", "/model/inv_freq", "/layer", "/kv_head", "/q_head", "/dim"};
const char *const kv_request_item_name[KV_REQUEST_ITEMS] = {
    "token", "doc_start", "position", "kind",   "scored", "query_pos",
    "q",     "k",         "v",        "hidden", "lse",    "gate"};

/* Largest accepted values: far beyond any model, small enough that no product of sizes overflows. */
enum { MAX_LAYER = 4096, MAX_HEAD = 4096, MAX_HEAD_DIM = 4096, MAX_D_MODEL = 1 << 20 };
enum { MAX_REQUEST = 1 << 16 };
static const double max_layer_bytes = 1e12, max_chunk_bytes = 256.0 * 1024 * 1024;

/* Filters a reader may meet: what HDF5 brings, and plug-ins with their Debian packages. */
static const struct {
    int32_t id;
    const char *name, *package;
} known_filter[] = {
    {1, "deflate", "zlib"},
    {2, "shuffle", "libhdf5"},
    {3, "fletcher32", "libhdf5"},
    {4, "szip", "libaec0"},
    {307, "bzip2", "hdf5-filter-plugin"},
    {32000, "lzf", "hdf5-plugin-lzf"},
    {32001, "blosc", "hdf5-filter-plugin-blosc-serial"},
    {32004, "lz4", "hdf5-filter-plugin"},
};

/* What a data set must look like. Extents name sizes of the trace. */
typedef enum extent {
    NONE,
    LAYERS,
    Q_HEADS,
    KV_HEADS,
    TOKENS,
    HEAD_DIM,
    HALF_DIM,
    WIDTH,
    ANY
} extent;
typedef struct rule {
    bool required;
    uint32_t elements; /* mask */
    extent dim[KV_FOUND_DIMS];
} rule;

#define INTS (1u << KV_EL_INT)
#define QKV (1u << KV_EL_F16 | 1u << KV_EL_BF16 | 1u << KV_EL_F32)
#define REALS (1u << KV_EL_F32 | 1u << KV_EL_F64)

static const rule model_rule[KV_MODEL_ITEMS] = {
    [KV_MODEL_WINDOW] = {false, INTS, {LAYERS}},  [KV_MODEL_INV_FREQ] = {false, REALS, {HALF_DIM}},
    [KV_SCALE_LAYER] = {false, INTS, {LAYERS}},   [KV_SCALE_KV_HEAD] = {false, INTS, {KV_HEADS}},
    [KV_SCALE_Q_HEAD] = {false, INTS, {Q_HEADS}}, [KV_SCALE_DIM] = {false, INTS, {HEAD_DIM}},
};
static const rule request_rule[KV_REQUEST_ITEMS] = {
    [KV_ITEM_TOKEN] = {true, INTS, {TOKENS}},
    [KV_ITEM_DOC_START] = {false, INTS, {ANY}},
    [KV_ITEM_POSITION] = {false, INTS, {TOKENS}},
    [KV_ITEM_KIND] = {false, INTS, {TOKENS}},
    [KV_ITEM_SCORED] = {false, INTS, {TOKENS}},
    [KV_ITEM_QUERY_POS] = {false, INTS, {TOKENS}},
    [KV_ITEM_Q] = {true, QKV, {LAYERS, Q_HEADS, TOKENS, HEAD_DIM}},
    [KV_ITEM_K] = {true, QKV, {LAYERS, KV_HEADS, TOKENS, HEAD_DIM}},
    [KV_ITEM_V] = {true, QKV, {LAYERS, KV_HEADS, TOKENS, HEAD_DIM}},
    [KV_ITEM_HIDDEN] = {false, QKV, {LAYERS, TOKENS, WIDTH}},
    [KV_ITEM_LSE] = {false, QKV | REALS, {LAYERS, Q_HEADS, TOKENS}},
    [KV_ITEM_GATE] = {false, QKV | REALS, {LAYERS, KV_HEADS, TOKENS}},
};
static const rule score_rule = {false, REALS, {LAYERS, KV_HEADS, TOKENS}};

#define RAISE(...) KV_RAISE(KV_E_DATA, __VA_ARGS__)

static const char *element_name(uint32_t elements) {
    if (elements == INTS) return "integers";
    if (elements == REALS) return "f32 or f64";
    return elements == QKV ? "f16, bf16 or f32" : "floating point numbers";
}

static const char *found_name(kv_element e) {
    static const char *const name[] = {"integers", "f16", "bf16", "f32", "f64", "another type"};
    return name[e];
}

static int64_t extent_of(extent e, const kv_trace_shape *s, int64_t n_token) {
    switch (e) {
    case LAYERS: return s->n_layer;
    case Q_HEADS: return s->n_q_head;
    case KV_HEADS: return s->n_kv_head;
    case TOKENS: return n_token;
    case HEAD_DIM: return s->head_dim;
    case HALF_DIM: return s->head_dim / 2;
    case WIDTH: return s->d_model;
    case NONE:
    case ANY: break;
    }
    return -1;
}

static void format_dims(const int64_t *dim, int32_t n, char *out, size_t size) {
    size_t at = (size_t)snprintf(out, size, "[");
    for (int32_t i = 0; i < n && at < size; i++)
        at += (size_t)snprintf(out + at, size - at, "%s%lld", i ? "][" : "", (long long)dim[i]);
    if (at < size) snprintf(out + at, size - at, "]");
}

static kv_status check_filters(const char *file, const kv_found *f) {
    kv_status st = KV_OK;
    if (f->n_filter > KV_FOUND_FILTERS)
        RAISE("%s: %s has %d filters, at most %d are read; rewrite it with shuffle and deflate",
              file, f->path, f->n_filter, KV_FOUND_FILTERS);
    for (int32_t i = 0; i < f->n_filter; i++) {
        size_t n = sizeof known_filter / sizeof *known_filter, j = 0;
        while (j < n && known_filter[j].id != f->filter[i]) j++;
        if (j == n)
            RAISE("%s: %s uses the unknown filter %d; rewrite it with shuffle and deflate", file,
                  f->path, f->filter[i]);
        if (f->filter_missing >> i & 1)
            RAISE("%s: %s needs filter %d (%s), which is not installed; install %s or rewrite the "
                  "file with deflate",
                  file, f->path, f->filter[i], known_filter[j].name, known_filter[j].package);
    }
out:
    return st;
}

kv_status kv_found_check(const char *file, const kv_found *f) {
    kv_status st = KV_OK;
    double elements = 1, chunk = f->element_size, chunks = 1;
    if (f->presence == KV_LINKED)
        RAISE("%s: %s is a soft or external link; store the data set itself", file, f->path);
    if (f->presence != KV_DATASET) RAISE("%s: %s is not a data set", file, f->path);
    if (f->n_dim > KV_FOUND_DIMS)
        RAISE("%s: %s has %d dimensions, expected at most %d", file, f->path, f->n_dim,
              KV_FOUND_DIMS);
    if (f->layout == KV_OTHER_LAYOUT)
        RAISE("%s: %s is stored compact or virtual; store it contiguous or chunked", file, f->path);
    if (f->n_external)
        RAISE("%s: %s lies in external files; store it inside the trace", file, f->path);
    for (int32_t i = 0; i < f->n_dim; i++) elements *= (double)f->dim[i];
    if (f->layout == KV_CONTIGUOUS) {
        if ((double)f->bytes_stored != elements * f->element_size)
            RAISE("%s: %s holds %lld bytes, expected %.0f; it was not written completely", file,
                  f->path, (long long)f->bytes_stored, elements * f->element_size);
        goto out;
    }
    for (int32_t i = 0; i < f->n_dim; i++) {
        if (f->chunk[i] < 1) RAISE("%s: %s has an empty chunk", file, f->path);
        chunk *= (double)f->chunk[i];
        chunks *= ceil((double)f->dim[i] / (double)f->chunk[i]);
    }
    if (chunk > max_chunk_bytes)
        RAISE("%s: %s has chunks of %.0f bytes, at most %.0f are read; use [1][1][256][head_dim]",
              file, f->path, chunk, max_chunk_bytes);
    if ((double)f->chunks_written != chunks)
        RAISE("%s: %s has %lld of %.0f chunks; it was not written completely", file, f->path,
              (long long)f->chunks_written, chunks);
    KV_TRY(check_filters(file, f));
out:
    return st;
}

static kv_status check_found(const char *file, const kv_found *f, const char *path, const rule *r,
                             const kv_trace_shape *shape, int64_t n_token) {
    kv_status st = KV_OK;
    char found[128], expected[128];
    int64_t want[KV_FOUND_DIMS] = {0};
    int32_t n_dim = 0;
    if (f->presence == KV_ABSENT) {
        if (r->required) RAISE("%s: %s is missing; a trace must have it", file, path);
        goto out;
    }
    KV_TRY(kv_found_check(file, f));
    if (!(r->elements >> f->element & 1))
        RAISE("%s: %s holds %s (%d bytes each), expected %s", file, f->path, found_name(f->element),
              f->element_size, element_name(r->elements));
    while (n_dim < KV_FOUND_DIMS && r->dim[n_dim] != NONE) n_dim++;
    if (f->n_dim != n_dim)
        RAISE("%s: %s has %d dimensions, expected %d", file, f->path, f->n_dim, n_dim);
    bool equal = true;
    for (int32_t i = 0; i < n_dim; i++) {
        if (f->dim[i] < 1 || f->dim[i] > KV_MOST_TOKENS)
            RAISE("%s: %s has extent %lld in dimension %d, expected 1..%d", file, f->path,
                  (long long)f->dim[i], i, KV_MOST_TOKENS);
        want[i] = r->dim[i] == ANY ? f->dim[i] : extent_of(r->dim[i], shape, n_token);
        equal = equal && f->dim[i] == want[i];
    }
    format_dims(f->dim, n_dim, found, sizeof found);
    format_dims(want, n_dim, expected, sizeof expected);
    if (!equal)
        RAISE("%s: %s has shape %s, expected %s from the attributes of /model and the tokens", file,
              f->path, found, expected);
out:
    return st;
}

static kv_status check_version(const kv_trace_desc *d, bool *newer_minor) {
    kv_status st = KV_OK;
    int major = 0, minor = 0;
    if (!d->conventions)
        RAISE("%s: / has no attribute Conventions; expected \"KVTRACE-1.0\": is this a trace?",
              d->file);
    if (sscanf(d->conventions, "KVTRACE-%d.%d", &major, &minor) != 2)
        RAISE("%s: / has Conventions \"%.60s\", expected \"KVTRACE-1.0\": is this a trace?",
              d->file, d->conventions);
    if (!d->has_version)
        RAISE("%s: / has no attribute schema_version; expected the integers 1, 0, 0", d->file);
    if (major != 1 || d->version[0] != 1)
        RAISE("%s: / is of schema version %g.%g (Conventions %.60s), this program reads 1.x; "
              "update kvlab or convert the trace",
              d->file, d->version[0], d->version[1], d->conventions);
    *newer_minor = minor > 0 || d->version[1] > 0;
out:
    return st;
}

static const struct {
    double min, max;
    bool whole;
} attribute_rule[KV_MODEL_ATTRIBUTES] = {
    [KV_ATTR_N_LAYER] = {1, MAX_LAYER, true},       [KV_ATTR_N_Q_HEAD] = {1, MAX_HEAD, true},
    [KV_ATTR_N_KV_HEAD] = {1, MAX_HEAD, true},      [KV_ATTR_HEAD_DIM] = {2, MAX_HEAD_DIM, true},
    [KV_ATTR_D_MODEL] = {1, MAX_D_MODEL, true},     [KV_ATTR_ROPE_THETA] = {1e-30, 1e30, false},
    [KV_ATTR_SOFTMAX_SCALE] = {1e-30, 1e30, false}, [KV_ATTR_LOGIT_SOFTCAP] = {-1e30, 1e30, false},
    [KV_ATTR_KEYS_ARE_ROTATED] = {1, 1, true},
};

static kv_status check_model(const kv_trace_desc *d, kv_trace_shape *s) {
    kv_status st = KV_OK;
    for (int32_t i = 0; i < KV_MODEL_ATTRIBUTES; i++) {
        const kv_found_attribute *a = &d->attribute[i];
        const char *name = kv_model_attribute_name[i];
        if (!a->present) RAISE("%s: /model has no attribute %s; it is required", d->file, name);
        double min = attribute_rule[i].min, max = attribute_rule[i].max;
        if (!(a->value >= min && a->value <= max) || (attribute_rule[i].whole && !a->whole))
            RAISE("%s: /model attribute %s is %.9g, expected %s in %.9g..%.9g%s", d->file, name,
                  a->value, attribute_rule[i].whole ? "a whole number" : "a number", min, max,
                  i == KV_ATTR_KEYS_ARE_ROTATED ? "; version 1 reads rotated keys only" : "");
    }
    if (!d->rope_kind)
        RAISE("%s: /model has no attribute rope_kind; it is required (rotate_half)", d->file);
    if (strcmp(d->rope_kind, "rotate_half") != 0)
        RAISE("%s: /model attribute rope_kind is \"%.60s\", expected \"rotate_half\"; permute the "
              "head dimension of q and k to that pairing",
              d->file, d->rope_kind);
    const kv_found_attribute *a = d->attribute;
    s->n_model_layer = (int32_t)a[KV_ATTR_N_LAYER].value;
    s->n_q_head = (int32_t)a[KV_ATTR_N_Q_HEAD].value;
    s->n_kv_head = (int32_t)a[KV_ATTR_N_KV_HEAD].value;
    s->head_dim = (int32_t)a[KV_ATTR_HEAD_DIM].value;
    s->d_model = (int32_t)a[KV_ATTR_D_MODEL].value;
    if (s->n_q_head % s->n_kv_head)
        RAISE("%s: /model has n_q_head %d, expected a multiple of n_kv_head %d", d->file,
              s->n_q_head, s->n_kv_head);
    if (s->head_dim % 2)
        RAISE("%s: /model attribute head_dim is %d, expected an even number (RoPE pairs)", d->file,
              s->head_dim);
out:
    return st;
}

/* A trace may hold some layers of its model; then /layer says which. */
static kv_status check_layers(const kv_trace_desc *d, kv_trace_shape *s) {
    kv_status st = KV_OK;
    const kv_found *q = &d->request[0].item[KV_ITEM_Q];
    s->n_layer = s->n_model_layer;
    if (q->presence != KV_DATASET || q->n_dim != 4 || q->dim[0] == s->n_layer) goto out;
    if (q->dim[0] < 1 || q->dim[0] > s->n_model_layer ||
        d->model[KV_SCALE_LAYER].presence == KV_ABSENT)
        RAISE("%s: %s holds %lld layers but /model attribute n_layer is %d; a subset of the layers "
              "needs /layer with their numbers",
              d->file, q->path, (long long)q->dim[0], s->n_model_layer);
    s->n_layer = (int32_t)q->dim[0];
out:
    return st;
}

static kv_status check_request(const kv_trace_desc *d, const kv_found_request *r,
                               const kv_trace_shape *s) {
    kv_status st = KV_OK;
    char path[512];
    const kv_found *token = &r->item[KV_ITEM_TOKEN], *q = &r->item[KV_ITEM_Q];
    int64_t n_token = token->presence == KV_DATASET && token->n_dim == 1 ? token->dim[0] : -1;
    if (q->presence == KV_DATASET && q->n_dim == 4 && n_token > 0 && q->dim[2] != n_token)
        RAISE("%s: %s holds %lld queries for %lld tokens; version 1 needs the queries of all "
              "positions 0..T-1",
              d->file, q->path, (long long)q->dim[2], (long long)n_token);
    for (int32_t i = 0; i < KV_REQUEST_ITEMS; i++) {
        snprintf(path, sizeof path, "%.400s/%s", r->path, kv_request_item_name[i]);
        KV_TRY(check_found(d->file, &r->item[i], path, &request_rule[i], s, n_token));
    }
    double layer = 4.0 * (double)n_token * ((double)s->n_q_head * s->head_dim + s->d_model);
    if (layer > max_layer_bytes)
        RAISE("%s: %s needs %.3g bytes per layer, at most %.3g are handled; split the request",
              d->file, r->path, layer, max_layer_bytes);
    if (r->item[KV_ITEM_DOC_START].presence == KV_DATASET &&
        r->item[KV_ITEM_DOC_START].dim[0] > n_token)
        RAISE("%s: %s/doc_start lists %lld documents for %lld tokens", d->file, r->path,
              (long long)r->item[KV_ITEM_DOC_START].dim[0], (long long)n_token);
    if (r->item[KV_ITEM_K].element != d->request[0].item[KV_ITEM_K].element ||
        r->item[KV_ITEM_V].element != d->request[0].item[KV_ITEM_K].element)
        RAISE("%s: %s/k holds %s and /v %s, the first request's k holds %s; cached keys and values "
              "of a trace need one type",
              d->file, r->path, found_name(r->item[KV_ITEM_K].element),
              found_name(r->item[KV_ITEM_V].element),
              found_name(d->request[0].item[KV_ITEM_K].element));
    for (int32_t i = 0; i < r->n_score; i++)
        KV_TRY(check_found(d->file, &r->score[i], r->score[i].path, &score_rule, s, n_token));
out:
    return st;
}

kv_status kv_trace_check(const kv_trace_desc *d, kv_trace_shape *out) {
    kv_status st = KV_OK;
    *out = (kv_trace_shape){0};
    KV_TRY(check_version(d, &out->newer_minor));
    KV_TRY(check_model(d, out));
    if (d->n_request < 1 || d->n_request > MAX_REQUEST)
        RAISE("%s: /requests holds %d groups, expected 1..%d", d->file, d->n_request, MAX_REQUEST);
    KV_TRY(check_layers(d, out));
    for (int32_t i = 0; i < d->n_request; i++) KV_TRY(check_request(d, &d->request[i], out));
    for (int32_t i = 0; i < KV_MODEL_ITEMS; i++)
        KV_TRY(check_found(d->file, &d->model[i], kv_model_item_path[i], &model_rule[i], out, 0));
out:
    return st;
}
