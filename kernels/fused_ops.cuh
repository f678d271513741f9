// Instructions of the fused passes that CUDA C++ has no names for and hopper.cuh does not wrap: approximate functions, fragments of
// tiles in shared memory.
#ifndef KV_KERNELS_FUSED_OPS_CUH
#define KV_KERNELS_FUSED_OPS_CUH

#include "kernels/hopper.cuh"

namespace fused {

__device__ __forceinline__ float tanh_fast(float x) { // 2^-11
    float y;
    asm volatile("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Four 8 x 8 matrices of 2-byte elements; thread l names row l % 8 of matrix l / 8 and gets of each matrix the pair of columns
// 2 (l % 4) of row l / 4; TRANSPOSED: of column l / 4 the pair of rows 2 (l % 4).
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t *x, uint32_t address) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
}
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t x0, uint32_t x1,
                                               uint32_t x2, uint32_t x3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(x0), "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}

} // namespace fused

#endif
