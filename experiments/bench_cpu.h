/* Time of CPU attention against the arithmetic ceiling of the same machine at the same moment. */
#ifndef KV_BENCH_CPU_H
#define KV_BENCH_CPU_H

#include <stdint.h>
#include <stdio.h>

#include "reference/core/status.h"

/* One layer of the embedded model's shape (8 query heads, 2 KV heads, head size 64) and one of head size 128, random data. Prints a
 * line per operation: median seconds of `repeats`, GFLOP/s on the pairs that are really needed, median ratio to the fp32 FMA
 * ceiling measured right before each repetition with the same threads. n_token >= 1; repeats >= 1 (KV_E_USAGE). */
kv_status kv_bench_cpu(FILE *out, int32_t n_token, int32_t repeats);

#endif
