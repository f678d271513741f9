/* What a policy is (types only): a const descriptor in its own file plus one line in policies.def.
 *
 * The whole behaviour of a policy on one document of one layer is one array,
 *     int32_t evict_at[n_kv_head][n_token]    first query position that no longer sees the token; KV_NEVER = it stays
 * (positions relative to the document). Shared code turns what the policy supplies into that array:
 *     priority   a static priority per (KV head, token)        -> ranks, running top-k, sinks, window   (maths.md 3)
 *     gate       keep or leave, decided once per token         -> delayed removal                       (maths.md 7)
 *     attention  a statistic of the attention over *retained* keys -> closed-loop slots                 (contract.md 1, 2)
 * A rare policy whose decisions come from elsewhere (file, oracle_exact) fills evict_at itself through `decide`. */
#ifndef KV_POLICY_H
#define KV_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "reference/core/param.h"
#include "reference/core/status.h"

#define KV_NEVER INT32_MAX
/* Budgets, sinks and windows are at most this, so that a sum of two, or of one and a position, is still an int32. */
enum { KV_MOST_ENTRIES = 1 << 30 };

/* One document of one layer: a window on the recorded tensors. Head h, token t of the document lies at
 * q + ((size_t)h * stride + t) * head_dim; the arrays [head][token] (gate, evict_at, scores) use the same stride. Query head i
 * belongs to KV head i / (n_q_head / n_kv_head). q and k are rotated (post RoPE, post norm), fp32. */
typedef struct kv_span {
    int32_t n_token; /* S of this document */
    int64_t stride;  /* tokens between two heads (>= n_token) */
    int32_t n_q_head, n_kv_head, head_dim;
    const float *q;     /* [n_q_head][stride][head_dim] */
    const float *k, *v; /* [n_kv_head][stride][head_dim] */
    /* [n_token][d_model], residual stream entering the layer; NULL when not recorded */
    const float *hidden;
    int32_t d_model;
    const float *gate;       /* [n_kv_head][stride], recorded DMS logits; NULL when not recorded */
    const int32_t *position; /* [n_token] RoPE positions; NULL: 0..n_token-1 */
    /* [head_dim/2] RoPE frequencies (rotate-half pairs c, c+d/2); NULL: unknown */
    const double *inv_freq;
    /* logit = scale * q.k, then softcap * tanh(logit / softcap) if softcap > 0 */
    float scale, softcap;
    int32_t layer_id;    /* the model's layer number */
    int32_t layer_index; /* index of the layer in the trace */
    int32_t n_layer;     /* layers of the model; 0: unknown */
    /* addresses of the random policy: request index, document index within it */
    int32_t request, document;
    int64_t first; /* absolute index of the document's first token among all tokens of the trace */
    struct kv_held *held; /* what a device keeps of this span (kv_ops.hold), or NULL */
} kv_span;

/* What belongs to the run, not to the policy. budget = sinks + window + k (maths.md 1). */
typedef struct kv_run {
    int32_t budget, sinks, window;
    uint64_t seed;
    double eps, oracle_delta; /* 1e-8, 2e-5 */
    bool target_mean;         /* group reduction of the oracle's target: mean instead of max */
} kv_run;

typedef enum kv_reduce { KV_REDUCE_MEAN, KV_REDUCE_MAX, KV_REDUCE_SUM } kv_reduce;

/* Closed-loop rule: at query u, after u's key is appended, every held t gets x = reduce over query heads of p_S(u->t), then
 * A[t] = decay * A[t] + x (a new key starts at 0); if more than budget keys are held the least A among t <= u - protect_recent
 * leaves (evict_at = u+1), among equal A the largest t. tova: decay 0; h2o, cumulative: decay 1. */
typedef struct kv_attention_rule {
    /* one set for all KV heads (reduce over all query heads) instead of one per KV head */
    bool per_layer;
    kv_reduce reduce;
    double decay;
    int32_t protect_recent; /* newest keys, u included, that may not leave */
} kv_attention_rule;

struct kv_dense;   /* reference/attention.h: policy-independent dense results of a span */
struct kv_ops;     /* reference/ops.h: the device that computes */
struct kv_tensors; /* reference/tensors.h: named weights with metadata */

/* Everything a hook may read. */
typedef struct kv_policy_input {
    const kv_span *span;
    const kv_run *run;
    const kv_params *params;
    const struct kv_tensors *weights; /* learned policies; NULL otherwise */
    /* dense results already known for this span, or NULL: compute them through ops */
    const struct kv_dense *dense;
    const struct kv_ops *ops;
    const float *trace_score; /* [n_kv_head][stride], recorded score/<policy>; NULL: not recorded */
    const double *trace_delta; /* [n_kv_head], its decay 1 - gamma */
} kv_policy_input;

typedef enum kv_policy_kind { KV_PRIORITY, KV_GATE, KV_ATTENTION } kv_policy_kind;

/* Incremental form of a priority policy for token-by-token decoding (slots). Positions are document-relative. */
typedef struct kv_stream_hooks {
    kv_status (*open)(const kv_policy_input *input,
                      void **state); /* reads shapes, run, params, weights; not q, k, v */
    /* Token u of every KV head enters the cache: k, v [n_kv_head][head_dim], hidden [d_model] or NULL. */
    kv_status (*push)(void *state, int32_t u, const float *k, const float *v, const float *hidden);
    /* Priority of token t for every KV head, asked once, after push of u = t + window. out [n_kv_head] */
    kv_status (*priority)(void *state, int32_t t, float *out);
    void (*close)(void *state);
} kv_stream_hooks;

typedef struct kv_policy {
    const char *name, *summary, *source; /* source: paper, section or equation of maths.md */
    kv_policy_kind kind;
    const kv_param *params; /* ends with a nameless entry; NULL: none */
    bool non_causal;        /* sees the future; flagged in every table */
    bool learned;           /* wants weights; has recall_own */
    bool needs_hidden;
    bool no_evict_at;  /* a bound without a cache (oracle_step): only retained mass is defined */
    int32_t max_token; /* longest document it accepts, 0: any (longer: KV_E_USAGE) */
    /* Exactly one group is set, by kind (or `decide`). Outputs are zeroed, strides as in the span. */
    kv_status (*priority)(const kv_policy_input *input,
                          float *priority); /* [n_kv_head][stride], no NaN */
    const kv_stream_hooks *stream;          /* NULL for non-causal policies */
    kv_status (*gate)(const kv_policy_input *input,
                      uint8_t *leaves); /* [n_kv_head][stride], 1: leaves after the window */
    kv_status (*rule)(const kv_policy_input *input, kv_attention_rule *rule);
    kv_status (*decide)(const kv_policy_input *input, int32_t *evict_at); /* [n_kv_head][stride] */
    /* Learned policies: the target they were trained on, for recall_own (power, reduce, log_gamma per KV head). NULL otherwise. */
    kv_status (*own_target)(const kv_policy_input *input, double *power, bool *target_mean,
                            double *log_gamma);
} kv_policy;

#endif
