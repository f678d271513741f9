/* Benchmark of the GPU operations of single policies (bench_gpu_keys.h). */
#include "experiments/bench_gpu_keys.h"

#include <math.h>
#include <stdlib.h>

#include "experiments/bench_time.h"
#include "reference/core/mem.h"

enum { HEADS = 8, QUERIES = 32, D = 128, BUDGET = 2048, SINKS = 4, WINDOW = 256 };

static const kv_run run = {.budget = BUDGET, .sinks = SINKS, .window = WINDOW};

typedef struct bench {
    kv_gpu_span *span;
    kv_gpu_buffer *priority, *evict_at, *lse, *mass, *o;
    double inv_freq[D / 2];
} bench;

static kv_status run_norms(bench *b) { return kv_gpu_norm_priorities(b->span, b->priority); }
static kv_status run_cosines(bench *b) {
    return kv_gpu_cosine_priorities(b->span, WINDOW, b->priority);
}
static kv_status run_step(bench *b) { return kv_gpu_step_mass(b->span, &run, b->lse, b->mass); }
static kv_status run_turned(bench *b) {
    return kv_gpu_attend_turned(b->span, b->evict_at, NULL, b->inv_freq, b->o, b->lse);
}

typedef struct operation {
    const char *name;
    kv_status (*run)(bench *b);
    bool products; /* floor: matrix products; otherwise keys through device memory, once */
} operation;
static const operation operations[] = {
    {"knorm", run_norms, false},
    {"keydiff", run_cosines, false},
    {"oracle step", run_step, true},
    {"streaming:pos=cache, attention", run_turned, true},
};
enum { OPERATIONS = sizeof operations / sizeof *operations };

static kv_status open_bench(bench *b, kv_gpu *g, int32_t n) {
    kv_status st = KV_OK;
    int32_t *evict_at = NULL; /* as streaming decides */
    const size_t rows = HEADS * (size_t)n, cells = QUERIES * (size_t)n;
    KV_NEW(evict_at, rows);
    for (size_t i = 0; i < rows; i++) {
        const int32_t t = (int32_t)(i % (size_t)n), leaves = t + BUDGET - SINKS;
        evict_at[i] = t < SINKS || leaves >= n ? KV_NEVER : leaves;
    }
    for (int c = 0; c < D / 2; c++) b->inv_freq[c] = pow(1e6, -2.0 * c / D);
    KV_TRY(kv_gpu_span_random(g, QUERIES, HEADS, n, D, KV_BF16, 4, &b->span));
    KV_TRY(kv_gpu_new(g, rows * sizeof(float), &b->priority));
    KV_TRY(kv_gpu_new(g, rows * sizeof *evict_at, &b->evict_at));
    KV_TRY(kv_gpu_put(b->evict_at, evict_at, rows * sizeof *evict_at));
    KV_TRY(kv_gpu_new(g, cells * sizeof(float), &b->lse));
    KV_TRY(kv_gpu_new(g, rows * sizeof(double), &b->mass));
    KV_TRY(kv_gpu_new(g, cells * D * sizeof(float), &b->o));
    KV_TRY(kv_gpu_lse(b->span, SINKS, WINDOW, b->lse, NULL, NULL, NULL));
out:
    free(evict_at);
    return st;
}

static kv_status time_operation(FILE *out, kv_gpu *g, bench *b, const operation *op,
                                int32_t repeats, double floor) {
    kv_status st = KV_OK;
    kv_stopwatch w = {.gpu = g, .untimed = 2, .times = repeats};
    while (kv_stopwatch_next(&w, &st)) st = op->run(b);
    KV_TRY(st);
    const kv_spread ms = kv_spread_of(w.ms, w.n);
    fprintf(out, "%-30s %10.3f %10.3f %10.3f %10.3f %7.2f\n", op->name, ms.median, ms.least,
            ms.most, floor, ms.median / floor);
    fflush(out);
out:
    return st == KV_OK ? st : kv_error_context(st, "%s", op->name);
}

kv_status kv_bench_gpu_keys(FILE *out, kv_gpu *g, int32_t n_token, int32_t repeats, double tb_per_s,
                            double tflop_per_s) {
    kv_status st = KV_OK;
    bench b = {.span = NULL};
    const double n = n_token, full = n < BUDGET ? n : BUDGET, pairs = n * (n + 1) / 2,
                 kept = full * (full + 1) / 2 + (n - full) * full;
    const double keys = HEADS * n * D * 2 / tb_per_s * 1e-9;
    const double product = QUERIES * 2.0 * D / tflop_per_s * 1e-9;
    const double floor[OPERATIONS] = {keys, keys, product * pairs, 2 * product * kept};
    KV_TRY(open_bench(&b, g, n_token));
    fprintf(out, "%d / %d heads of %d, %d tokens, B=%d; floor: products, or keys read once\n",
            QUERIES, HEADS, D, n_token, BUDGET);
    fprintf(out, "%-30s %10s %10s %10s %10s %7s\n", "operation", "ms", "least", "most", "floor ms",
            "ratio");
    for (int i = 0; i < OPERATIONS; i++)
        KV_TRY(time_operation(out, g, &b, &operations[i], repeats, floor[i]));
out:
    kv_gpu_span_free(b.span);
    (void)kv_gpu_free(b.priority);
    (void)kv_gpu_free(b.evict_at);
    (void)kv_gpu_free(b.lse);
    (void)kv_gpu_free(b.mass);
    (void)kv_gpu_free(b.o);
    return st;
}
