/* Replay of policies, and metrics from their decisions, one layer. */
#include "experiments/bench_replay.h"

#include <stdlib.h>
#include <string.h>

#include "experiments/bench_time.h"
#include "policies/registry.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "reference/metrics.h"
#include "reference/replay.h"

enum { Q_HEADS = 8, KV_HEADS = 2, DIM = 64 };

typedef struct bench {
    kv_span span;
    kv_run run;
    kv_dense dense;
    float *q, *k, *v;           /* [heads][n_token][DIM] */
    int32_t *evict_at, *oracle; /* [KV_HEADS][n_token] */
    double *replay, *metrics;   /* [repeats] seconds */
} bench;

static kv_status fill(float **out, int64_t n, uint64_t seed) {
    kv_status st = KV_OK;
    kv_rng r = kv_rng_make(seed, 0);
    KV_NEW(*out, n);
    for (int64_t i = 0; i < n; i++) /* sum of four uniforms: near enough to normal */
        (*out)[i] = (float)(kv_rng_uniform(&r) + kv_rng_uniform(&r) + kv_rng_uniform(&r) +
                            kv_rng_uniform(&r) - 2) *
                    1.7f;
out:
    return st;
}

static kv_status replay(const bench *b, const char *name, int32_t *evict_at) {
    kv_status st = KV_OK;
    kv_params params;
    const kv_policy *policy = kv_policy_find(name);
    KV_TRY(kv_params_init(&params, policy->params));
    const kv_policy_input input = {.span = &b->span,
                                   .run = &b->run,
                                   .params = &params,
                                   .dense = &b->dense,
                                   .ops = &kv_ops_cpu};
    KV_TRY(kv_replay(policy, &input, evict_at));
out:
    kv_params_free(&params);
    return st;
}

static kv_status measure(const bench *b) {
    kv_status st = KV_OK;
    kv_masked masked = {0};
    kv_metrics *m = NULL;
    kv_metrics_result result = {0};
    const kv_metrics_shape shape = {1, Q_HEADS, KV_HEADS, DIM, 2};
    const kv_masked_request request = {.evict_at = b->evict_at,
                                       .sinks = b->run.sinks,
                                       .window = b->run.window,
                                       .want_output = true,
                                       .want_long = true};
    KV_TRY(kv_metrics_open(&shape, &b->run, &m));
    KV_TRY(kv_ops_cpu.masked(&b->span, &request, &masked));
    const kv_metrics_item item = {.span = &b->span,
                                  .dense = &b->dense,
                                  .masked = &masked,
                                  .evict_at = b->evict_at,
                                  .evict_oracle = b->oracle};
    KV_TRY(kv_metrics_add(m, &item));
    KV_TRY(kv_metrics_finish(m, &result));
out:
    kv_metrics_result_free(&result);
    kv_metrics_free(m);
    kv_masked_free(&masked);
    return st;
}

static kv_status time_policy(FILE *out, bench *b, const char *name, int32_t repeats) {
    kv_status st = KV_OK;
    for (int32_t i = 0; i < repeats; i++) {
        double start = kv_now();
        KV_TRY(replay(b, name, b->evict_at));
        double middle = kv_now();
        KV_TRY(measure(b));
        b->replay[i] = middle - start;
        b->metrics[i] = kv_now() - middle;
    }
    fprintf(out, "%-12s  replay %8.3f s   masked attention and metrics %8.3f s   per layer\n", name,
            kv_spread_of(b->replay, repeats).median, kv_spread_of(b->metrics, repeats).median);
out:
    return st;
}

kv_status kv_bench_replay(FILE *out, int32_t n_token, int32_t repeats) {
    static const char *const policies[] = {"streaming", "keydiff", "oracle", "tova", "h2o"};
    kv_status st = KV_OK;
    bench b = {.run = {.budget = n_token / 8,
                       .sinks = 4,
                       .window = 256,
                       .seed = 1,
                       .eps = 1e-8,
                       .oracle_delta = 2e-5}};
    if (n_token < 4096 || repeats < 1)
        return KV_FAIL(KV_E_USAGE, "%d tokens, %d repeats: at least 4096 and 1 are needed", n_token,
                       repeats);
    KV_TRY(fill(&b.q, (int64_t)Q_HEADS * n_token * DIM, 1));
    KV_TRY(fill(&b.k, (int64_t)KV_HEADS * n_token * DIM, 2));
    KV_TRY(fill(&b.v, (int64_t)KV_HEADS * n_token * DIM, 3));
    KV_NEW(b.evict_at, KV_HEADS * n_token);
    KV_NEW(b.oracle, KV_HEADS * n_token);
    KV_NEW(b.replay, repeats);
    KV_NEW(b.metrics, repeats);
    b.span = (kv_span){.n_token = n_token,
                       .stride = n_token,
                       .n_q_head = Q_HEADS,
                       .n_kv_head = KV_HEADS,
                       .head_dim = DIM,
                       .q = b.q,
                       .k = b.k,
                       .v = b.v,
                       .scale = 0.125f,
                       .n_layer = 1};
    const kv_dense_request request = {.sinks = 4,
                                      .window = 256,
                                      .n_power = 1,
                                      .power = {1},
                                      .want_output = true,
                                      .want_events = true};
    KV_TRY(kv_ops_cpu.dense(&b.span, &request, &b.dense));
    KV_TRY(replay(&b, "oracle", b.oracle));
    fprintf(out, "replay, S=%d, budget %d, 8 query heads, 2 KV heads, d=64\n", n_token,
            b.run.budget);
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++)
        KV_TRY(time_policy(out, &b, policies[i], repeats));
out:
    free(b.q);
    free(b.k);
    free(b.v);
    free(b.evict_at);
    free(b.oracle);
    free(b.replay);
    free(b.metrics);
    kv_dense_free(&b.dense);
    return st;
}
