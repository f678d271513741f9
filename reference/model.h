/* CPU engine for decoder-only transformers of the Qwen3, Qwen2/2.5 and Llama families: prefill of a whole document, layer by
 * layer, with hooks that see (and may replace) every layer's attention. Arithmetic fp32; weights stay in their stored format. */
#ifndef KV_MODEL_H
#define KV_MODEL_H

#include "policies/policy.h"
#include "reference/core/num.h"
#include "reference/tensors.h"

typedef enum kv_family { KV_QWEN3, KV_QWEN2, KV_LLAMA } kv_family;

typedef struct kv_model_config {
    kv_family family;
    int32_t n_layer, n_q_head, n_kv_head, head_dim, d_model, d_ff, vocab, max_position;
    double rms_eps, rope_theta;
    bool tied_embedding, qkv_bias, qk_norm;
    bool llama3_scaling;
    double rope_factor, rope_low, rope_high; /* llama3: factor, low_freq_factor, high_freq_factor */
    int32_t rope_original;                   /* llama3: original_max_position_embeddings */
    kv_dtype compute_type; /* torch_dtype of the config: what the weights were trained in */
    int32_t bos, eos;      /* -1 when not given */
} kv_model_config;

typedef struct kv_weight { /* one matrix or vector, stored format */
    kv_dtype type;
    int32_t rows, cols;
    const void *data; /* [rows][cols] */
} kv_weight;

typedef struct kv_layer_weights {
    kv_weight norm_attn, norm_mlp;                  /* [1][d_model] */
    kv_weight wq, wk, wv, wo, w_gate, w_up, w_down; /* [out][in] */
    kv_weight bq, bk, bv;                           /* [1][out], data NULL without bias */
    kv_weight q_norm, k_norm;                       /* [1][head_dim], data NULL without norm */
} kv_layer_weights;

typedef struct kv_model {
    kv_model_config config;
    kv_tensors *tensors; /* owned; backs all weights */
    kv_weight embedding, norm_final, lm_head;
    kv_layer_weights *layer; /* [n_layer] */
    double *inv_freq;        /* [head_dim/2], scaling applied */
    char *path;
    char hash[33]; /* hex of the weights' XXH3-128 */
} kv_model;

/* Hooks of a forward pass; every member may be NULL. */
typedef struct kv_model_hooks {
    void *context;
    /* Attention of one layer: the span holds rotated q, k, v and the hidden state entering the layer. Fills
     * o [n_q_head][stride][head_dim]. NULL: dense causal attention. */
    kv_status (*attend)(void *context, const kv_span *span, float *o);
    /* Logits of rows [first, first+n): logits [n][vocab]. Called in order. NULL: the head is not computed. */
    kv_status (*logits)(void *context, int32_t first, int32_t n, const float *logits);
    /* Optional filter: logits are wanted only for rows with want[row] != 0 (rows come one run at a time). */
    const uint8_t *want_logits;
    const struct kv_ops *ops; /* device; NULL: CPU */
} kv_model_hooks;

/* token [n_token] with 0 <= id < vocab; position [n_token] or NULL for 0..n_token-1. Memory: O(n_token * d), no S^2. */
kv_status kv_model_forward(const kv_model *model, const int32_t *token, const int32_t *position,
                           int32_t n_token, const kv_model_hooks *hooks);

/* RoPE frequencies of a config: theta^(-2i/d), llama3 scaling applied. inv_freq [head_dim/2] */
void kv_rope_frequencies(const kv_model_config *config, double *inv_freq);
/* Rotates x [n][head_dim] in place by position*inv_freq, rotate-half pairs (c, c+d/2); sign -1 undoes. Angles in double. */
void kv_rope_rotate(float *x, int32_t n, int32_t head_dim, const int32_t *position,
                    const double *inv_freq, int sign);

/* Cosines, then sines of every row: table [n][head_dim]; and the rotation of one vector x [head_dim] by its row. */
void kv_rope_table(int32_t n, int32_t head_dim, const int32_t *position, const double *inv_freq,
                   float *table);
void kv_rope_apply(float *x, int32_t head_dim, const float *table_row);

/* C[m][n] = A[m][k] W[n][k]^T through OpenBLAS, single-threaded calls under fixed 256-row blocks: the same bytes for any thread
 * count (engineering.md 3). */
kv_status kv_linear(int32_t m, int32_t n, int32_t k, const float *a, kv_dtype w_type, const void *w,
                    float *c);

/* Debian's OpenBLAS picks its Prescott kernels on recent CPUs. Returns the core type that should be asked for through
 * OPENBLAS_CORETYPE, or NULL when the current choice is right. `main` re-executes itself with it. */
const char *kv_blas_better_core(void);
const char *kv_blas_core(void); /* OpenBLAS core name in use */

void kv_model_free(kv_model *model); /* NULL is legal */

#endif
