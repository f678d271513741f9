/* Repeated timings of the benchmarks. */
#ifndef KV_EXPERIMENTS_BENCH_TIME_H
#define KV_EXPERIMENTS_BENCH_TIME_H

#include <stdbool.h>
#include <stdio.h>

#include "kernels/kernels.h"

typedef struct kv_spread {
    double least, median, most;
} kv_spread;

/* Of n > 0 values, which it sorts; the median of an even number is the mean of the two in the middle. */
kv_spread kv_spread_of(double *x, int32_t n);

/* Times work on the GPU by device events:
 *     kv_stopwatch w = {.gpu = g, .untimed = 2, .times = n};
 *     while (kv_stopwatch_next(&w, &st)) st = work();
 * and, if st is KV_OK, kv_spread_of(w.ms, w.n). */
enum { KV_STOPWATCH_MOST = 64 };
typedef struct kv_stopwatch {
    kv_gpu *gpu;
    int32_t untimed, times; /* rounds that do not count, then that do: KV_STOPWATCH_MOST at most */
    int32_t begun, n;       /* rounds so far; values in ms */
    double ms[KV_STOPWATCH_MOST];
} kv_stopwatch;

/* Ends the round under way and begins the next one; false when all are done, or when *st has failed, here or in the round. */
bool kv_stopwatch_next(kv_stopwatch *w, kv_status *st);

/* Whether a median met its goals (ms), in the same line. */
void kv_print_goal(FILE *out, double median, double must, double aim);

#endif
