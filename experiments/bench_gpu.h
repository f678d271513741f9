/* Benchmark of the GPU kernels: device time on device-resident data, as a ratio to ceilings measured in the same run. */
#ifndef KV_EXPERIMENTS_BENCH_GPU_H
#define KV_EXPERIMENTS_BENCH_GPU_H

#include <stdint.h>
#include <stdio.h>

#include "reference/core/status.h"

/* Attention of one layer of Qwen3-8B (32 query heads, 8 KV heads, head size 128, bfloat16) over n_token random tokens, median of
 * `repeats`. Also compares the results of the wgmma and the portable kernels at this size. KV_E_UNAVAILABLE without a GPU. */
kv_status kv_bench_gpu(FILE *out, int32_t n_token, int32_t repeats);

#endif
