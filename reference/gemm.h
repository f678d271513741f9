/* Matrix products of the scorers, fp32 and fp64.
 *
 * Why not BLAS: every element of C is one sum over k in order, whatever m, n and the tile it falls into. So a score computed for a
 * whole document and the score computed for one token while decoding are the same bits, and mask == stream is exact. (BLAS picks
 * other kernels, hence other sums, for one row.) Single-threaded; callers are parallel over lanes. */
#ifndef KV_GEMM_H
#define KV_GEMM_H

#include <stdbool.h>
#include <stdint.h>

typedef enum kv_gemm_form {
    KV_NN, /* A [m][k], B [k][n] */
    KV_NT, /* A [m][k], B [n][k] */
    KV_TN, /* A [k][m], B [k][n] */
} kv_gemm_form;

/* C[m][n] = A B, or C += A B with `accumulate`. lda, ldb, ldc: elements between rows as stored. */
typedef void kv_gemm_f32_fn(kv_gemm_form form, int32_t m, int32_t n, int32_t k, const float *a,
                            int64_t lda, const float *b, int64_t ldb, bool accumulate, float *c,
                            int64_t ldc);
typedef void kv_gemm_f64_fn(kv_gemm_form form, int32_t m, int32_t n, int32_t k, const double *a,
                            int64_t lda, const double *b, int64_t ldb, bool accumulate, double *c,
                            int64_t ldc);

kv_gemm_f32_fn kv_gemm_f32; /* the best build for this CPU */
kv_gemm_f64_fn kv_gemm_f64; /* generic only: checks of gradients, small networks */

kv_gemm_f32_fn kv_gemm_generic, kv_gemm_avx2, kv_gemm_avx512;

/* y = exp(x) within 1.5 ulp; 0 where exp(x) < 2^-126; x above 88 counts as 88. An element's result does not depend on n. */
void kv_exp_f32(int64_t n, const float *x, float *y);
void kv_exp_f64(int64_t n, const double *x, double *y);

/* silu(z) = z sigmoid(z) and its derivative; slope may be NULL, value may be z. */
void kv_silu_f32(int64_t n, const float *z, float *value, float *slope);
void kv_silu_f64(int64_t n, const double *z, double *value, double *slope);

typedef void kv_exp_fn(int64_t n, const float *x, float *y);
typedef void kv_silu_fn(int64_t n, const float *z, float *value, float *slope);
kv_exp_fn kv_exp_generic, kv_exp_avx2, kv_exp_avx512;
kv_silu_fn kv_silu_generic, kv_silu_avx2, kv_silu_avx512;

#endif
