// cuBLAS, loaded at run time: kvlab starts without it, and only products that need it fail.
#ifndef KV_KERNELS_BLAS_CUH
#define KV_KERNELS_BLAS_CUH

#include <cublas_v2.h>

#include "kernels/device.cuh"

struct kv_blas {
    cublasHandle_t handle;
    decltype(&cublasSetStream_v2) set_stream;
    cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                           const void *alpha, const void *a, cudaDataType a_type, int lda,
                           const void *b, cudaDataType b_type, int ldb, const void *beta, void *c,
                           cudaDataType c_type, int ldc, cublasComputeType_t, cublasGemmAlgo_t);
    cublasStatus_t (*gemm_batched)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m,
                                   int n, int k, const void *alpha, const void *a,
                                   cudaDataType a_type, int lda, long long a_stride, const void *b,
                                   cudaDataType b_type, int ldb, long long b_stride,
                                   const void *beta, void *c, cudaDataType c_type, int ldc,
                                   long long c_stride, int count, cublasComputeType_t,
                                   cublasGemmAlgo_t);
};

// The process's handle on the device's stream. KV_E_UNAVAILABLE when libcublas is not found.
kv_status kv_gpu_blas(kv_gpu *g, const kv_blas **out);

#endif
