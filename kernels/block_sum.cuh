// Sums over a block in a fixed order: the same bytes on every run.
#ifndef KV_KERNELS_BLOCK_SUM_CUH
#define KV_KERNELS_BLOCK_SUM_CUH

#include <cuda_runtime.h>

__device__ __forceinline__ double kv_lanes_sum(double x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// Sum of x over all threads of the block, in every thread. A whole number of warps, all of which take part. partial: shared, [32].
__device__ __forceinline__ double kv_block_sum(double x, double *partial) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    x = kv_lanes_sum(x);
    __syncthreads(); // the last sum has been read by all
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return kv_lanes_sum(lane < (int)blockDim.x / 32 ? partial[lane] : 0.0);
}

#endif
