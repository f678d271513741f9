/* Choice of the build of the product and the activations. */
#include "reference/gemm.h"

#include "reference/core/cpu.h"

#if defined(__x86_64__)
static kv_gemm_f32_fn *const product[] = {kv_gemm_generic, kv_gemm_avx2, kv_gemm_avx512};
static kv_exp_fn *const exponential[] = {kv_exp_generic, kv_exp_avx2, kv_exp_avx512};
static kv_silu_fn *const silu[] = {kv_silu_generic, kv_silu_avx2, kv_silu_avx512};
#else
static kv_gemm_f32_fn *const product[] = {kv_gemm_generic};
static kv_exp_fn *const exponential[] = {kv_exp_generic};
static kv_silu_fn *const silu[] = {kv_silu_generic};
#endif

void kv_gemm_f32(kv_gemm_form form, int32_t m, int32_t n, int32_t k, const float *a, int64_t lda,
                 const float *b, int64_t ldb, bool accumulate, float *c, int64_t ldc) {
    product[kv_cpu_isa()](form, m, n, k, a, lda, b, ldb, accumulate, c, ldc);
}

void kv_exp_f32(int64_t n, const float *x, float *y) { exponential[kv_cpu_isa()](n, x, y); }

void kv_silu_f32(int64_t n, const float *z, float *value, float *slope) {
    silu[kv_cpu_isa()](n, z, value, slope);
}
