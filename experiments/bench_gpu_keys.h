/* Benchmark of the GPU operations of single policies: knorm, keydiff, oracle_step, streaming:pos=cache. */
#ifndef KV_EXPERIMENTS_BENCH_GPU_KEYS_H
#define KV_EXPERIMENTS_BENCH_GPU_KEYS_H

#include <stdio.h>

#include "kernels/kernels.h"

/* One layer of Qwen3-8B (32 / 8 heads of 128, bfloat16), B = 2048, random data. tb_per_s, tflop_per_s: ceilings of the same run,
 * copies (reads plus writes) and bf16 products. */
kv_status kv_bench_gpu_keys(FILE *out, kv_gpu *g, int32_t n_token, int32_t repeats, double tb_per_s,
                            double tflop_per_s);

#endif
