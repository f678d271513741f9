// Weight products on device arrays, and fp32 copies of weights that stay on the device.
#ifndef KV_KERNELS_LINEAR_CUH
#define KV_KERNELS_LINEAR_CUH

#include "kernels/device.cuh"

// fp32 copy of `count` elements of a host array, kept for the process; known again by address, size and content.
kv_status kv_weight_device(kv_gpu *g, kv_dtype type, const void *host, size_t count,
                           const float **out);
// C[m][n] = A[m][k] W[n][k]^T in fp32, all row-major on the device.
kv_status kv_linear_device(kv_gpu *g, int32_t m, int32_t n, int32_t k, const float *a,
                           const float *w, float *c);

#endif
