// Arithmetic on logits in the accumulator layout that mma.sync and wgmma share: of a tile of 16 rows per warp, a thread holds rows
// lane/4 (r = 0) and lane/4 + 8 (r = 1), in each group of 8 columns the columns 2 (lane%4) and the next:
//     x[4 j + 2 r + c]  is  (row lane/4 + 8 r, column 8 j + 2 (lane%4) + c).
// Logits stay raw (q.k, or scaled and capped); `unit` turns them into binary exponents. exp2 is ex2.approx.ftz (2 ulp; results
// below 2^-126 become 0, as contract.md 3 wants).
#ifndef KV_KERNELS_ROWS_CUH
#define KV_KERNELS_ROWS_CUH

#include "kernels/device.cuh"

constexpr float KV_LOG2E = 1.4426950408889634f;
constexpr double KV_LN2 = 0.69314718055994531;
constexpr float KV_LOW = -1e30f; // start of a running maximum: finite, so that differences are never NaN

__device__ __forceinline__ float kv_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float kv_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
template <class F> __device__ __forceinline__ F kv_quad_sum(F x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ int kv_quad_min(int x) {
    x = min(x, __shfl_xor_sync(~0u, x, 1));
    return min(x, __shfl_xor_sync(~0u, x, 2));
}

// What a tile of keys is for the 64 queries of a block, with respect to E(u) = {sinks <= t <= u - window}.
enum kv_zone { KV_FAR, KV_NEAR, KV_MIXED }; // all keys in every E(u), none in any, some

// The zone of keys [t, t + n) for queries [u, u + m).
__device__ __forceinline__ kv_zone kv_zone_of(int t, int n, int u, int m, int sinks, int window) {
    if (t >= sinks && t + n - 1 <= u - window) return KV_FAR;
    if (t > u + m - 1 - window || t + n <= sinks) return KV_NEAR;
    return KV_MIXED;
}

// Largest of the thread's elements of row r, in two independent chains.
template <int N> __device__ __forceinline__ float kv_row_max(const float (&x)[N], int r) {
    float a = fmaxf(x[2 * r], x[2 * r + 1]), b = fmaxf(x[2 * r + 4], x[2 * r + 5]);
#pragma unroll
    for (int j = 2; j < N / 4; j += 2) {
        a = fmaxf(a, fmaxf(x[4 * j + 2 * r], x[4 * j + 2 * r + 1]));
        b = fmaxf(b, fmaxf(x[4 * j + 4 + 2 * r], x[4 * j + 5 + 2 * r]));
    }
    return fmaxf(a, b);
}

#endif
