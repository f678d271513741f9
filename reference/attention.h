/* CPU attention over one document of one layer: the dense sweep and masked attention under evict_at.
 *
 * Logits are fp32 or wider: l(u,t) = softcap(scale * q_u . k_t). Probabilities below 2^-126 count as 0 (contract.md 3). Sums over
 * queries are formed in double. Results are the same bytes for any thread count on one instruction set. */
#ifndef KV_ATTENTION_H
#define KV_ATTENTION_H

#include "policies/policy.h"

enum { KV_DENSE_POWERS = 8 };

/* What the dense sweep is asked for. E(u) = {sinks <= t <= u - window} (contract.md 3). */
typedef struct kv_dense_request {
    int32_t sinks, window;
    int32_t n_power;
    double power
        [KV_DENSE_POWERS]; /* of the future mass (maths.md 2.6); INFINITY: maximum over u instead of the mean */
    bool want_output; /* the attention output o */
    bool want_events; /* long mass and largest long-range probability of each query */
    /* [n_q_head][stride] normaliser of the column sums (sparse LSE, maths.md 2.4); NULL: dense */
    const float *lse;
} kv_dense_request;

/* Dense results of a span. Every array [n_q_head][stride] (query heads in order), owned by this struct, NULL if not asked for. */
typedef struct kv_dense {
    kv_dense_request request;
    int64_t stride;
    float *lse; /* natural log-sum-exp over t <= u */
    double *column
        [KV_DENSE_POWERS]; /* sum over u >= t + window of p(u->t)^power, or the maximum; not divided by N_t */
    float *long_mass; /* sum over E(u) of p */
    float *top_p;     /* largest p over E(u), formed as exp(l - max)/sum; 0 if E(u) is empty */
    int32_t *top_t;   /* its key, the smallest t among equals; -1 if E(u) is empty */
    float *o;         /* [n_q_head][stride][head_dim] */
} kv_dense;

kv_status kv_dense_compute(const kv_span *span, const kv_dense_request *request, kv_dense *out);
void kv_dense_free(kv_dense *d);

/* Masked attention: q sees t iff t <= u < evict_at[h][t]. Cost follows the kept set, not S^2. A query without a visible key has
 * output 0 and lse -INFINITY. */
typedef struct kv_masked_request {
    const int32_t *evict_at; /* [n_kv_head][stride] */
    int32_t sinks, window;   /* region of long_mass */
    /* pos=cache of streaming (contract.md 2): key i of the kept list rotated by i, query by count-1 */
    bool rerotate;
    bool want_output, want_long;
    float *o; /* receives the output, [n_q_head][stride][head_dim]; NULL: a new array does */
} kv_masked_request;

typedef struct kv_masked {
    float *o; /* [n_q_head][stride][head_dim] or NULL */
    /* [n_q_head][stride] over the visible keys; with rerotate of the re-rotated logits */
    float *lse;
    /* [n_q_head][stride] over visible keys in E(u), -INFINITY if none; or NULL. Original rotation. */
    float *lse_long;
    /* only with rerotate: lse of the original logits (retained mass uses it); else NULL */
    float *lse_orig;
} kv_masked;

kv_status kv_masked_compute(const kv_span *span, const kv_masked_request *request, kv_masked *out);
void kv_masked_free(kv_masked *m);

/* Dense causal attention output alone, for the model's forward pass: o [n_q_head][stride][head_dim]; lse may be NULL. */
kv_status kv_attend(const kv_span *span, float *o, float *lse);

#endif
