// What an offset of dms' gate logits does to the cache (kv_dms_kept, kv_dms_gap): the counts and extremes behind the fit of the offset.
// Exact class: whole numbers and comparisons in double, so the results are the CPU's whatever the order.
#include <algorithm>
#include <climits>
#include <cstring>

#include "kernels/device.cuh"

namespace {

constexpr int THREADS = 256;

struct kept_args {
    const float *logit;       // [n_lane][n_token]
    const int64_t *doc_first; // [n_doc + 1]
    int64_t n_token, budget, window, shift;
    int n_doc;
    double offset;
    unsigned long long *kept;
};

__device__ bool marks(float logit, double offset) {
#ifdef KV_BREAK_OFFSET
    return (double)logit + offset >= 0;
#else
    return (double)logit + offset > 0;
#endif
}

// Queries u >= budget of its own document that see token `at` of a lane.
__device__ int64_t seen_by(const kept_args &a, const float *logit, int64_t at) {
    int low = 0, high = a.n_doc; // the document is in [low, high)
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (a.doc_first[middle] <= at)
            low = middle;
        else
            high = middle;
    }
    const int64_t first = a.doc_first[low], n = a.doc_first[low + 1] - first, i = at - first;
    const bool leaves = i + a.window < n && i + a.shift < n && marks(logit[at + a.shift], a.offset);
    const int64_t from = max(i, a.budget), end = leaves ? i + a.window : n;
    return max(end - from, (int64_t)0);
}

__device__ unsigned long long warp_sum(unsigned long long x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

__global__ void __launch_bounds__(THREADS) kept_kernel(kept_args a) {
    const float *logit = a.logit + (int64_t)blockIdx.y * a.n_token;
    unsigned long long sum = 0;
    for (int64_t t = blockIdx.x * (int64_t)THREADS + threadIdx.x; t < a.n_token;
         t += (int64_t)gridDim.x * THREADS)
        sum += (unsigned long long)seen_by(a, logit, t);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) atomicAdd(a.kept, sum);
}

// Floats as whole numbers of the same order.
__device__ int ordered(float x) {
    const int b = __float_as_int(x);
    return b < 0 ? b ^ INT_MAX : b;
}
float value_of(int ordered) {
    const int b = ordered < 0 ? ordered ^ INT_MAX : ordered;
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}

struct gap { // in order
    int below, above;
};

__global__ void __launch_bounds__(THREADS)
    gap_kernel(const float *logit, int64_t n, double offset, gap *out) {
    int below = INT_MIN, above = INT_MAX;
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * THREADS) {
        const float x = logit[i];
        if (isnan(x)) continue;
        if (marks(x, offset))
            above = min(above, ordered(x));
        else
            below = max(below, ordered(x));
    }
    below = __reduce_max_sync(~0u, below);
    above = __reduce_min_sync(~0u, above);
    if (threadIdx.x % 32) return;
    atomicMax(&out->below, below);
    atomicMin(&out->above, above);
}

} // namespace

kv_status kv_gpu_gate_kept(kv_gpu *g, const kv_dms_cache *cache, int64_t n_lane,
                           const kv_gpu_buffer *logit, double offset, int64_t *kept) {
    kv_scratch docs, sum;
    unsigned long long result = 0;
    const int64_t n_token = cache->doc_first[cache->n_doc];
    const size_t bytes = ((size_t)cache->n_doc + 1) * sizeof(int64_t);
    KV_RETURN(kv_buffer_check(logit, "logit", (size_t)(n_lane * n_token), sizeof(float)));
    KV_RETURN(docs.reserve(g, bytes));
    KV_RETURN(kv_gpu_put(docs.buffer, cache->doc_first, bytes));
    KV_RETURN(sum.reserve_zeros(g, sizeof result));
    const kept_args a = {kv_data<float>(logit),
                         docs.as<int64_t>(),
                         n_token,
                         cache->budget,
                         cache->window,
                         cache->shift,
                         cache->n_doc,
                         offset,
                         sum.as<unsigned long long>()};
    const int64_t blocks = (n_token + THREADS - 1) / THREADS;
    kept_kernel<<<dim3((unsigned)std::min<int64_t>(blocks, 64), (unsigned)n_lane), THREADS, 0,
                  g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    KV_RETURN(kv_gpu_get(sum.buffer, &result, sizeof result));
    *kept = (int64_t)result;
    return KV_OK;
}

kv_status kv_gpu_gate_gap(kv_gpu *g, int64_t n, const kv_gpu_buffer *logit, double offset,
                          float *below, float *above) {
    kv_scratch found;
    gap result = {INT_MIN, INT_MAX};
    KV_RETURN(kv_buffer_check(logit, "logit", (size_t)n, sizeof(float)));
    KV_RETURN(found.reserve(g, sizeof result));
    KV_RETURN(kv_gpu_put(found.buffer, &result, sizeof result));
    const int64_t blocks = (n + THREADS - 1) / THREADS;
    gap_kernel<<<(unsigned)std::min<int64_t>(blocks, 1024), THREADS, 0, g->stream>>>(
        kv_data<float>(logit), n, offset, found.as<gap>());
    KV_CUDA(cudaGetLastError());
    KV_RETURN(kv_gpu_get(found.buffer, &result, sizeof result));
    if (result.below != INT_MIN) *below = fmaxf(*below, value_of(result.below));
    if (result.above != INT_MAX) *above = fminf(*above, value_of(result.above));
    return KV_OK;
}
