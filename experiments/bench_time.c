/* Repeated timings of the benchmarks (bench_time.h). */
#include "experiments/bench_time.h"

#include <stdlib.h>

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

kv_spread kv_spread_of(double *x, int32_t n) {
    qsort(x, (size_t)n, sizeof *x, ascending);
    return (kv_spread){x[0], (x[(n - 1) / 2] + x[n / 2]) / 2, x[n - 1]};
}

bool kv_stopwatch_next(kv_stopwatch *w, kv_status *st) {
    float ms = 0;
    if (*st == KV_OK && w->begun) *st = kv_gpu_tick(w->gpu, 1);
    if (*st == KV_OK && w->begun) *st = kv_gpu_ms(w->gpu, 0, 1, &ms);
    if (*st != KV_OK) return false;
    if (w->begun > w->untimed) w->ms[w->n++] = (double)ms;
    if (w->n == w->times || w->n == KV_STOPWATCH_MOST) return false;
    w->begun++;
    *st = kv_gpu_tick(w->gpu, 0);
    return *st == KV_OK;
}

void kv_print_goal(FILE *out, double median, double must, double aim) {
    fprintf(out, "  must %.2f: %s, aim %.2f: %s", must, median <= must ? "met" : "MISSED", aim,
            median <= aim ? "met" : "missed");
}
