/* Closed-loop kernels for any processor. */
#define KV_LOOP_TABLE kv_loop_kernel_generic
#include "reference/closed_loop_kernel.h"
