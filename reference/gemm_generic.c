/* Product and activations, portable: 4 x 8 register tile, products and sums rounded one by one. */
#define GEMM_NAME kv_gemm_generic
#define EXP_NAME kv_exp_generic
#define SILU_NAME kv_silu_generic
#define ROWS 4
#include "reference/gemm_f32_impl.h"
