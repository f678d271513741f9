/* Time of the model's forward pass (kvlab bench). */
#ifndef KV_EXPERIMENTS_BENCH_MODEL_H
#define KV_EXPERIMENTS_BENCH_MODEL_H

#include <stdint.h>
#include <stdio.h>

#include "reference/core/status.h"

/* Runs `repeats` forward passes of the model in `model_dir` over n_token pseudo-random tokens, logits included, and prints one line:
 * median seconds, GFLOP/s over causal attention pairs and weight products, and the attention's part of both. */
kv_status kv_bench_model(FILE *out, const char *model_dir, int32_t n_token, int32_t repeats);

#endif
