// cuBLAS through dlopen, and the ceiling of a large bfloat16 product.
#include <dlfcn.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "kernels/blas.cuh"
#include "kernels/gpu_ops.h"

namespace {

void *library() {
    const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so",
                                 "/usr/local/cuda/lib64/libcublas.so"};
    void *found = nullptr;
    for (const char *name : names)
        if (!found) found = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    return found;
}

kv_status load(kv_blas *b) {
    void *const from = library();
    if (!from)
        return KV_FAIL(
            KV_E_UNAVAILABLE,
            "libcublas was not found (libcublas.so.13 or .12); install the CUDA toolkit's "
            "libraries or add their folder to LD_LIBRARY_PATH");
    const auto create = (decltype(&cublasCreate_v2))dlsym(from, "cublasCreate_v2");
    b->set_stream = (decltype(b->set_stream))dlsym(from, "cublasSetStream_v2");
    b->gemm = (decltype(b->gemm))dlsym(from, "cublasGemmEx");
    b->gemm_batched = (decltype(b->gemm_batched))dlsym(from, "cublasGemmStridedBatchedEx");
    if (!create || !b->set_stream || !b->gemm || !b->gemm_batched ||
        create(&b->handle) != CUBLAS_STATUS_SUCCESS)
        return KV_FAIL(KV_E_UNAVAILABLE, "libcublas was found but cannot be used");
    return KV_OK;
}

} // namespace

kv_status kv_gpu_blas(kv_gpu *g, const kv_blas **out) {
    static kv_blas blas;
    static std::mutex once; // the handle may be made early, outside the lock of the device table
    std::lock_guard<std::mutex> guard(once);
    if (!blas.handle) KV_RETURN(load(&blas));
    if (blas.set_stream(blas.handle, g->stream) != CUBLAS_STATUS_SUCCESS)
        return KV_FAIL(KV_E_INTERNAL, "cublasSetStream failed");
    *out = &blas;
    return KV_OK;
}

void kv_gpu_blas_map(void) { (void)library(); }

void kv_gpu_blas_warm(kv_gpu *g) {
    const kv_blas *blas;
    if (kv_gpu_blas(g, &blas) != KV_OK) kv_error_clear();
}

kv_status kv_gpu_matmul_ceiling(kv_gpu *g, int32_t n, double *tflop_per_s) {
    const kv_blas *blas;
    // n rows of 128 columns for n/128 heads: random data of the right size
    kv_gpu_span *a = nullptr;
    kv_scratch c;
    std::vector<float> ms(9);
    const float one = 1.0f, zero = 0.0f;
    KV_RETURN(kv_gpu_blas(g, &blas));
    if (n % 128) return KV_FAIL(KV_E_USAGE, "matmul ceiling: %d is no multiple of 128", n);
    KV_RETURN(c.reserve(g, (size_t)n * (size_t)n * 2));
    KV_RETURN(kv_gpu_span_random(g, n / 128, n / 128, n, 128, KV_BF16, 7, &a));
    kv_status st = KV_OK;
    for (size_t i = 0; st == KV_OK && i < ms.size() + 3; i++) {
        st = kv_gpu_tick(g, 0);
        if (st == KV_OK && blas->gemm(blas->handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one,
                                      a->q->data, CUDA_R_16BF, n, a->k->data, CUDA_R_16BF, n, &zero,
                                      c.buffer->data, CUDA_R_16BF, n, CUBLAS_COMPUTE_32F,
                                      CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS)
            st = KV_FAIL(KV_E_INTERNAL, "cublasGemmEx failed");
        if (st == KV_OK) st = kv_gpu_tick(g, 1);
        if (st == KV_OK) st = kv_gpu_ms(g, 0, 1, &ms[i % ms.size()]);
    }
    kv_gpu_span_free(a);
    std::sort(ms.begin(), ms.end());
    *tflop_per_s = 2e-9 * (double)n * n * n / (double)ms[ms.size() / 2];
    return st;
}
