// Scorers on the device: what scorer_mlp.cu and scorer_mlstm.cu share.
#ifndef KV_KERNELS_SCORER_CUH
#define KV_KERNELS_SCORER_CUH

#include "kernels/device.cuh"
#include "reference/scorer.h"

// Tokens of all KV heads on the device, fp32.
struct kv_scorer_input {
    int32_t n_head, n_token, head_dim;
    const float *k, *v;  // [n_head][n_token][head_dim]
    const float *hidden; // [n_token][n_hidden] or null
};

// x of one head: k and v side by side, or the hidden state that all heads share.
struct kv_scorer_source {
    const float *part[2]; // [n_token][width]
    int64_t head[2];      // elements between two heads
    int32_t width[2], n_part;
};
kv_scorer_source kv_scorer_x(const kv_net_spec *spec, const kv_scorer_input *in);

// out [n_head][n_token][width] = x W, W [in][out] of every head at w, heads n_param apart. fp32 arithmetic.
kv_status kv_scorer_product(kv_gpu *g, const kv_scorer_source *x, int32_t n_head, int32_t n_token,
                            const float *w, int64_t n_param, int32_t width, float *out);

// rhat [n_head][n_token] = w2 . silu(x W1 + b1); param: of all heads, as kv_scorer lays them out.
kv_status kv_mlp_device(kv_gpu *g, const kv_scorer *s, const float *param,
                        const kv_scorer_input *in, float *rhat);
// rhat += a . silu(h), or = without the token's own MLP.
kv_status kv_mlstm_device(kv_gpu *g, const kv_scorer *s, const float *param,
                          const kv_scorer_input *in, float *rhat);

__device__ __forceinline__ float kv_silu(float z) { return z / (1.0f + expf(-z)); }

#endif
