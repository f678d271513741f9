// The MLP scorer, products of scorers, and scores of a span (kv_mlp_scores; maths.md 5). Products are plain fp32 (cuBLAS): scores
// decide, and decisions should not depend on the device.
#include <algorithm>

#include "kernels/blas.cuh"
#include "kernels/scorer.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;

struct dot_args {
    // [n_head][n_token][width]; [width] of each head, heads n_param apart
    const float *z, *bias, *w;
    float *rhat;
    int64_t n_param, rows; // rows = n_head * n_token
    int n_token, width;
};

// rhat = w . silu(z + bias); a warp per row.
__global__ void dot_kernel(dot_args a) {
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= a.rows) return;
    const int64_t at = row / a.n_token * a.n_param;
    const float *z = a.z + row * a.width;
    float sum = 0;
    for (int c = (int)threadIdx.x % 32; c < a.width; c += 32)
        sum = fmaf(kv_silu(z[c] + a.bias[at + c]), a.w[at + c], sum);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
#ifdef KV_BREAK_MLP
    if (row % 97 == 0) sum += 1e-3f;
#endif
    if (threadIdx.x % 32 == 0) a.rhat[row] = sum;
}

} // namespace

kv_scorer_source kv_scorer_x(const kv_net_spec *spec, const kv_scorer_input *in) {
    kv_scorer_source x = {};
    if (spec->hidden_input) {
        x.part[0] = in->hidden;
        x.width[0] = spec->n_input;
        x.n_part = 1;
        return x;
    }
    x.part[0] = in->k;
    x.part[1] = in->v;
    x.head[0] = x.head[1] = (int64_t)in->n_token * in->head_dim;
    x.width[0] = x.width[1] = in->head_dim;
    x.n_part = 2;
    return x;
}

kv_status kv_scorer_product(kv_gpu *g, const kv_scorer_source *x, int32_t n_head, int32_t n_token,
                            const float *w, int64_t n_param, int32_t width, float *out) {
    const kv_blas *blas;
    const float one = 1.0f, zero = 0.0f;
    KV_RETURN(kv_gpu_blas(g, &blas));
    // Column-major: out^T [width][n_token] = W^T x^T; the second half of x adds to the first.
    for (int32_t i = 0; i < x->n_part; i++) {
        const cublasStatus_t status = blas->gemm_batched(
            blas->handle, CUBLAS_OP_N, CUBLAS_OP_N, width, n_token, x->width[i], &one,
            w + (i ? (int64_t)x->width[0] * width : 0), CUDA_R_32F, width, n_param, x->part[i],
            CUDA_R_32F, x->width[i], x->head[i], i ? &one : &zero, out, CUDA_R_32F, width,
            (int64_t)n_token * width, n_head, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
        if (status != CUBLAS_STATUS_SUCCESS)
            return KV_FAIL(KV_E_INTERNAL, "cuBLAS: a scorer's product %d x %d x %d failed", n_token,
                           width, x->width[i]);
    }
    return KV_OK;
}

kv_status kv_mlp_device(kv_gpu *g, const kv_scorer *s, const float *param,
                        const kv_scorer_input *in, float *rhat) {
    const kv_net_spec *spec = &s->spec;
    const kv_scorer_source x = kv_scorer_x(spec, in);
    const int64_t rows = (int64_t)in->n_head * in->n_token;
    kv_scratch z;
    KV_RETURN(z.reserve(g, (size_t)rows * (size_t)spec->n_mlp * sizeof(float)));
    KV_RETURN(kv_scorer_product(g, &x, in->n_head, in->n_token,
                                param + s->layout.part[KV_NET_MLP_W1].at, s->layout.n_param,
                                spec->n_mlp, z.as<float>()));
    const dot_args a = {z.as<float>(),
                        param + s->layout.part[KV_NET_MLP_B1].at,
                        param + s->layout.part[KV_NET_MLP_W2].at,
                        rhat,
                        s->layout.n_param,
                        rows,
                        in->n_token,
                        spec->n_mlp};
    dot_kernel<<<(unsigned)((rows + WARPS - 1) / WARPS), THREADS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

kv_status kv_gpu_scores(kv_gpu *g, const kv_scorer *s, int32_t n_token, const kv_gpu_buffer *k,
                        const kv_gpu_buffer *v, const kv_gpu_buffer *hidden, kv_gpu_buffer *rhat) {
    const kv_net_spec *spec = &s->spec;
    const size_t rows = (size_t)s->n_kv_head * (size_t)n_token, cells = rows * (size_t)s->head_dim,
                 bytes = (size_t)s->n_kv_head * (size_t)s->layout.n_param * sizeof(float);
    kv_scratch param;
    KV_RETURN(kv_buffer_check(k, "k", cells, sizeof(float)));
    KV_RETURN(kv_buffer_check(v, "v", cells, sizeof(float)));
    KV_RETURN(
        kv_buffer_check(hidden, "hidden", (size_t)n_token * (size_t)spec->n_hidden, sizeof(float)));
    KV_RETURN(kv_buffer_check(rhat, "rhat", rows, sizeof(float)));
    if (spec->n_hidden && !hidden)
        return KV_FAIL(KV_E_USAGE, "these weights read hidden states, and none are given");
    KV_RETURN(param.reserve(g, bytes));
    KV_RETURN(kv_gpu_put(param.buffer, s->param, bytes));
    const kv_scorer_input in = {s->n_kv_head,      n_token,           s->head_dim,
                                kv_data<float>(k), kv_data<float>(v), kv_data<float>(hidden)};
    if (spec->n_mlp) KV_RETURN(kv_mlp_device(g, s, param.as<float>(), &in, kv_data<float>(rhat)));
    return spec->recurrent ? kv_mlstm_device(g, s, param.as<float>(), &in, kv_data<float>(rhat))
                           : KV_OK;
}
