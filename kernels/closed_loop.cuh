// Inside of the closed-loop replay: arguments of the kernel, candidates for eviction, reductions over a warp. closed_loop.cu says what
// the kernel does.
#ifndef KV_KERNELS_CLOSED_LOOP_CUH
#define KV_KERNELS_CLOSED_LOOP_CUH

#include <climits>

#include "kernels/cluster.cuh"
#include "kernels/portable.cuh"

namespace closed_loop {

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int BATCH = 8; // queries of a batch, at most

struct layout { // byte offsets; the slot arrays lie in shared memory or in scratch
    int barrier, q, part, best, total, bytes;
    int value, a, time, slot_bytes;
};

struct loop_args {
    const void *q, *k; // [n_q_head][n_token][D], [n_kv_head][n_token][D]
    int32_t *evict_at; // [n_kv_head][n_token]
    // [n_set][n_token] position that leaves after query u; null: the least A leaves
    const int32_t *forced;
    float *gap;    // [n_set][n_token] (A of the forced - least A) / A of the forced
    int *failed;   // a set whose statistic is not a number
    char *scratch; // slot arrays of every block; null: shared memory
    int n_token, n_block, members, group, budget, protect;
    int n_slot;     // per block
    int batch;      // queries whose logits are formed together
    int shares;     // warps that share a column of values
    int split_bits; // 2^split_bits threads share a slot
    int fresh;      // place of the first arriving key, a multiple of 4
    int pitch;      // floats between two columns of values, a multiple of 4
    float scale, softcap;
    double factor, decay;
    bool use_max;
    layout at;
};

struct column_total {
    double sum;
    float inverse;
};
struct candidate {
    double a;
    int time, slot; // slot -1: none
};

// Queries first .. first + n - 1. When they begin, the block holds `held` slots, of which `hole` (-1: none) was given up: its
// logits are -inf.
struct query_batch {
    int first, n, held, hole;
};

// Among equal statistics the newest key leaves.
#ifdef KV_BREAK_CLOSED_LOOP
constexpr int NEWEST = -1;
#else
constexpr int NEWEST = 1;
#endif

__device__ __forceinline__ candidate better(candidate x, candidate y) {
    const bool newer = NEWEST * y.time > NEWEST * x.time;
    const bool second = y.slot >= 0 && (x.slot < 0 || y.a < x.a || (y.a == x.a && newer));
    return second ? y : x;
}

// The best of a warp, in all lanes. A is never negative, so its bits order like an integer.
__device__ __forceinline__ candidate best_of_warp(candidate x) {
    const uint64_t bits = x.slot >= 0 ? (uint64_t)__double_as_longlong(x.a) : ~0ull;
    const uint32_t high = (uint32_t)(bits >> 32), low = (uint32_t)bits;
    bool in = high == __reduce_min_sync(~0u, high);
    uint32_t left = __ballot_sync(~0u, in);
    if (left & (left - 1)) { // several: the rest decides
        const uint32_t least = __reduce_min_sync(~0u, in ? low : ~0u);
        in = in && low == least;
        const int time = NEWEST * __reduce_max_sync(~0u, in ? NEWEST * x.time : -INT_MAX);
        left = __ballot_sync(~0u, in && x.time == time);
    }
    const int from = __ffs((int)left) - 1;
    const uint32_t a_high = __shfl_sync(~0u, high, from), a_low = __shfl_sync(~0u, low, from);
    return {__longlong_as_double((int64_t)((uint64_t)a_high << 32 | a_low)),
            __shfl_sync(~0u, x.time, from), __shfl_sync(~0u, x.slot, from)};
}

// The best of n in shared memory, in all lanes.
__device__ __forceinline__ candidate best_of(const candidate *from, int n) {
    candidate x = {0, 0, -1};
    for (int i = (int)threadIdx.x % 32; i < n; i += 32) x = better(x, from[i]);
    return best_of_warp(x);
}

// Largest of a warp, in all lanes.
__device__ __forceinline__ float top_of_warp(float x) {
    const uint32_t b = __float_as_uint(x);
    const uint32_t top = __reduce_max_sync(~0u, b & 0x80000000u ? ~b : b | 0x80000000u);
    return __uint_as_float(top & 0x80000000u ? top & 0x7fffffffu : ~top);
}

__device__ __forceinline__ double sum_of_warp(double x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// x y, 0 where that is below 2^-126: such a probability counts as 0 (contract.md 3).
__device__ __forceinline__ float probability(float x, float y) {
    float p;
    asm("mul.ftz.f32 %0, %1, %2;" : "=f"(p) : "f"(x), "f"(y));
    return p;
}

__device__ __forceinline__ uint4 pack(const void *x) { return *static_cast<const uint4 *>(x); }

} // namespace closed_loop

#endif
