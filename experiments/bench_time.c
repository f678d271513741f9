/* Repeated timings of the benchmarks (bench_time.h). */
#include "experiments/bench_time.h"

#include <stdlib.h>

enum { MOST = 64 };

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

kv_spread kv_spread_of(double *x, int32_t n) {
    qsort(x, (size_t)n, sizeof *x, ascending);
    return (kv_spread){x[0], (x[(n - 1) / 2] + x[n / 2]) / 2, x[n - 1]};
}

kv_status kv_time_gpu(kv_gpu *g, kv_status (*run)(void *context), void *context, int32_t untimed,
                      int32_t times, kv_spread *ms) {
    kv_status st = KV_OK;
    double all[MOST];
    if (times > MOST) times = MOST;
    for (int32_t i = -untimed; i < times; i++) {
        float one;
        KV_TRY(kv_gpu_tick(g, 0));
        KV_TRY(run(context));
        KV_TRY(kv_gpu_tick(g, 1));
        KV_TRY(kv_gpu_ms(g, 0, 1, &one));
        if (i >= 0) all[i] = (double)one;
    }
    *ms = kv_spread_of(all, times);
out:
    return st;
}

void kv_print_goal(FILE *out, double median, double must, double aim) {
    fprintf(out, "  must %.2f: %s, aim %.2f: %s", must, median <= must ? "met" : "MISSED", aim,
            median <= aim ? "met" : "missed");
}
