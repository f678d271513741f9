// Ranks of many heads at once (kv_rank, maths.md 3.4): one block per head up to 16384 tokens (rank.cuh), longer documents by one
// device-wide radix sort by (head, key).
#include <algorithm>
#include <climits>

#include <cub/device/device_radix_sort.cuh>

#include "kernels/rank.cuh"
#include "kernels/select.cuh"

namespace {

using namespace ranks;

// One block per head, n <= SMALL. rank, at [head][n] are permutations of 0..n-1.
__global__ void __launch_bounds__(THREADS, 1)
    rank_kernel(const float *priority, int n, int32_t *rank, int32_t *at) {
    extern __shared__ __align__(16) char raw[];
    sort_shared &s = *reinterpret_cast<sort_shared *>(raw);
    const size_t head = (size_t)blockIdx.x * (size_t)n;
    sort_head(s, priority + head, n);
    uint16_t *sorted = reinterpret_cast<uint16_t *>(s.free);
    for (int t = (int)threadIdx.x; t < n; t += THREADS) {
        rank[head + (size_t)t] = s.rank[t];
        sorted[s.rank[t]] = (uint16_t)t;
    }
    __syncthreads();
    for (int r = (int)threadIdx.x; r < n; r += THREADS) at[head + (size_t)r] = sorted[r];
}

__global__ void long_key_kernel(const float *priority, int n, uint64_t *key, uint32_t *token) {
    const size_t head = (size_t)blockIdx.y;
    for (int t = (int)(blockIdx.x * blockDim.x + threadIdx.x); t < n;
         t += (int)(gridDim.x * blockDim.x)) {
        const size_t i = head * (size_t)n + (size_t)t;
        key[i] = head << 32 | sort_key(priority[i]);
        token[i] = (uint32_t)t;
    }
}

__global__ void invert_kernel(const int32_t *at, int n, int32_t *rank) {
    const size_t head = (size_t)blockIdx.y * (size_t)n;
    for (int r = (int)(blockIdx.x * blockDim.x + threadIdx.x); r < n;
         r += (int)(gridDim.x * blockDim.x))
        rank[head + (size_t)at[head + (size_t)r]] = r;
}

kv_status rank_long(kv_gpu *g, int32_t n_head, int32_t n, const float *priority, int32_t *rank,
                    int32_t *at) {
    kv_scratch key, sorted, token, work;
    const size_t count = (size_t)n_head * (size_t)n;
    size_t bytes = 0;
    int bits = 32;
    while (n_head - 1 >> (bits - 32)) bits++;
    if (count > INT_MAX)
        return KV_FAIL(KV_E_UNAVAILABLE,
                       "ranks of %d heads of %d tokens: the GPU sorts up to %d "
                       "at once; give it fewer layers",
                       n_head, n, INT_MAX);
    KV_RETURN(key.reserve(g, count * 8));
    KV_RETURN(sorted.reserve(g, count * 8));
    KV_RETURN(token.reserve(g, count * 4));
    const dim3 grid((unsigned)std::min(kv_div_up(n, 256), 64), (unsigned)n_head);
    long_key_kernel<<<grid, 256, 0, g->stream>>>(priority, n, key.as<uint64_t>(),
                                                 token.as<uint32_t>());
    KV_CUDA(cudaGetLastError());
    uint32_t *out = reinterpret_cast<uint32_t *>(at);
    KV_CUDA(cub::DeviceRadixSort::SortPairs(nullptr, bytes, key.as<uint64_t>(),
                                            sorted.as<uint64_t>(), token.as<uint32_t>(), out,
                                            (int)count, 0, bits, g->stream));
    KV_RETURN(work.reserve(g, bytes));
    KV_CUDA(cub::DeviceRadixSort::SortPairs(work.as<char>(), bytes, key.as<uint64_t>(),
                                            sorted.as<uint64_t>(), token.as<uint32_t>(), out,
                                            (int)count, 0, bits, g->stream));
    invert_kernel<<<grid, 256, 0, g->stream>>>(at, n, rank);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

} // namespace

kv_status kv_rank_device(kv_gpu *g, int32_t n_head, int32_t n, const float *priority, int32_t *rank,
                         int32_t *at) {
    if (n > SMALL) return rank_long(g, n_head, n, priority, rank, at);
    KV_RETURN(kv_allow_shared(g, rank_kernel, sizeof(sort_shared)));
    rank_kernel<<<(unsigned)n_head, THREADS, sizeof(sort_shared), g->stream>>>(priority, n, rank,
                                                                               at);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}
