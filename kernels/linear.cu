// The model's weight products (kv_linear) through cuBLAS in plain fp32 arithmetic, and the store of weights on the device.
//
// Weights are widened to fp32 once and stay: the products of a whole run read them again and again. A host address may come back with
// other contents (tests load one model after another), so an entry is only valid while the hash of the host bytes is the same.
#include <xxhash.h>

#include <algorithm>
#include <vector>

#include "kernels/blas.cuh"
#include "kernels/linear.cuh"

namespace {

struct stored {
    const void *host;
    size_t count;
    kv_dtype type;
    uint64_t hash;
    kv_gpu_buffer *data;
};

std::vector<stored> store; // of the one device that the process uses
size_t stored_bytes;

template <class T> __global__ void widen_kernel(const T *x, float *y, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        y[i] = (float)x[i];
}

template <class T> void launch_widen(kv_gpu *g, const kv_scratch &from, float *to, size_t n) {
    widen_kernel<T><<<(unsigned)std::min<size_t>((n + 255) / 256, 2048), 256, 0, g->stream>>>(
        from.as<T>(), to, n);
}

kv_status bring(kv_gpu *g, stored *s) {
    const size_t size = s->type == KV_F32 ? 4 : 2;
    KV_RETURN(kv_gpu_new(g, s->count * sizeof(float), &s->data));
    if (s->type == KV_F32) return kv_gpu_put(s->data, s->host, s->count * size);
    kv_scratch narrow;
    KV_RETURN(narrow.reserve(g, s->count * size));
    KV_RETURN(kv_gpu_put(narrow.buffer, s->host, s->count * size));
    if (s->type == KV_F16)
        launch_widen<__half>(g, narrow, kv_data<float>(s->data), s->count);
    else
        launch_widen<__nv_bfloat16>(g, narrow, kv_data<float>(s->data), s->count);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

void forget(std::vector<stored>::iterator i) {
    stored_bytes -= i->count * sizeof(float);
    (void)kv_gpu_free(i->data);
    store.erase(i);
}

} // namespace

kv_status kv_weight_device(kv_gpu *g, kv_dtype type, const void *host, size_t count,
                           const float **out) {
    const uint64_t hash = XXH3_64bits(host, count * (type == KV_F32 ? 4 : 2));
    for (auto i = store.begin(); i != store.end(); ++i) {
        if (i->host != host) continue;
        if (i->count == count && i->type == type && i->hash == hash && i->data->gpu == g) {
            *out = kv_data<float>(i->data);
            return KV_OK;
        }
        forget(i);
        break;
    }
    // Half of the device is for weights; beyond it the oldest go.
    size_t free_bytes = 0, total = 0;
    KV_CUDA(cudaMemGetInfo(&free_bytes, &total));
    while (!store.empty() && stored_bytes + count * sizeof(float) > total / 2)
        forget(store.begin());
    stored fresh = {host, count, type, hash, nullptr};
    const kv_status st = bring(g, &fresh);
    if (st != KV_OK) {
        (void)kv_gpu_free(fresh.data);
        return st;
    }
    store.push_back(fresh);
    stored_bytes += count * sizeof(float);
    *out = kv_data<float>(fresh.data);
    return KV_OK;
}

kv_status kv_linear_device(kv_gpu *g, int32_t m, int32_t n, int32_t k, const float *a,
                           const float *w, float *c) {
    const kv_blas *blas;
    const float one = 1.0f, zero = 0.0f;
    KV_RETURN(kv_gpu_blas(g, &blas));
    // Column-major: C^T [n][m] = (W^T)^T A^T. fp32 in, fp32 arithmetic: no tf32.
#ifdef KV_BREAK_LINEAR
    const int32_t used = k - 1;
#else
    const int32_t used = k;
#endif
    if (blas->gemm(blas->handle, CUBLAS_OP_T, CUBLAS_OP_N, n, m, used, &one, w, CUDA_R_32F, k, a,
                   CUDA_R_32F, k, &zero, c, CUDA_R_32F, n, CUBLAS_COMPUTE_32F,
                   CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS)
        return KV_FAIL(KV_E_INTERNAL, "cuBLAS: the product %d x %d x %d failed", m, n, k);
    return KV_OK;
}

kv_status kv_gpu_linear(kv_gpu *g, int32_t m, int32_t n, int32_t k, const kv_gpu_buffer *a,
                        kv_dtype w_type, const void *w, kv_gpu_buffer *c) {
    const float *weight;
    KV_RETURN(kv_buffer_check(a, "a", (size_t)m * (size_t)k, sizeof(float)));
    KV_RETURN(kv_buffer_check(c, "c", (size_t)m * (size_t)n, sizeof(float)));
    KV_RETURN(kv_weight_device(g, w_type, w, (size_t)n * (size_t)k, &weight));
    return kv_linear_device(g, m, n, k, kv_data<float>(a), weight, kv_data<float>(c));
}
