/* Benchmark of selection and closed loop on the GPU. */
#include "experiments/bench_gpu_policy.h"

#include <stdlib.h>

#include "reference/core/mem.h"
#include "reference/core/rand.h"

enum {
    LAYERS = 36,
    LAYER_HEADS = 8,
    HEADS = LAYERS * LAYER_HEADS,
    GROUP = 4,
    D = 128,
    BUDGET = 2048,
    REPEATS = 64
};

static const kv_run run = {.budget = BUDGET, .sinks = 4, .window = 256};

typedef struct bench {
    kv_gpu *gpu;
    int32_t n;
    kv_gpu_span *span;
    kv_gpu_buffer *uniform, *rising, *evict_at;
} bench;

static const kv_attention_rule tova = {.per_layer = true, .reduce = KV_REDUCE_MEAN};
static const kv_attention_rule tova_head = {.per_layer = false, .reduce = KV_REDUCE_MEAN};
static const kv_attention_rule h2o = {
    .per_layer = false, .reduce = KV_REDUCE_SUM, .decay = 1, .protect_recent = BUDGET / 2};

static kv_status replay(bench *b, const kv_attention_rule *rule) {
    return kv_gpu_replay_attention(b->span, rule, LAYER_HEADS, BUDGET, NULL, NULL, b->evict_at);
}

static kv_status run_uniform(bench *b) {
    return kv_gpu_select(b->gpu, HEADS, b->n, &run, b->uniform, b->evict_at);
}
static kv_status run_rising(bench *b) {
    return kv_gpu_select(b->gpu, HEADS, b->n, &run, b->rising, b->evict_at);
}
static kv_status run_tova(bench *b) { return replay(b, &tova); }
static kv_status run_tova_head(bench *b) { return replay(b, &tova_head); }
static kv_status run_h2o(bench *b) { return replay(b, &h2o); }

typedef struct operation {
    const char *name;
    kv_status (*run)(bench *b);
    bool once; /* long: one run, no warm-up */
    bool
        streams; /* floor: every held key is read at every query; else priorities in, evict_at out */
    double must, aim; /* ms at 16384 tokens on an H200 */
} operation;

static const operation operations[] = {
    {"select, 288 heads", run_uniform, false, false, 0.5, 0.15},
    {"select, rising priorities", run_rising, false, false, 0.5, 0.15},
    {"closed loop, tova:reduce=head", run_tova_head, true, true, 1500, 600},
    {"closed loop, h2o", run_h2o, true, true, 1500, 600},
    {"closed loop, tova", run_tova, true, true, 1500, 600},
};
enum { OPERATIONS = sizeof operations / sizeof *operations };

static int ascending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static kv_status time_operation(FILE *out, bench *b, const operation *op, int32_t repeats,
                                double tb_per_s) {
    kv_status st = KV_OK;
    float ms[REPEATS];
    const int32_t times = op->once ? 1 : repeats < REPEATS ? repeats : REPEATS;
    for (int32_t i = op->once ? 0 : -2; i < times; i++) {
        KV_TRY(kv_gpu_tick(b->gpu, 0));
        KV_TRY(op->run(b));
        KV_TRY(kv_gpu_tick(b->gpu, 1));
        KV_TRY(kv_gpu_ms(b->gpu, 0, 1, &ms[i < 0 ? 0 : i]));
    }
    qsort(ms, (size_t)times, sizeof *ms, ascending);
    const double median = (double)ms[times / 2];
    const double bytes = op->streams ? (double)HEADS * (BUDGET + 1) * D * 2 * (b->n - BUDGET)
                                     : (double)HEADS * b->n * 8;
    const double floor = bytes / tb_per_s * 1e-9;
    fprintf(out, "%-30s %10.3f %10.3f %10.3f %10.3f %7.2f", op->name, median, (double)ms[0],
            (double)ms[times - 1], floor, median / floor);
    if (b->n == 16384)
        fprintf(out, "  must %.2f: %s, aim %.2f: %s", op->must,
                median <= op->must ? "met" : "MISSED", op->aim,
                median <= op->aim ? "met" : "missed");
    fputc('\n', out);
    fflush(out);
out:
    return st == KV_OK ? st : kv_error_context(st, "%s", op->name);
}

static kv_status open_bench(bench *b) {
    kv_status st = KV_OK;
    float *priority = NULL;
    const size_t n = (size_t)b->n, cells = HEADS * n;
    KV_NEW(priority, cells);
    KV_TRY(kv_gpu_new(b->gpu, cells * 4, &b->uniform));
    KV_TRY(kv_gpu_new(b->gpu, cells * 4, &b->rising));
    KV_TRY(kv_gpu_new(b->gpu, cells * 4, &b->evict_at));
    for (size_t i = 0; i < cells; i++)
        priority[i] = (float)kv_rand_uniform(1, (uint32_t)i, 0, 0, 0);
    KV_TRY(kv_gpu_put(b->uniform, priority, cells * 4));
    /* A strong decay: almost every arrival replaces a key. */
    for (size_t i = 0; i < cells; i++) priority[i] += (float)(i % n) * 1e-3f;
    KV_TRY(kv_gpu_put(b->rising, priority, cells * 4));
    KV_TRY(kv_gpu_span_random(b->gpu, HEADS * GROUP, HEADS, b->n, D, KV_BF16, 2, &b->span));
out:
    free(priority);
    return st;
}

kv_status kv_bench_gpu_policy(FILE *out, kv_gpu *g, int32_t n_token, int32_t repeats,
                              double tb_per_s) {
    kv_status st = KV_OK;
    bench b = {.gpu = g, .n = n_token};
    KV_TRY(open_bench(&b));
    fprintf(out,
            "%d heads, %d tokens, B=%d; floor: bytes through device memory, closed loop with "
            "nothing kept on the chip\n",
            HEADS, n_token, BUDGET);
    fprintf(out, "%-30s %10s %10s %10s %10s %7s\n", "operation", "ms", "least", "most", "floor ms",
            "ratio");
    for (int i = 0; i < OPERATIONS; i++)
        KV_TRY(time_operation(out, &b, &operations[i], repeats, tb_per_s));
out:
    (void)kv_gpu_free(b.uniform);
    (void)kv_gpu_free(b.rising);
    (void)kv_gpu_free(b.evict_at);
    kv_gpu_span_free(b.span);
    return st;
}
