/* Benchmark of what training adds to the networks on the GPU: pairs and loss, the optimiser's step, the soft mask
 * of dms. */
#ifndef KV_EXPERIMENTS_BENCH_GPU_TRAIN_H
#define KV_EXPERIMENTS_BENCH_GPU_TRAIN_H

#include <stdio.h>

#include "kernels/kernels.h"

/* All 36 layers of Qwen3-8B at once (288 KV heads), B = 2048, and one layer of it under the soft mask, random data. tb_per_s, tflop_per_s: ceilings of the
 * same run, copies (reads plus writes) and bf16 products. */
kv_status kv_bench_gpu_train(FILE *out, kv_gpu *g, int32_t n_token, int32_t repeats,
                             double tb_per_s, double tflop_per_s);

#endif
