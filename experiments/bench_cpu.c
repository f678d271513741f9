/* Benchmark of CPU attention. */
#include "experiments/bench_cpu.h"

#include <math.h>
#include <stdlib.h>

#include "experiments/bench_time.h"
#include "experiments/ceiling.h"
#include "reference/attention.h"
#include "reference/core/cpu.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "reference/select.h"

enum { BUDGET = 2048, SINKS = 4, WINDOW = 256 };

typedef struct layer {
    kv_span span;
    float *q, *k, *v, *o;
    int32_t *scattered, *recent; /* evict_at of random priorities, and of StreamingLLM */
    double *inv_freq;
    double dense_pairs, kept_pairs; /* of all query heads */
} layer;

typedef struct operation {
    const char *name;
    kv_status (*run)(const layer *l);
    int products; /* of 2 * head_dim operations per pair */
    bool masked;  /* pairs: kept ones, else all causal ones */
} operation;

static kv_status run_dense(const layer *l, const kv_dense_request *request) {
    kv_dense dense;
    kv_status st = kv_dense_compute(&l->span, request, &dense);
    kv_dense_free(&dense);
    return st;
}
static kv_status sweep_one(const layer *l) {
    return run_dense(
        l, &(kv_dense_request){.sinks = SINKS, .window = WINDOW, .n_power = 1, .power = {1}});
}
static kv_status sweep_all(const layer *l) {
    return run_dense(l, &(kv_dense_request){.sinks = SINKS,
                                            .window = WINDOW,
                                            .n_power = 3,
                                            .power = {1, 2, INFINITY},
                                            .want_output = true,
                                            .want_events = true});
}
static kv_status sweep_power(const layer *l) {
    return run_dense(
        l, &(kv_dense_request){.sinks = SINKS, .window = WINDOW, .n_power = 1, .power = {4}});
}
static kv_status attend(const layer *l) { return kv_attend(&l->span, l->o, NULL); }

static kv_status run_masked(const layer *l, const int32_t *evict_at, bool rerotate) {
    kv_masked masked;
    kv_status st = kv_masked_compute(&l->span,
                                     &(kv_masked_request){.evict_at = evict_at,
                                                          .sinks = SINKS,
                                                          .window = WINDOW,
                                                          .rerotate = rerotate,
                                                          .want_output = true,
                                                          .want_long = true},
                                     &masked);
    kv_masked_free(&masked);
    return st;
}
static kv_status masked(const layer *l) { return run_masked(l, l->scattered, false); }
static kv_status turned(const layer *l) { return run_masked(l, l->recent, true); }

static const operation operations[] = {
    {"dense sweep, power 1", sweep_one, 1, false},
    {"dense sweep, powers 1 2 max, events, output", sweep_all, 2, false},
    {"dense sweep, power 4", sweep_power, 1, false},
    {"attention", attend, 2, false},
    {"masked attention, 2048 kept", masked, 2, true},
    {"masked attention, 2048 recent, re-rotated", turned, 2, true},
};
enum { N_OPERATION = sizeof operations / sizeof *operations };

static void layer_free(layer *l) {
    free(l->q);
    free(l->k);
    free(l->v);
    free(l->o);
    free(l->scattered);
    free(l->recent);
    free(l->inv_freq);
}

static kv_status fill_lives(layer *l) {
    kv_status st = KV_OK;
    const kv_span *s = &l->span;
    const kv_run run = {.budget = BUDGET, .sinks = SINKS, .window = WINDOW};
    float *priority = NULL;
    KV_NEW(priority, s->n_kv_head * s->stride);
    KV_NEW(l->scattered, s->n_kv_head * s->stride);
    KV_NEW(l->recent, s->n_kv_head * s->stride);
    for (int32_t h = 0; h < s->n_kv_head; h++)
        for (int32_t t = 0; t < s->n_token; t++) {
            const int64_t at = h * s->stride + t;
            const int32_t end = t + BUDGET - SINKS;
            priority[at] = (float)kv_rand_uniform(1, (uint32_t)h, (uint32_t)t, 0, 0);
            l->recent[at] = t < SINKS || end >= s->n_token ? KV_NEVER : end;
        }
    KV_TRY(kv_select(s, &run, priority, l->scattered));
    for (int32_t u = 0; u < s->n_token; u++) {
        l->dense_pairs += s->n_q_head * (u + 1.0);
        l->kept_pairs += s->n_q_head * (u + 1.0 < BUDGET ? u + 1.0 : BUDGET);
    }
out:
    free(priority);
    return st;
}

static kv_status layer_make(layer *l, int32_t n_token, int32_t head_dim) {
    kv_status st = KV_OK;
    enum { Q_HEADS = 8, KV_HEADS = 2 };
    const size_t row = (size_t)n_token * (size_t)head_dim;
    *l = (layer){.span = {.n_token = n_token,
                          .stride = n_token,
                          .n_q_head = Q_HEADS,
                          .n_kv_head = KV_HEADS,
                          .head_dim = head_dim,
                          .scale = (float)(1 / sqrt(head_dim))}};
    KV_NEW(l->q, Q_HEADS * row);
    KV_NEW(l->o, Q_HEADS * row);
    KV_NEW(l->k, KV_HEADS * row);
    KV_NEW(l->v, KV_HEADS * row);
    KV_NEW(l->inv_freq, head_dim / 2);
    kv_rng rng = kv_rng_make(1, 0);
    /* logits with a standard deviation of 2, as trained heads have */
    for (size_t i = 0; i < Q_HEADS * row; i++)
        l->q[i] = (float)(2 * sqrt(12) * (kv_rng_uniform(&rng) - .5));
    for (size_t i = 0; i < KV_HEADS * row; i++) {
        l->k[i] = (float)(sqrt(12) * (kv_rng_uniform(&rng) - .5));
        l->v[i] = (float)(kv_rng_uniform(&rng) - .5);
    }
    for (int32_t c = 0; c < head_dim / 2; c++) l->inv_freq[c] = pow(1e6, -2.0 * c / head_dim);
    l->span.q = l->q;
    l->span.k = l->k;
    l->span.v = l->v;
    l->span.inv_freq = l->inv_freq;
    KV_TRY(fill_lives(l));
out:
    return st;
}

static kv_status measure(FILE *out, const layer *l, const operation *op, int32_t repeats) {
    kv_status st = KV_OK;
    double *seconds = NULL, top = kv_ceiling(NULL);
    const double flop =
        2.0 * op->products * l->span.head_dim * (op->masked ? l->kept_pairs : l->dense_pairs);
    KV_NEW(seconds, repeats);
    for (int32_t i = 0; i < repeats; i++) {
        const double begin = kv_now();
        KV_TRY(op->run(l));
        seconds[i] = kv_now() - begin;
        top = kv_ceiling(NULL);
    }
    const double middle = kv_spread_of(seconds, repeats).median;
    fprintf(out, "%-46s d=%-4d %9.4f s %8.1f GFLOP/s  %.3f of ceiling\n", op->name,
            l->span.head_dim, middle, flop / middle * 1e-9, flop / middle * 1e-9 / top);
out:
    free(seconds);
    return st;
}

kv_status kv_bench_cpu(FILE *out, int32_t n_token, int32_t repeats) {
    kv_status st = KV_OK;
    layer l = {0};
    kv_isa isa = KV_ISA_GENERIC;
    double top = 0;
    if (n_token < 1 || repeats < 1)
        return KV_FAIL(KV_E_USAGE, "%d tokens, %d repeats: both must be at least 1", n_token,
                       repeats);
    for (int i = 0; i < 4; i++) top = kv_ceiling(&isa);
    fprintf(
        out,
        "%s, %s kernels, %d threads, fp32 FMA ceiling %.1f GFLOP/s (%s), S=%d, 8 query heads, 2 KV "
        "heads\n"
        "ratio: counted operations / time / ceiling; counted are 2 * head size per pair that is "
        "seen and product\n",
        kv_cpu_model(), kv_isa_name(kv_cpu_isa()), kv_threads(), top, kv_isa_name(isa), n_token);
    for (int32_t head_dim = 64; head_dim <= 128; head_dim *= 2) {
        KV_TRY(layer_make(&l, n_token, head_dim));
        for (int i = 0; i < N_OPERATION; i++) KV_TRY(measure(out, &l, &operations[i], repeats));
        layer_free(&l);
        l = (layer){0};
    }
out:
    layer_free(&l);
    return st;
}
