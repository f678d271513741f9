/* Repeated timings of the benchmarks. */
#ifndef KV_EXPERIMENTS_BENCH_TIME_H
#define KV_EXPERIMENTS_BENCH_TIME_H

#include <stdio.h>

#include "kernels/kernels.h"

typedef struct kv_spread {
    double least, median, most;
} kv_spread;

/* Of n > 0 values, which it sorts; the median of an even number is the mean of the two in the middle. */
kv_spread kv_spread_of(double *x, int32_t n);

/* Milliseconds between device events around `run`, called `times` > 0 times, 64 at most, after `untimed` calls. */
kv_status kv_time_gpu(kv_gpu *g, kv_status (*run)(void *context), void *context, int32_t untimed,
                      int32_t times, kv_spread *ms);

/* Whether a median met its goals (ms), in the same line. */
void kv_print_goal(FILE *out, double median, double must, double aim);

#endif
