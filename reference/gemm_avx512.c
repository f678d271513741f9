/* Product and activations for AVX-512: 12 x 32 register tile. */
#define GEMM_NAME kv_gemm_avx512
#define EXP_NAME kv_exp_avx512
#define SILU_NAME kv_silu_avx512
#define ROWS 12
#include "reference/gemm_f32_impl.h"
