/* Closed-loop kernels for AVX2 and FMA. */
#define KV_LOOP_TABLE kv_loop_kernel_avx2
#include "reference/closed_loop_kernel.h"
