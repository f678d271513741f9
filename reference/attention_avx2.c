/* Attention kernels for AVX2 with FMA. */
#define KERNEL kv_attention_avx2
#include "reference/attention_impl.h"
