/* Learned scorers in use (maths.md 5, 6; contract.md 2): weights by name from input->weights, one document of one layer at a time.
 *
 * One lane (KV head) takes blocks of tokens, of any length, and gives the score of a token once its window has passed; the score of
 * a whole document and the score while decoding come from the same calls and are the same bits. The recurrence is the step form of
 * maths.md 6.2; the chunkwise form (reference/scorer_net.h) is for training. */
#ifndef KV_SCORER_H
#define KV_SCORER_H

#include "policies/policy.h"
#include "reference/scorer_net.h"

/* Weights of one layer. */
typedef struct kv_scorer {
    kv_net_spec spec;
    kv_net_layout layout;
    int32_t n_kv_head, head_dim;
    float *param;      /* [n_kv_head][layout.n_param]; matrices transposed, see scorer.c */
    double *log_gamma; /* [n_kv_head] */
} kv_scorer;

/* Reads the layer of input->span. KV_E_DATA names the file and what does not fit (policy, window, layer, heads, head size, hidden
 * states); KV_E_USAGE without weights. */
kv_status kv_scorer_open(const kv_policy_input *input, const char *policy, kv_scorer *out);
void kv_scorer_close(kv_scorer *s);

/* log gamma [n_kv_head], target power (INFINITY for max) and group reduction that the weights were trained on. */
kv_status kv_scorer_target(const kv_policy_input *input, double *power, bool *target_mean,
                           double *log_gamma);

/* State of one KV head over one document. */
typedef struct kv_scorer_lane kv_scorer_lane;
enum { KV_SCORER_ROWS = 256 };

kv_status kv_scorer_lane_open(const kv_scorer *s, int32_t head, kv_scorer_lane **out);
void kv_scorer_lane_close(kv_scorer_lane *lane); /* NULL is legal */
/* The next n <= KV_SCORER_ROWS tokens: k, v [n][head_dim], hidden [n][d_model] or NULL. */
void kv_scorer_lane_rows(kv_scorer_lane *lane, int32_t n, const float *k, const float *v,
                         const float *hidden);
/* Absorbs the next of these rows; returns its position u. */
int32_t kv_scorer_lane_step(kv_scorer_lane *lane);
/* Score of token t, u - window <= t <= u: at t = u - window the final one, before that the part known already. */
float kv_scorer_lane_score(const kv_scorer_lane *lane, int32_t t);

/* rhat [n_kv_head][stride]: score of every token of the span, before the decay term. */
kv_status kv_mlp_scores(const kv_policy_input *input, float *rhat);
kv_status kv_mlstm_scores(const kv_policy_input *input, float *rhat);

/* Static priorities [n_kv_head][stride] from the scores that `scores` (of a device table) gives and the weights' decay. */
kv_status kv_scorer_priority(const kv_policy_input *input,
                             kv_status (*scores)(const kv_policy_input *input, float *rhat),
                             float *priority);

/* Decoding token by token, all KV heads of a layer: the hooks of kv_stream_hooks. */
kv_status kv_scorer_stream_open(const kv_policy_input *input, const char *policy, void **state);
kv_status kv_scorer_stream_push(void *state, int32_t u, const float *k, const float *v,
                                const float *hidden);
kv_status kv_scorer_stream_priority(void *state, int32_t t, float *out);
void kv_scorer_stream_close(void *state);

#endif
