/* Closed-loop kernels for AVX-512. */
#define KV_LOOP_TABLE kv_loop_kernel_avx512
#include "reference/closed_loop_kernel.h"
