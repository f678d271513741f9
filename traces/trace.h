/* Traces KVTRACE-1.0 in HDF5 (contract.md 4, engineering.md 2c): reader and writer. One layer is readable without the others. */
#ifndef KV_TRACE_H
#define KV_TRACE_H

#include "policies/policy.h"
#include "reference/core/num.h"

typedef struct kv_trace kv_trace; /* an open trace, read only */

enum { KV_MOST_TOKENS = 1 << 28 }; /* of a request */

/* Shape and small datasets, valid while the trace is open. All requests are concatenated in name order. */
typedef struct kv_trace_info {
    const char *path, *trace_id, *title, *source; /* trace_id NULL when absent */
    char content_hash[33];                        /* recorded content_xxh3, "" when absent */
    int32_t n_layer, n_q_head, n_kv_head, head_dim, d_model;
    int32_t n_model_layer; /* layers of the model, or n_layer when unknown */
    /* /model n_layer cannot be the model's depth, as a layer has a higher id: n_model_layer is the least that it may be */
    bool depth_is_guess;
    double rope_theta, softmax_scale, logit_softcap;
    const double *inv_freq;  /* [head_dim/2], from /model/inv_freq or rope_theta */
    const int32_t *layer_id; /* [n_layer] */
    int32_t n_request;
    int64_t n_token; /* over all requests */
    int32_t n_document;
    const int64_t *doc_first; /* [n_document + 1], absolute; the last is n_token */
    const int32_t *doc_request, *doc_in_request; /* [n_document] */
    int32_t longest;              /* tokens of the longest document: S of budgets and bytes */
    const int32_t *token;         /* [n_token] */
    const int32_t *position;      /* [n_token] */
    const uint8_t *kind, *scored; /* [n_token], NULL when the trace has none */
    /* [n_kind_name] names of kinds (contract.md 4, or flag_meanings of the first request; others are renumbered) */
    const char *const *kind_name;
    int32_t n_kind_name;
    kv_dtype type; /* storage of q, k, v */
    bool has_hidden, has_gate, has_lse;
    int32_t gate_shift;   /* attribute of gate, -1 when absent */
    uint64_t corpus_seed; /* provenance, valid if has_corpus */
    bool has_corpus;
    bool has_unknown_seed;  /* some request names the corpus without its seed */
    const char *model_hash; /* weights hash recorded by `record`, "" when absent */
} kv_trace_info;

kv_status kv_trace_open(const char *path,
                        kv_trace **out); /* validates structure before the first data read */
void kv_trace_close(kv_trace *trace);
const kv_trace_info *kv_trace_get(const kv_trace *trace);

/* The first token whose position is not above that of the token before it in its document; -1: all rise. */
int64_t kv_trace_falling_position(const kv_trace_info *info);

/* The tensors of one layer over all tokens; spans of its documents point into it. */
typedef struct kv_trace_layer {
    /* [n_q_head | n_kv_head][n_token][head_dim], fp32, finite (KV_E_DATA otherwise) */
    float *q, *k, *v;
    /* [n_token][d_model], [n_kv_head][n_token], [n_q_head][n_token]; NULL when absent */
    float *hidden, *gate, *lse;
    int64_t n_token;
} kv_trace_layer;

/* `layer` is an index, not an id. want_hidden: read the hidden states too. */
kv_status kv_trace_read_layer(kv_trace *trace, int32_t layer, bool want_hidden,
                              kv_trace_layer *out);
void kv_trace_layer_free(kv_trace_layer *l);
/* The recorded gates of one layer alone, as in kv_trace_layer: *out [n_kv_head][n_token], owned; NULL when absent. */
kv_status kv_trace_read_gate(kv_trace *trace, int32_t layer, float **out);
/* The span of document `doc` in a layer that was read. */
void kv_trace_span(const kv_trace *trace, const kv_trace_layer *l, int32_t layer, int32_t doc,
                   kv_span *out);

/* score/<name>: f32[layer][kv_head][T] of kvpop:scores=trace. out [n_kv_head][n_token]; KV_E_NOINPUT when absent. delta [n_kv_head]
 * (NULL: not wanted). */
kv_status kv_trace_read_score(kv_trace *trace, const char *name, int32_t layer, float *out,
                              double *delta);

/* Recomputes content_xxh3 (contract.md 4). hex [33] */
kv_status kv_trace_content_hash(kv_trace *trace, char *hex);

/* Writer: one request, written layer by layer in order, appearing at `path` by rename on kv_trace_writer_close(w, true). */
typedef struct kv_trace_spec {
    const char *title, *source, *history, *producer, *task;
    int32_t n_layer, n_q_head, n_kv_head, head_dim, d_model, n_model_layer;
    const int32_t *layer_id; /* [n_layer] */
    double rope_theta, softmax_scale, logit_softcap;
    const double *inv_freq; /* [head_dim/2] or NULL */
    kv_dtype type;
    bool hidden, lse; /* which optional datasets follow */
    int32_t n_token, n_document;
    const int32_t *token, *position, *doc_start; /* position, doc_start NULL: defaults */
    const uint8_t *kind, *scored;                /* NULL: not written */
    const char *model_hash;
    bool has_corpus;
    uint64_t corpus_seed;
    const char *corpus; /* corpus name and version */
} kv_trace_spec;

typedef struct kv_trace_writer kv_trace_writer;
kv_status kv_trace_writer_open(const char *path, const kv_trace_spec *spec, kv_trace_writer **out);
/* q [n_q_head][stride][d], k, v [n_kv_head][stride][d], lse [n_q_head][stride] or NULL, hidden [n_token][d_model] or NULL. */
kv_status kv_trace_writer_layer(kv_trace_writer *w, const kv_span *span, const float *lse);
/* True after a layer was refused (KV_E_DATA) because a finite q, k or v exceeds the range of spec->type. */
bool kv_trace_writer_overflowed(const kv_trace_writer *w);
kv_status kv_trace_writer_close(kv_trace_writer *w,
                                bool keep); /* keep=false, or NULL: removes the unfinished file */

/* Files of decisions (evict.h5): /evict_at/<policy>[:<variant>]/b<budget>, i32[layer][kv_head][n_token]. */
kv_status kv_evict_read(const char *path, const char *item, int32_t budget, int32_t n_layer,
                        int32_t n_kv_head, int64_t n_token, int32_t *out);
/* Only whether it is there (KV_E_NOINPUT) with exactly this shape (KV_E_DATA). */
kv_status kv_evict_check(const char *path, const char *item, int32_t budget, int32_t n_layer,
                         int32_t n_kv_head, int64_t n_token);
/* The same as kv_evict_read for one document of one layer: out [n_kv_head][stride of the span], values as stored. Reads that part only. KV_E_NOINPUT
 * when the file, the item or the budget is absent; KV_E_DATA when layer, heads or tokens do not fit. */
kv_status kv_evict_read_span(const char *path, const char *item, int32_t budget,
                             const kv_span *span, int32_t *out);
typedef struct kv_evict_writer kv_evict_writer;
kv_status kv_evict_writer_open(const char *path, kv_evict_writer **out);
kv_status kv_evict_writer_add(kv_evict_writer *w, const char *item, int32_t budget, int32_t n_layer,
                              int32_t n_kv_head, int64_t n_token, const int32_t *evict_at);
kv_status kv_evict_writer_close(kv_evict_writer *w);

#endif
