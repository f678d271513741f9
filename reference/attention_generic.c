/* Attention kernels for plain C (any processor). */
#define KERNEL kv_attention_generic
#include "reference/attention_impl.h"
