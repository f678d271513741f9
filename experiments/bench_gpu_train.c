/* Benchmark of pairs, boundary loss, AdamW and attention under the soft mask on the GPU. */
#include "experiments/bench_gpu_train.h"

#include <math.h>
#include <stdlib.h>

#include "experiments/bench_time.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"

enum { HEADS = 32, KV_HEADS = 8, D = 128, EVERY = 4 }; /* of the soft mask: one layer */
enum { LANES = 288, N_PARAM = 66304, BUDGET = 2048 };  /* N_PARAM: MLP of 256 on 256 */

static const kv_run run = {.budget = BUDGET, .sinks = 4, .window = 256};
static const kv_adamw adamw = {.rate = 3e-3, .beta1 = .9, .beta2 = .95, .eps = 1e-8};

typedef struct bench {
    kv_gpu *gpu;
    int32_t n;
    kv_gpu_boundary *boundary;
    double log_gamma[LANES];
    kv_gpu_buffer *rhat, *e, *loss;              /* [LANES][n], [LANES] */
    kv_gpu_buffer *grad, *param, *m1, *m2, *sum; /* [LANES][N_PARAM], [1] */
    kv_gpu_span *span;
    kv_gpu_window window;
    kv_gpu_buffer *log_keep;                 /* [KV_HEADS][n] */
    kv_gpu_buffer *o, *dense, *lse, *d_keep; /* [HEADS][n] (o, dense: [D]) */
} bench;

static kv_status run_pairs(bench *b) { return kv_gpu_boundary_pairs(b->boundary, 0, b->log_gamma); }
static kv_status run_loss(bench *b) {
    return kv_gpu_boundary_loss(b->boundary, b->rhat, b->e, b->loss);
}
static kv_status run_adamw(bench *b) {
    return kv_gpu_adamw(b->gpu, &adamw, 1, 1, (int64_t)LANES * N_PARAM, b->grad, b->param, b->m1,
                        b->m2, b->sum);
}

static kv_status run_soft_attend(bench *b) {
    return kv_gpu_soft_attend(b->span, &b->window, b->log_keep, b->o, b->dense, b->lse);
}
static kv_status run_soft_backward(bench *b) {
    return kv_gpu_soft_backward(b->span, &b->window, b->log_keep, b->o, b->lse, b->dense,
                                b->d_keep);
}

typedef struct operation {
    const char *name;
    kv_status (*run)(bench *b);
    double token_bytes, param_bytes; /* that must pass through device memory */
    /* of D numbers, of every pair of one of the queries that count and one of its keys */
    double products;
} operation;

/* Pairs: target in, newcomer, worst kept and margin out. Loss: these and scores in, gradients out. */
static const operation operations[] = {
    {"boundary pairs, 288 heads", run_pairs, 4 + 16, 0, 0},
    {"boundary loss, gradients", run_loss, 16 + 4 + 4, 0, 0},
    {"adamw, 19 M parameters", run_adamw, 0, 4 + 28, 0},
    {"soft mask, with and without", run_soft_attend, 0, 0, 3},
    {"soft mask, gradients", run_soft_backward, 0, 0, 2},
};
enum { OPERATIONS = sizeof operations / sizeof *operations };

static kv_status time_operation(FILE *out, bench *b, const operation *op, int32_t repeats,
                                double tb_per_s, double tflop_per_s) {
    kv_status st = KV_OK;
    kv_stopwatch w = {.gpu = b->gpu, .untimed = 2, .times = repeats};
    while (kv_stopwatch_next(&w, &st)) st = op->run(b);
    KV_TRY(st);
    const kv_spread ms = kv_spread_of(w.ms, w.n);
    const double n = b->n, bytes = LANES * (op->token_bytes * n + op->param_bytes * N_PARAM),
                 products = op->products * 2 * D * HEADS * n * n / 2 / EVERY,
                 floor = (bytes / tb_per_s + products / tflop_per_s) * 1e-9;
    fprintf(out, "%-30s %10.3f %10.3f %10.3f %10.3f %7.2f\n", op->name, ms.median, ms.least,
            ms.most, floor, ms.median / floor);
out:
    return st == KV_OK ? st : kv_error_context(st, "%s", op->name);
}

static kv_status fill(kv_gpu *g, size_t n, uint32_t stream, float *host, kv_gpu_buffer **to) {
    for (size_t i = 0; i < n; i++) host[i] = (float)kv_rand_uniform(1, (uint32_t)i, stream, 0, 0);
    const kv_status st = kv_gpu_new(g, n * sizeof *host, to);
    return st == KV_OK ? kv_gpu_put(*to, host, n * sizeof *host) : st;
}

static kv_status bench_open(bench *b) {
    kv_status st = KV_OK;
    const size_t cells = LANES * (size_t)b->n, params = (size_t)LANES * N_PARAM;
    const int64_t doc_first[2] = {0, b->n};
    float *host = NULL;
    KV_NEW(host, cells > params ? cells : params);
    for (int i = 0; i < LANES; i++) b->log_gamma[i] = -2e-5;
    KV_TRY(fill(b->gpu, params, 0, host, &b->grad));
    KV_TRY(fill(b->gpu, params, 1, host, &b->param));
    KV_TRY(fill(b->gpu, params, 2, host, &b->m1));
    KV_TRY(fill(b->gpu, params, 3, host, &b->m2));
    KV_TRY(fill(b->gpu, cells, 4, host, &b->rhat));
    KV_TRY(kv_gpu_boundary_new(b->gpu, &run, &kv_loss_defaults, LANES, b->n, 1, doc_first, host,
                               &b->boundary));
    KV_TRY(kv_gpu_new(b->gpu, cells * sizeof *host, &b->e));
    KV_TRY(kv_gpu_new(b->gpu, LANES * sizeof(kv_loss), &b->loss));
    KV_TRY(kv_gpu_new(b->gpu, sizeof(double), &b->sum));
out:
    free(host);
    return st;
}

static kv_status soft_open(bench *b) {
    kv_status st = KV_OK;
    float *host = NULL;
    const size_t n = (size_t)b->n;
    b->window = (kv_gpu_window){.n = b->n, .window = run.window, .every = EVERY};
    KV_NEW(host, KV_HEADS * n);
    for (size_t i = 0; i < KV_HEADS * n; i++)
        host[i] = (float)log(kv_rand_uniform(1, (uint32_t)i, 5, 0, 0));
    KV_TRY(kv_gpu_span_random(b->gpu, HEADS, KV_HEADS, b->n, D, KV_BF16, 2, &b->span));
    KV_TRY(kv_gpu_new(b->gpu, KV_HEADS * n * sizeof *host, &b->log_keep));
    KV_TRY(kv_gpu_put(b->log_keep, host, KV_HEADS * n * sizeof *host));
    KV_TRY(kv_gpu_new(b->gpu, HEADS * n * D * sizeof *host, &b->o));
    KV_TRY(kv_gpu_new(b->gpu, HEADS * n * D * sizeof *host, &b->dense));
    KV_TRY(kv_gpu_new(b->gpu, HEADS * n * sizeof *host, &b->lse));
    KV_TRY(kv_gpu_new(b->gpu, HEADS * n * sizeof *host, &b->d_keep));
out:
    free(host);
    return st;
}

kv_status kv_bench_gpu_train(FILE *out, kv_gpu *g, int32_t n_token, int32_t repeats,
                             double tb_per_s, double tflop_per_s) {
    kv_status st = KV_OK;
    bench b = {.gpu = g, .n = n_token};
    KV_TRY(bench_open(&b));
    KV_TRY(soft_open(&b));
    fprintf(out,
            "training, %d heads, %d tokens, B=%d; soft mask: %d/%d heads, d %d, bf16, one block of "
            "queries in %d; floor: bytes through device memory, products\n",
            LANES, n_token, BUDGET, HEADS, KV_HEADS, D, EVERY);
    fprintf(out, "%-30s %10s %10s %10s %10s %7s\n", "operation", "ms", "least", "most", "floor ms",
            "ratio");
    for (int i = 0; i < OPERATIONS; i++)
        KV_TRY(time_operation(out, &b, &operations[i], repeats, tb_per_s, tflop_per_s));
out:
    kv_gpu_boundary_free(b.boundary);
    kv_gpu_span_free(b.span);
    kv_gpu_buffer *all[] = {b.rhat, b.e,        b.loss, b.grad,  b.param, b.m1,    b.m2,
                            b.sum,  b.log_keep, b.o,    b.dense, b.lse,   b.d_keep};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) (void)kv_gpu_free(all[i]);
    return st;
}
