/* Product and activations for AVX2 with FMA: 6 x 16 register tile. */
#define GEMM_NAME kv_gemm_avx2
#define EXP_NAME kv_exp_avx2
#define SILU_NAME kv_silu_avx2
#define ROWS 6
#include "reference/gemm_f32_impl.h"
