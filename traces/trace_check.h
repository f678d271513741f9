/* The structural rules of KVTRACE-1.0 as a pure function over a plain description of what a file holds, so that every rule is
 * applied before the first data read and can be tested and fuzzed without HDF5. */
#ifndef KV_TRACE_CHECK_H
#define KV_TRACE_CHECK_H

#include <stdbool.h>
#include <stdint.h>

#include "reference/core/status.h"

/* Data sets in the order of content_xxh3 (contract.md 4). */
typedef enum kv_model_item {
    KV_MODEL_WINDOW,
    KV_MODEL_INV_FREQ,
    KV_SCALE_LAYER,
    KV_SCALE_KV_HEAD,
    KV_SCALE_Q_HEAD,
    KV_SCALE_DIM,
    KV_MODEL_ITEMS
} kv_model_item;
typedef enum kv_request_item {
    KV_ITEM_TOKEN,
    KV_ITEM_DOC_START,
    KV_ITEM_POSITION,
    KV_ITEM_KIND,
    KV_ITEM_SCORED,
    KV_ITEM_QUERY_POS,
    KV_ITEM_Q,
    KV_ITEM_K,
    KV_ITEM_V,
    KV_ITEM_HIDDEN,
    KV_ITEM_LSE,
    KV_ITEM_GATE,
    KV_REQUEST_ITEMS
} kv_request_item;

typedef enum kv_model_attribute {
    KV_ATTR_N_LAYER,
    KV_ATTR_N_Q_HEAD,
    KV_ATTR_N_KV_HEAD,
    KV_ATTR_HEAD_DIM,
    KV_ATTR_D_MODEL,
    KV_ATTR_ROPE_THETA,
    KV_ATTR_SOFTMAX_SCALE,
    KV_ATTR_LOGIT_SOFTCAP,
    KV_ATTR_KEYS_ARE_ROTATED,
    KV_MODEL_ATTRIBUTES
} kv_model_attribute;

typedef enum kv_element { /* a set of them is a bit mask 1 << element */
                          KV_EL_INT,
                          KV_EL_F16,
                          KV_EL_BF16,
                          KV_EL_F32,
                          KV_EL_F64,
                          KV_EL_OTHER
} kv_element;
typedef enum kv_presence { KV_ABSENT, KV_DATASET, KV_NOT_DATASET, KV_LINKED } kv_presence;
typedef enum kv_layout { KV_CHUNKED, KV_CONTIGUOUS, KV_OTHER_LAYOUT } kv_layout;

enum { KV_FOUND_DIMS = 4, KV_FOUND_FILTERS = 8 };

/* One data set as found. */
typedef struct kv_found {
    char *path; /* object path, for messages; NULL if absent */
    kv_presence presence;
    kv_element element;
    int32_t element_size; /* bytes */
    int32_t n_dim;        /* may exceed KV_FOUND_DIMS; then dim is not filled */
    int64_t dim[KV_FOUND_DIMS], chunk[KV_FOUND_DIMS];
    kv_layout layout;
    int32_t n_filter, filter[KV_FOUND_FILTERS]; /* n_filter may exceed KV_FOUND_FILTERS */
    uint32_t filter_missing;                    /* bit i: filter[i] is not available here */
    int32_t n_external;                         /* external storage files */
    int64_t chunks_written, bytes_stored;       /* chunked; contiguous */
} kv_found;

typedef struct kv_found_request {
    char *path;
    kv_found item[KV_REQUEST_ITEMS];
    kv_found *score; /* [n_score], in name order */
    int32_t n_score;
} kv_found_request;

typedef struct kv_found_attribute {
    bool present, whole;
    double value;
} kv_found_attribute;

typedef struct kv_trace_desc {
    const char *file;
    char *conventions; /* NULL: absent */
    bool has_version;
    double version[3];
    kv_found_attribute attribute[KV_MODEL_ATTRIBUTES];
    char *rope_kind; /* NULL: absent */
    kv_found model[KV_MODEL_ITEMS];
    kv_found_request *request; /* [n_request], in name order */
    int32_t n_request;
} kv_trace_desc;

/* What a valid description amounts to. */
typedef struct kv_trace_shape {
    int32_t n_layer, n_q_head, n_kv_head, head_dim, d_model;
    int32_t n_model_layer; /* /model n_layer: may exceed the stored layers */
    bool newer_minor;      /* written by a later 1.x */
} kv_trace_shape;

extern const char *const kv_model_attribute_name[KV_MODEL_ATTRIBUTES];
extern const char *const kv_model_item_path[KV_MODEL_ITEMS];     /* "/model/window" … */
extern const char *const kv_request_item_name[KV_REQUEST_ITEMS]; /* "token" … */

/* The rules for any data set: reached by a hard link, written completely, stored in the file itself by known filters, so that
 * reading it is bounded by the file's own size. */
kv_status kv_found_check(const char *file, const kv_found *found);

/* KV_E_DATA with file, object, found, expected and what to do at the first violated rule. */
kv_status kv_trace_check(const kv_trace_desc *desc, kv_trace_shape *out);

#endif
