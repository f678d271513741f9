/* The scorer network of one KV head (contract.md 2 kvpop; maths.md 5, 6): what it is made of, how its parameters lie in memory and
 * in a weights file, and its forward and backward pass over whole documents for training.
 *
 *   f = silu(P x + pb)           x = [k;v] of the token, or the layer's hidden state
 *   q~, k~, v~ = Phi f           gates i, f = 15 tanh(pre/15), pre = w.f + b
 *   memory of maths.md 6.2, read for token t at t + window; h = num / sqrt(mean(num^2) + 1e-6 exp(-2m))
 *   rhat = a.silu(h) + W2.silu(W1 x + b1)
 *
 * kvpop_mlp is the last term alone. The paper's own reading is the same code with parts switched off. */
#ifndef KV_SCORER_NET_H
#define KV_SCORER_NET_H

#include "policies/policy.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kv_net_spec {
    bool recurrent; /* false: the MLP alone */
    bool delay;     /* read for token t at t + window, else at t */
    bool norm;      /* root-mean-square norm of the readout, else division by max(|den|, exp(-m)) */
    bool sigmoid_gate;      /* input gate logsigmoid(i) instead of i */
    bool hidden_input;      /* x is the hidden state instead of [k;v] */
    bool hidden_gate;       /* gates read the hidden state instead of f */
    int32_t n_input;        /* width of x */
    int32_t n_hidden;       /* d_model; 0 if not needed */
    int32_t n_feature;      /* width of f; 0: linear features, f = x */
    int32_t n_key, n_value; /* of the memory */
    int32_t n_mlp;          /* hidden width of the token's own MLP; 0: none */
    int32_t window;
} kv_net_spec;

typedef enum kv_net_part {                   /* order of the parameters of one head in memory */
                           KV_NET_FEATURE_W, /* [n_feature][n_input] */
                           KV_NET_FEATURE_B, /* [n_feature] */
                           KV_NET_PHI_Q, /* [n_key][width of f]; the three projections are one matrix */
                           KV_NET_PHI_K,
                           KV_NET_PHI_V, /* [n_value][width of f] */
                           KV_NET_GATE_I_W, /* [width of the gates' input]; the two gates are one matrix */
                           KV_NET_GATE_F_W,
                           KV_NET_GATE_I_B, /* [1] */
                           KV_NET_GATE_F_B,
                           KV_NET_READOUT, /* [n_value] */
                           KV_NET_MLP_W1,  /* [n_mlp][n_input] */
                           KV_NET_MLP_B1,  /* [n_mlp] */
                           KV_NET_MLP_W2,  /* [n_mlp] */
                           KV_NET_PARTS
} kv_net_part;

typedef struct kv_net_layout {
    struct {
        int64_t at;         /* first element; parts that the network lacks have no rows */
        int32_t rows, cols; /* cols 0: a vector of `rows` elements */
        const char *name;   /* "feature.weight", as in the file after "layers.{l}." */
    } part[KV_NET_PARTS];
    int64_t n_param;
} kv_net_layout;

int32_t kv_net_feature_width(const kv_net_spec *spec); /* width of f */
void kv_net_describe(const kv_net_spec *spec, kv_net_layout *out);
int64_t kv_net_part_size(const kv_net_layout *layout, kv_net_part part);

/* Starting values of head `lane` of `n_lane` (contract.md 2): parameters [n_param] of one head. */
void kv_net_init(const kv_net_spec *spec, uint64_t seed, int32_t lane, int32_t n_lane,
                 float *param);

/* delta = 1 - gamma = 1e-3 - (1e-3 - 1e-6) sigmoid(theta); log gamma = log1p(-delta) and its derivative by theta (NULL: not
 * wanted). maths.md 3.2 */
double kv_net_log_gamma(double theta, double *slope);

/* One head over all tokens of a trace. doc_first [n_doc + 1]: the memory is empty at each document's start. */
typedef struct kv_net_input_f32 {
    int64_t n_token;
    const float *x, *hidden; /* [n_token][n_input], [n_token][n_hidden] (NULL unless hidden_gate) */
    int32_t n_doc;
    const int64_t *doc_first;
    int32_t chunk; /* tokens per chunk of the recurrence; any length gives the same result */
} kv_net_input_f32;
typedef struct kv_net_input_f64 {
    int64_t n_token;
    const double *x, *hidden;
    int32_t n_doc;
    const int64_t *doc_first;
    int32_t chunk;
} kv_net_input_f64;

/* What the forward pass leaves for the backward pass; reusable for any head and trace of the same spec. */
typedef struct kv_net_tape_f32 kv_net_tape_f32;
typedef struct kv_net_tape_f64 kv_net_tape_f64;

/* rhat [n_token]. Then, for e = dL/drhat [n_token]: grad [n_param] is set to dL/dparam. */
kv_status kv_net_forward_f32(const kv_net_spec *spec, const float *param,
                             const kv_net_input_f32 *input, kv_net_tape_f32 **tape, float *rhat);
kv_status kv_net_backward_f32(const kv_net_spec *spec, const float *param,
                              const kv_net_input_f32 *input, kv_net_tape_f32 *tape, const float *e,
                              float *grad);
void kv_net_tape_free_f32(kv_net_tape_f32 *tape);
kv_status kv_net_forward_f64(const kv_net_spec *spec, const double *param,
                             const kv_net_input_f64 *input, kv_net_tape_f64 **tape, double *rhat);
kv_status kv_net_backward_f64(const kv_net_spec *spec, const double *param,
                              const kv_net_input_f64 *input, kv_net_tape_f64 *tape, const double *e,
                              double *grad);
void kv_net_tape_free_f64(kv_net_tape_f64 *tape);

#ifdef __cplusplus
}
#endif

#endif
