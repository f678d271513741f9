/* Benchmark of the GPU kernels that decide: selection, closed loop. Device time on device-resident random data. */
#ifndef KV_EXPERIMENTS_BENCH_GPU_POLICY_H
#define KV_EXPERIMENTS_BENCH_GPU_POLICY_H

#include <stdio.h>

#include "kernels/kernels.h"

/* All 36 layers of Qwen3-8B at once (288 KV heads, 4 query heads each, head size 128, bfloat16), B = 2048. tb_per_s: copy ceiling
 * of the same run, reads plus writes. */
kv_status kv_bench_gpu_policy(FILE *out, kv_gpu *g, int32_t n_token, int32_t repeats,
                              double tb_per_s);

#endif
