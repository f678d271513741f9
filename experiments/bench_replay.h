/* Time of replay and metrics on the CPU (kvlab bench). */
#ifndef KV_EXPERIMENTS_BENCH_REPLAY_H
#define KV_EXPERIMENTS_BENCH_REPLAY_H

#include <stdint.h>
#include <stdio.h>

#include "reference/core/status.h"

/* One layer of the embedded model's shape (8 query heads, 2 KV heads, head size 64), random data, budget n_token/8. One line per
 * policy: median seconds of replay and of masked attention with metrics. n_token >= 4096; repeats >= 1 (KV_E_USAGE). */
kv_status kv_bench_replay(FILE *out, int32_t n_token, int32_t repeats);

#endif
