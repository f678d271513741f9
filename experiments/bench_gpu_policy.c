/* Benchmark of selection, scorers and closed loop on the GPU. */
#include "experiments/bench_gpu_policy.h"

#include <stdlib.h>

#include "experiments/bench_time.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"

enum {
    LAYERS = 36,
    LAYER_HEADS = 8,
    HEADS = LAYERS * LAYER_HEADS,
    GROUP = 4,
    D = 128,
    BUDGET = 2048
};

static const kv_run run = {.budget = BUDGET, .sinks = 4, .window = 256};

typedef struct bench {
    kv_gpu *gpu;
    int32_t n;
    kv_gpu_span *span;
    kv_gpu_buffer *uniform, *rising, *evict_at;
    kv_gpu_net *mlp, *mlstm; /* one layer: LAYER_HEADS lanes */
    /* [LAYER_HEADS][n][2 D], parameters, their gradient, [LAYER_HEADS][n] */
    kv_gpu_buffer *x, *param, *grad, *rhat;
} bench;

static const kv_net_spec mlp_spec = {.n_input = 2 * D, .n_mlp = 256, .window = 256};
static const kv_net_spec mlstm_spec = {.recurrent = true,
                                       .delay = true,
                                       .norm = true,
                                       .n_input = 2 * D,
                                       .n_key = 128,
                                       .n_value = 128,
                                       .window = 256};

static const kv_attention_rule tova = {.per_layer = true, .reduce = KV_REDUCE_MEAN};
static const kv_attention_rule tova_head = {.per_layer = false, .reduce = KV_REDUCE_MEAN};
static const kv_attention_rule h2o = {
    .per_layer = false, .reduce = KV_REDUCE_SUM, .decay = 1, .protect_recent = BUDGET / 2};

static const kv_attention_rule cumulative = {
    .per_layer = true, .reduce = KV_REDUCE_MEAN, .decay = 1};

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
static kv_status run_cumulative(bench *b) { return replay(b, &cumulative); }

static kv_status passes(bench *b, kv_gpu_net *net) {
    const kv_status st = kv_gpu_net_forward(net, b->param, b->rhat);
    return st == KV_OK ? kv_gpu_net_backward(net, b->param, b->rhat, b->grad) : st;
}
static kv_status run_mlp(bench *b) { return passes(b, b->mlp); }
static kv_status run_mlp_forward(bench *b) { return kv_gpu_net_forward(b->mlp, b->param, b->rhat); }
static kv_status run_mlstm(bench *b) { return passes(b, b->mlstm); }
static kv_status run_mlstm_forward(bench *b) {
    return kv_gpu_net_forward(b->mlstm, b->param, b->rhat);
}

typedef enum floor_of {
    PRIORITIES,
    KEYS,
    INPUTS
} floor_of; /* what must pass through device memory */
typedef struct operation {
    const char *name;
    kv_status (*run)(bench *b);
    bool once; /* long: one run, no warm-up */
    floor_of floor;
    double must, aim; /* ms at 16384 tokens on an H200; 0: no goal */
} operation;

static const operation operations[] = {
    {"select, 288 heads", run_uniform, false, PRIORITIES, 0.5, 0.15},
    {"select, rising priorities", run_rising, false, PRIORITIES, 0.5, 0.15},
    {"mlp 256, forward", run_mlp_forward, false, INPUTS, 0, 0},
    {"mlp 256, with gradients", run_mlp, false, INPUTS, 0.15, 0.09},
    {"mlstm 128x128, forward", run_mlstm_forward, false, INPUTS, 0, 0},
    {"mlstm 128x128, with gradients", run_mlstm, false, INPUTS, 0.8, 0.39},
    {"closed loop, tova:reduce=head", run_tova_head, true, KEYS, 1500, 600},
    {"closed loop, h2o", run_h2o, true, KEYS, 1500, 600},
    {"closed loop, tova", run_tova, true, KEYS, 1500, 600},
    {"closed loop, cumulative", run_cumulative, true, KEYS, 1500, 600},
};
enum { OPERATIONS = sizeof operations / sizeof *operations };

static kv_status time_operation(FILE *out, bench *b, const operation *op, int32_t repeats,
                                double tb_per_s) {
    kv_status st = KV_OK;
    kv_stopwatch w = {.gpu = b->gpu, .untimed = op->once ? 0 : 2, .times = op->once ? 1 : repeats};
    while (kv_stopwatch_next(&w, &st)) st = op->run(b);
    KV_TRY(st);
    const kv_spread ms = kv_spread_of(w.ms, w.n);
    const double bytes[] = {[PRIORITIES] = (double)HEADS * b->n * 8,
                            [KEYS] = (double)HEADS * (BUDGET + 1) * D * 2 * (b->n - BUDGET),
                            [INPUTS] = (double)LAYER_HEADS * b->n * 2 * D * 2 * 2};
    const double floor = bytes[op->floor] / tb_per_s * 1e-9;
    fprintf(out, "%-30s %10.3f %10.3f %10.3f %10.3f %7.2f", op->name, ms.median, ms.least, ms.most,
            floor, ms.median / floor);
    if (op->must > 0 && b->n == 16384) kv_print_goal(out, ms.median, op->must, op->aim);
    fputc('\n', out);
    fflush(out);
out:
    return st == KV_OK ? st : kv_error_context(st, "%s", op->name);
}

static kv_status open_nets(bench *b) {
    kv_status st = KV_OK;
    float *host = NULL;
    kv_net_layout layout;
    const size_t rows = LAYER_HEADS * (size_t)b->n, cells = rows * 2 * D;
    const int64_t doc_first[2] = {0, b->n};
    kv_rng rng = kv_rng_make(3, 0);
    kv_net_describe(&mlstm_spec, &layout); /* the larger one: its parameters serve both */
    const size_t count = LAYER_HEADS * (size_t)layout.n_param;
    KV_NEW(host, cells);
    KV_TRY(kv_gpu_new(b->gpu, cells * 4, &b->x));
    KV_TRY(kv_gpu_new(b->gpu, count * 4, &b->param));
    KV_TRY(kv_gpu_new(b->gpu, count * 4, &b->grad));
    KV_TRY(kv_gpu_new(b->gpu, rows * 4, &b->rhat));
    for (size_t i = 0; i < cells; i++) host[i] = (float)(3.4 * kv_rng_uniform(&rng) - 1.7);
    KV_TRY(kv_gpu_put(b->x, host, cells * 4));
    for (size_t i = 0; i < count; i++) host[i] = (float)(0.1 * kv_rng_uniform(&rng) - 0.05);
    KV_TRY(kv_gpu_put(b->param, host, count * 4));
    KV_TRY(kv_gpu_net_new(b->gpu, &mlp_spec, LAYER_HEADS, 1, false, &b->mlp));
    KV_TRY(kv_gpu_net_new(b->gpu, &mlstm_spec, LAYER_HEADS, 1, false, &b->mlstm));
    KV_TRY(kv_gpu_net_input(b->mlp, b->n, 1, doc_first, b->x, NULL, NULL));
    KV_TRY(kv_gpu_net_input(b->mlstm, b->n, 1, doc_first, b->x, NULL, NULL));
out:
    free(host);
    return st;
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
    KV_TRY(open_nets(&b));
    fprintf(out,
            "%d heads, %d tokens, B=%d; floor: bytes through device memory, closed loop with "
            "every held key read for every query\n",
            HEADS, n_token, BUDGET);
    fprintf(out, "%-30s %10s %10s %10s %10s %7s\n", "operation", "ms", "least", "most", "floor ms",
            "ratio");
    for (int i = 0; i < OPERATIONS; i++)
        KV_TRY(time_operation(out, &b, &operations[i], repeats, tb_per_s));
out:
    (void)kv_gpu_free(b.uniform);
    (void)kv_gpu_free(b.rising);
    (void)kv_gpu_free(b.evict_at);
    (void)kv_gpu_free(b.x);
    (void)kv_gpu_free(b.param);
    (void)kv_gpu_free(b.grad);
    (void)kv_gpu_free(b.rhat);
    kv_gpu_net_free(b.mlp);
    kv_gpu_net_free(b.mlstm);
    kv_gpu_span_free(b.span);
    return st;
}
