/* Dynamic Memory Sparsification (maths.md 7): the gate of a KV head, attention under its soft mask, the gradients of both.
 *
 *   logit  = scale * net(x) + bias          x: [k;v] of the token, the normalised hidden state, or one key channel
 *   alpha  = sigmoid((logit + noise) / temp)
 *   score(u,t) = l(u,t) + [u - t >= window] log(1 - alpha_t)
 *
 * The gate of token t + shift decides about key t. At inference a token with logit > 0 leaves when it has passed the window. */
#ifndef KV_DMS_H
#define KV_DMS_H

#include "policies/policy.h"
#include "reference/scorer_net.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kv_dms_source { KV_DMS_KV, KV_DMS_HIDDEN, KV_DMS_CHANNEL } kv_dms_source;

typedef struct kv_dms_spec {
    kv_dms_source source;
    int32_t n_input; /* width of x */
    int32_t n_mlp;   /* hidden width of the net; 0: linear */
    int32_t channel; /* of the key, for KV_DMS_CHANNEL */
    double scale;
} kv_dms_spec;

/* Parameters of one head: w1 [n_mlp][n_input], b1 [n_mlp], w2 [n_mlp] (or weight [n_input] without a hidden layer), bias [1]. */
int64_t kv_dms_param(const kv_dms_spec *spec);

/* x [n][n_input] of one head from rows of k, v [n][head_dim] with `stride` elements between rows, or hidden [n][d_model] (divided by its
 * root mean square). */
void kv_dms_input(const kv_dms_spec *spec, int32_t n, int32_t head_dim, const float *k,
                  const float *v, int64_t stride, const float *hidden, float *x);

/* What exists for float (training) and double (checks of the gradients): reference/dms_real.h. */
#define REAL float
#define NAME(x) x##_f32
#include "reference/dms_real.h"
#undef REAL
#undef NAME
#define REAL double
#define NAME(x) x##_f64
#include "reference/dms_real.h"
#undef REAL
#undef NAME

/* Logistic noise of one draw, and the relaxed decision: alpha and log(1 - alpha). */
double kv_dms_noise(uint64_t seed, uint32_t step, uint32_t lane, uint32_t token);
double kv_dms_alpha(double logit, double noise, double temp, double *log_keep);

/* Compression wanted at a step (maths.md 7.5): from 1 to `ratio` over `ramp` steps; returns the share of marked tokens 1 - 1/CR. */
double kv_dms_target(double ratio, int64_t step, int64_t ramp);

/* The gates of a layer as weights give them (policy dms): param [n_kv_head][kv_dms_param], owned. KV_E_DATA when they do not fit. */
typedef struct kv_dms_gates {
    kv_dms_spec spec;
    int32_t shift; /* as trained */
    float *param;
} kv_dms_gates;
kv_status kv_dms_gates_open(const kv_policy_input *input, kv_dms_gates *out);
void kv_dms_gates_close(kv_dms_gates *gates);
/* Gate logits [n_kv_head][stride] of a span from weights. *shift: as trained. */
kv_status kv_dms_gate(const kv_policy_input *input, float *logit, int32_t *shift);

/* What gate logits do to the cache: a token is marked when the logit of the token `shift` later in its document is above 0 and then
 * leaves `window` queries after itself. doc_first [n_doc + 1]. */
typedef struct kv_dms_cache {
    int32_t n_doc, budget, window, shift;
    const int64_t *doc_first;
} kv_dms_cache;
/* Keys seen, added up over lanes, documents and queries u >= budget, when `offset` is added to every logit [n_lane][n_token]. */
int64_t kv_dms_kept(const kv_dms_cache *cache, int64_t n_lane, const float *logit, double offset);
/* Those queries, times n_lane. */
int64_t kv_dms_counted(const kv_dms_cache *cache, int64_t n_lane);
/* Raises *below to the largest of n logits that the offset leaves at most 0, lowers *above to the least that it brings above 0. */
void kv_dms_gap(int64_t n, const float *logit, double offset, float *below, float *above);

#ifdef __cplusplus
}
#endif

#endif
