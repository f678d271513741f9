/* Training traces in memory: inputs of the scorers and their targets, read and computed once, used in every epoch.
 *
 * Inputs keep the trace's own 16-bit format and live in an unlinked scratch file that is mapped into memory, so the system may push
 * them out when memory is short. */
#ifndef KV_EXPERIMENTS_TRAIN_SET_H
#define KV_EXPERIMENTS_TRAIN_SET_H

#include "reference/ops.h"
#include "traces/trace.h"

typedef struct kv_train_need {
    const kv_run *run;
    bool target; /* future-attention target r, as follows */
    double power;
    /* group mean instead of max; normaliser over the keys that the target itself would keep at the run's budget */
    bool mean, sparse;
    double log_gamma;         /* decay of that selection */
    bool hidden;              /* hidden states */
    bool queries;             /* q too */
    const char *cache_folder; /* dense results between runs; NULL: none */
    const kv_ops *ops;
} kv_train_need;

typedef struct kv_train_trace {
    char *path, hash[33];
    int64_t n_token;
    int32_t n_doc;
    int64_t *doc_first; /* [n_doc + 1] */
    kv_dtype type;
    void *kv;      /* [n_layer][n_kv_head][n_token][2 head_dim]: k then v of each token */
    void *q;       /* [n_layer][n_q_head][n_token][head_dim] or NULL */
    void *hidden;  /* bf16 [n_layer][n_token][d_model] or NULL */
    float *target; /* [n_layer][n_kv_head][n_token] or NULL */
    size_t mapped; /* bytes behind kv */
} kv_train_trace;

typedef struct kv_train_set {
    int32_t n_layer, n_q_head, n_kv_head, head_dim, d_model, longest;
    int32_t *layer_id; /* [n_layer] */
    float scale, softcap;
    char model_hash[65];
    bool has_hidden; /* every trace holds hidden states */
    kv_train_trace *trace;
    int32_t n_trace;
    double dense_seconds; /* spent on targets */
} kv_train_set;

/* Shapes, documents and hashes of all traces. `held_out` traces at the end of the list may have any seed; the others must not come
 * from a held-out seed of a corpus (below 2^31, contract.md 4), nor from an unknown one unless unknown_seeds. KV_E_USAGE on such a seed; KV_E_DATA when traces differ in model. */
kv_status kv_train_set_open(const char *const *path, int32_t n_path, int32_t held_out,
                            bool unknown_seeds, kv_train_set *out);
/* Reads inputs and computes targets. */
kv_status kv_train_set_load(kv_train_set *set, const kv_train_need *need);
void kv_train_set_free(kv_train_set *set);

/* One lane, widened: x [n_token][2 head_dim]. */
void kv_train_lane_kv(const kv_train_set *set, const kv_train_trace *t, int32_t layer, int32_t head,
                      float *x);

#endif
