/* Benchmark of the GPU kernels. */
#include "experiments/bench_gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/bench_gpu_keys.h"
#include "experiments/bench_gpu_policy.h"
#include "experiments/bench_gpu_train.h"
#include "experiments/bench_time.h"
#include "kernels/kernels.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "reference/select.h"

enum { N_Q = 32, N_KV = 8, D = 128, SINKS = 4, WINDOW = 256, BUDGET = 2048 };

typedef struct bench {
    FILE *out;
    kv_gpu *gpu;
    kv_gpu_span *span;
    kv_gpu_plan *plan;
    kv_gpu_buffer *lse, *mass, *p, *t, *column, *o, *evict_at, *lse_long;
    int32_t n, repeats;
    double ceiling; /* TFLOP/s */
    /* query-key pairs of all query heads: u >= t, u >= t + window, kept, visited by the plan */
    double causal, later, kept, tiles;
} bench;

static kv_status run_lse(bench *b) {
    return kv_gpu_lse(b->span, SINKS, WINDOW, b->lse, NULL, NULL, NULL);
}
static kv_status run_events(bench *b) {
    return kv_gpu_lse(b->span, SINKS, WINDOW, b->lse, b->mass, b->p, b->t);
}
static kv_status run_column(bench *b) {
    return kv_gpu_column(b->span, WINDOW, 1, b->lse, false, b->column);
}
static kv_status run_column2(bench *b) {
    return kv_gpu_column(b->span, WINDOW, 2, b->lse, false, b->column);
}
static kv_status run_top(bench *b) {
    return kv_gpu_column(b->span, WINDOW, INFINITY, b->lse, false, b->column);
}
static kv_status run_sparse(bench *b) {
    return kv_gpu_column(b->span, WINDOW, 1, b->lse, true, b->column);
}
static kv_status run_plan(bench *b) { return kv_gpu_plan_fill(b->plan, b->evict_at); }
static kv_status run_masked(bench *b) {
    return kv_gpu_attend(b->span, b->plan, false, b->o, b->lse, b->lse_long);
}
static kv_status run_masked_exact(bench *b) {
    return kv_gpu_attend(b->span, b->plan, true, b->o, b->lse, b->lse_long);
}
static kv_status run_both(bench *b) {
    const kv_status st = run_plan(b);
    return st == KV_OK ? run_masked(b) : st;
}
static kv_status run_dense(bench *b) {
    return kv_gpu_attend(b->span, NULL, false, b->o, b->lse, NULL);
}

typedef enum pairs { NONE, CAUSAL, LATER, KEPT } pairs;
typedef struct operation {
    const char *name;
    kv_status (*run)(bench *b);
    pairs pairs;
    int products;     /* of 2 * D operations per pair */
    double must, aim; /* ms at 16384 tokens on an H200; 0: no goal */
    bool portable;    /* also timed with the portable kernels */
} operation;

static const operation operations[] = {
    {"lse", run_lse, CAUSAL, 1, 2.3, 1.85, true},
    {"lse + long-range maximum", run_events, CAUSAL, 1, 2.6, 2.15, false},
    {"column sums", run_column, LATER, 1, 2.15, 1.75, true},
    {"column sums, power 2", run_column2, LATER, 1, 2.15, 1.75, false},
    {"column maxima", run_top, LATER, 1, 0, 0, false},
    {"column sums, sparse lse", run_sparse, LATER, 2, 0, 0, false},
    {"masked attention: lists", run_plan, NONE, 0, 0, 0, false},
    {"masked attention: kernel", run_masked, KEPT, 2, 0, 0, true},
    {"masked attention", run_both, KEPT, 2, 3.3, 1.0, false},
    {"masked, exact P", run_masked_exact, KEPT, 3, 0, 0, false},
    {"dense attention", run_dense, CAUSAL, 2, 0, 0, true},
};
enum { OPERATIONS = sizeof operations / sizeof *operations };

static kv_status time_operation(bench *b, const operation *op, const char *path) {
    kv_status st = KV_OK;
    kv_stopwatch w = {.gpu = b->gpu, .untimed = 2, .times = b->repeats};
    while (kv_stopwatch_next(&w, &st)) st = op->run(b);
    KV_TRY(st);
    const kv_spread ms = kv_spread_of(w.ms, w.n);
    const double count[] = {0, b->causal, b->later, b->kept};
    const double rate = 2e-9 * D * op->products * count[op->pairs] / ms.median;
    fprintf(b->out, "%-26s %-8s %8.3f %8.3f %8.3f ", op->name, path, ms.median, ms.least, ms.most);
    if (op->products)
        fprintf(b->out, "%8.0f %6.1f %%", rate, 100 * rate / b->ceiling);
    else
        fprintf(b->out, "%17s", "");
    if (op->must > 0 && b->n == 16384) kv_print_goal(b->out, ms.median, op->must, op->aim);
    fputc('\n', b->out);
out:
    return st == KV_OK ? st : kv_error_context(st, "%s (%s)", op->name, path);
}

/* Random priorities, different in every head, through the running top-k. */
static kv_status decide(bench *b) {
    kv_status st = KV_OK;
    float *priority = NULL;
    int32_t *evict_at = NULL;
    const size_t cells = (size_t)N_KV * (size_t)b->n;
    const kv_span span = {.n_token = b->n, .stride = b->n, .n_q_head = N_Q, .n_kv_head = N_KV};
    const kv_run run = {.budget = BUDGET, .sinks = SINKS, .window = WINDOW};
    KV_NEW(priority, cells);
    KV_NEW(evict_at, cells);
    for (size_t i = 0; i < cells; i++)
        priority[i] = (float)kv_rand_uniform(1, (uint32_t)i, 0, 0, 0);
    KV_TRY(kv_select(&span, &run, priority, evict_at));
    b->kept = 0;
    for (size_t i = 0; i < cells; i++) {
        const int32_t t = (int32_t)(i % (size_t)b->n);
        b->kept += (evict_at[i] < b->n ? evict_at[i] : b->n) - t;
    }
    b->kept *= N_Q / N_KV;
    KV_TRY(kv_gpu_new(b->gpu, cells * 4, &b->evict_at));
    KV_TRY(kv_gpu_put(b->evict_at, evict_at, cells * 4));
    KV_TRY(kv_gpu_plan_new(b->gpu, N_KV, b->n, SINKS, WINDOW, b->evict_at, &b->plan));
    KV_TRY(kv_gpu_plan_pairs(b->plan, N_Q, &b->tiles));
out:
    free(priority);
    free(evict_at);
    return st;
}

/* Largest difference of a result between the two paths: the one check of the persistent kernels at full size. */
typedef struct result {
    const char *name;
    kv_status (*run)(bench *b);
    size_t offset; /* of the buffer in bench */
    size_t size;   /* 4: float, 8: double */
} result;

static const result results[] = {
    {"lse", run_events, offsetof(bench, lse), 4},
    {"long_mass", run_events, offsetof(bench, mass), 4},
    {"top_p", run_events, offsetof(bench, p), 4},
    {"column", run_column, offsetof(bench, column), 8},
    {"column, sparse lse", run_sparse, offsetof(bench, column), 8},
    {"masked o", run_masked_exact, offsetof(bench, o), 4},
    {"masked lse_long", run_masked_exact, offsetof(bench, lse_long), 4},
    {"dense o", run_dense, offsetof(bench, o), 4},
};
enum { RESULTS = sizeof results / sizeof *results };

static kv_status compare_paths(bench *b) {
    kv_status st = KV_OK;
    char *host[2] = {NULL, NULL};
    for (int i = 0; i < RESULTS; i++) {
        const result *r = &results[i];
        kv_gpu_buffer *buffer = *(kv_gpu_buffer **)(void *)((char *)b + r->offset);
        const size_t bytes = kv_gpu_bytes(buffer), n = bytes / r->size;
        double difference = 0, scale = 0, worst[2] = {0, 0};
        size_t at = 0;
        for (int path = 0; path < 2; path++) {
            KV_NEW(host[path], bytes);
            KV_TRY(kv_gpu_use_hopper(b->gpu, path == 1));
            KV_TRY(r->run(b));
            KV_TRY(kv_gpu_get(buffer, host[path], bytes));
        }
        for (size_t c = 0; c < n; c++) {
            double x, y;
            if (r->size == 4) {
                x = (double)((float *)(void *)host[0])[c];
                y = (double)((float *)(void *)host[1])[c];
            } else {
                x = ((double *)(void *)host[0])[c];
                y = ((double *)(void *)host[1])[c];
            }
            scale = fmax(scale, isfinite(x) ? fabs(x) : 0);
            if (x == y || (isnan(x) && isnan(y))) continue;
            const double d = isfinite(x - y) ? fabs(x - y) : INFINITY;
            if (d <= difference) continue;
            difference = d;
            at = c;
            worst[0] = x;
            worst[1] = y;
        }
        fprintf(b->out, "  %-20s %.3g (values up to %.3g; at %zu: mma.sync %.9g, wgmma %.9g)\n",
                r->name, difference, scale, at, worst[0], worst[1]);
        for (int path = 0; path < 2; path++) {
            free(host[path]);
            host[path] = NULL;
        }
    }
out:
    free(host[0]);
    free(host[1]);
    return st;
}

static kv_status bench_open(bench *b) {
    kv_status st = KV_OK;
    const size_t cells = (size_t)N_Q * (size_t)b->n;
    kv_gpu_buffer **words[] = {&b->lse, &b->mass, &b->p, &b->t, &b->lse_long};
    KV_TRY(kv_gpu_shared(&b->gpu));
    KV_TRY(kv_gpu_span_random(b->gpu, N_Q, N_KV, b->n, D, KV_BF16, 1, &b->span));
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        KV_TRY(kv_gpu_new(b->gpu, cells * 4, words[i]));
    KV_TRY(kv_gpu_new(b->gpu, cells * 8, &b->column));
    KV_TRY(kv_gpu_new(b->gpu, cells * D * 4, &b->o));
    KV_TRY(decide(b));
    b->causal = (double)N_Q * b->n * (b->n + 1.0) / 2;
    b->later = (double)N_Q * (b->n - WINDOW) * (b->n - WINDOW + 1.0) / 2;
out:
    return st;
}

static void bench_close(bench *b) {
    kv_gpu_buffer *all[] = {b->lse, b->mass, b->p, b->t, b->column, b->o, b->evict_at, b->lse_long};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) (void)kv_gpu_free(all[i]);
    kv_gpu_plan_free(b->plan);
    kv_gpu_span_free(b->span);
}

kv_status kv_bench_gpu(FILE *out, int32_t n_token, int32_t repeats) {
    kv_status st = KV_OK;
    bench b = {.out = out, .n = n_token, .repeats = repeats};
    kv_gpu_info info;
    double copy = 0;
    if (n_token <= BUDGET || repeats < 1)
        KV_RAISE(KV_E_USAGE, "bench: %d tokens, %d repeats; more than %d and at least 1 are needed",
                 n_token, repeats, BUDGET);
    KV_TRY(bench_open(&b));
    kv_gpu_describe(b.gpu, &info);
    KV_TRY(kv_gpu_copy_ceiling(b.gpu, (size_t)4 << 30, &copy));
    KV_TRY(kv_gpu_matmul_ceiling(b.gpu, 8192, &b.ceiling));
    fprintf(out, "%s: bf16 matrix product 8192 %.0f TFLOP/s, copy %.2f TB/s\n", info.name,
            b.ceiling, copy);
    fprintf(out,
            "%d tokens, %d/%d heads, d %d, bf16; masked: B=%d, kept pairs %.3f of causal, visited "
            "%.3f\n",
            n_token, N_Q, N_KV, D, BUDGET, b.kept / b.causal, b.tiles / b.causal);
    fprintf(out, "%-26s %-8s %8s %8s %8s %8s %8s\n", "operation", "path", "ms", "least", "most",
            "TFLOP/s", "ceiling");
    for (int i = 0; i < OPERATIONS; i++) {
        if (info.hopper) KV_TRY(time_operation(&b, &operations[i], "wgmma"));
        if (info.hopper && !operations[i].portable) continue;
        KV_TRY(kv_gpu_use_hopper(b.gpu, false));
        KV_TRY(time_operation(&b, &operations[i], "mma.sync"));
        if (info.hopper) KV_TRY(kv_gpu_use_hopper(b.gpu, true));
    }
    if (info.hopper) {
        fprintf(out, "largest difference between the two paths:\n");
        KV_TRY(compare_paths(&b));
    }
    KV_TRY(kv_bench_gpu_keys(out, b.gpu, n_token, repeats, copy, b.ceiling));
    KV_TRY(kv_bench_gpu_policy(out, b.gpu, n_token, repeats, copy));
    KV_TRY(kv_bench_gpu_train(out, b.gpu, n_token, repeats, copy, b.ceiling));
out:
    bench_close(&b);
    return st;
}
