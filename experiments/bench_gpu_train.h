/* Benchmark of what training adds to the networks on the GPU: pairs and loss, the optimiser's step. */
#ifndef KV_EXPERIMENTS_BENCH_GPU_TRAIN_H
#define KV_EXPERIMENTS_BENCH_GPU_TRAIN_H

#include <stdio.h>

#include "kernels/kernels.h"

/* All 36 layers of Qwen3-8B at once (288 KV heads), B = 2048, random data. tb_per_s: copy ceiling of the same run, reads plus writes. */
kv_status kv_bench_gpu_train(FILE *out, kv_gpu *g, int32_t n_token, int32_t repeats,
                             double tb_per_s);

#endif
