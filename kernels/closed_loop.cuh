// Inside of the closed-loop replay: arguments of the kernel, exchanges between the blocks of a cluster, reductions over a warp.
// closed_loop.cu says what the kernel does.
#ifndef KV_KERNELS_CLOSED_LOOP_CUH
#define KV_KERNELS_CLOSED_LOOP_CUH

#include <climits>

#include "kernels/portable.cuh"

namespace closed_loop {

constexpr int THREADS = 512, WARPS = THREADS / 32;

struct layout { // byte offsets; the slot arrays follow `slots` in shared memory or in scratch
    int keys, q, fresh, part, best, row, barrier, bytes;
    int logit, a, time, slot_bytes;
};

struct loop_args {
    const void *q, *k; // [n_q_head][n_token][D], [n_kv_head][n_token][D]
    int32_t *evict_at; // [n_kv_head][n_token]
    const int32_t
        *forced;   // [n_set][n_token] position that leaves after query u; null: the least A leaves
    float *gap;    // [n_set][n_token] (A of the forced - least A) / A of the forced
    int *failed;   // a set whose statistic is not a number
    char *scratch; // slot arrays of every block; null: shared memory
    int n_token, n_block, members, group, budget, protect;
    int n_slot;   // per block
    int resident; // slots per block whose keys stay in shared memory
    int pitch;    // floats between two rows of logits
    float scale, softcap;
    double factor, decay;
    bool use_max;
    layout at;
};

struct row_part { // of one row, over the slots of one warp
    float top;
    uint32_t pad;
    double sum;
};
struct row_total {
    double inverse;
    float top, tiny;
};
struct candidate {
    double a;
    int time, slot; // slot -1: none
};

__device__ inline uint32_t address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// 16 bytes, equal in all lanes, to the same place in every block of the cluster; counted on each block's barrier.
__device__ inline void publish(void *to, uint4 x, uint64_t *barrier, int n_block) {
    const int lane = (int)threadIdx.x % 32;
    if (n_block == 1) {
        if (lane == 0) *static_cast<uint4 *>(to) = x;
        return;
    }
#if __CUDA_ARCH__ >= 900
    if (lane < n_block) {
        uint32_t there, bell;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(to)), "r"(lane));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bell) : "r"(address(barrier)), "r"(lane));
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                     "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
                     "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(bell)
                     : "memory");
    }
#endif
}

// One thread announces how many bytes the exchange brings.
__device__ inline void announce(uint64_t *barrier, int bytes, int n_block) {
#if __CUDA_ARCH__ >= 900
    if (n_block > 1 && threadIdx.x == 0)
        asm volatile(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)),
            "r"(bytes)
            : "memory");
#endif
}

__device__ inline void receive(uint64_t *barrier, uint32_t parity, int n_block) {
    if (n_block == 1) {
        __syncthreads();
        return;
    }
#if __CUDA_ARCH__ >= 900
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(address(barrier)), "r"(parity)
                     : "memory");
    } while (!done);
#endif
}

__device__ inline int block_of_cluster(int n_block) { return (int)blockIdx.x % n_block; }

__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

__device__ inline void copy16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from)
                 : "memory");
}
// Among equal statistics the newest key leaves.
#ifdef KV_BREAK_CLOSED_LOOP
constexpr int NEWEST = -1;
#else
constexpr int NEWEST = 1;
#endif

__device__ inline candidate better(candidate x, candidate y) {
    const bool newer = NEWEST * y.time > NEWEST * x.time;
    const bool second = y.slot >= 0 && (x.slot < 0 || y.a < x.a || (y.a == x.a && newer));
    return second ? y : x;
}

// The best of a warp, in all lanes. A is never negative, so its bits order like an integer.
__device__ inline candidate best_of_warp(candidate x) {
    const uint64_t bits = x.slot >= 0 ? (uint64_t)__double_as_longlong(x.a) : ~0ull;
    const uint32_t high = (uint32_t)(bits >> 32), low = (uint32_t)bits;
    const uint32_t least_high = __reduce_min_sync(~0u, high);
    bool in = high == least_high;
    const uint32_t least_low = __reduce_min_sync(~0u, in ? low : ~0u);
    in = in && low == least_low;
    const int time = NEWEST * __reduce_max_sync(~0u, in ? NEWEST * x.time : -INT_MAX);
    in = in && x.time == time;
    const int from = __ffs((int)__ballot_sync(~0u, in)) - 1;
    return {__longlong_as_double((int64_t)((uint64_t)least_high << 32 | least_low)), time,
            __shfl_sync(~0u, x.slot, from)};
}

// Largest of a warp, in all lanes.
__device__ inline float top_of_warp(float x) {
    const uint32_t b = __float_as_uint(x);
    const uint32_t top = __reduce_max_sync(~0u, b & 0x80000000u ? ~b : b | 0x80000000u);
    return __uint_as_float(top & 0x80000000u ? top & 0x7fffffffu : ~top);
}

__device__ inline double sum_of_warp(double x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

__device__ inline uint4 pack(const void *x) { return *static_cast<const uint4 *>(x); }

} // namespace closed_loop

#endif
