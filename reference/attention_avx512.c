/* Attention kernels for AVX-512 (F, BW, VL, DQ). */
#define KERNEL kv_attention_avx512
#include "reference/attention_impl.h"
