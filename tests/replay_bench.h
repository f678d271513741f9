/* Running a policy on a case, for the tests of replay. */
#ifndef KV_REPLAY_BENCH_H
#define KV_REPLAY_BENCH_H

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference/ops.h"
#include "reference/priority.h"
#include "reference/replay.h"
#include "tests/naive/naive_case.h"

extern const kv_policy kv_policy_full, kv_policy_random, kv_policy_streaming, kv_policy_tova,
    kv_policy_h2o, kv_policy_cumulative, kv_policy_knorm, kv_policy_keydiff, kv_policy_oracle,
    kv_policy_oracle_step, kv_policy_oracle_exact;

/* The CPU's table without the model and the scorers, which no policy here needs. */
static const kv_ops ops = {.name = "cpu",
                           .dense = kv_dense_compute,
                           .norm_priorities = kv_norm_priorities,
                           .cosine_priorities = kv_cosine_priorities,
                           .select = kv_select,
                           .replay_attention = kv_replay_attention};

/* A policy and one setting ("key=value", or NULL). */
typedef struct setup {
    const kv_policy *policy;
    const char *setting;
} setup;

/* A policy with its parameters ("key=value" or NULL) on a case. */
typedef struct bench {
    const kv_policy *policy;
    kv_params params;
    kv_policy_input input;
    int32_t *evict_at; /* [n_kv_head][stride] */
} bench;

static inline bench bench_new(const kv_policy *policy, const char *setting, const naive_case *c,
                              const kv_run *run) {
    bench b = {.policy = policy};
    cr_assert_eq(kv_params_init(&b.params, policy->params), KV_OK);
    if (setting) {
        char key[32];
        const char *value = strchr(setting, '=') + 1;
        snprintf(key, sizeof key, "%.*s", (int)(value - setting - 1), setting);
        cr_assert_eq(kv_params_set(&b.params, policy->name, key, value), KV_OK, "%s",
                     kv_error_message());
    }
    b.input = (kv_policy_input){.span = &c->span, .run = run, .ops = &ops};
    b.evict_at = malloc((size_t)(c->span.n_kv_head * c->span.stride) * sizeof *b.evict_at);
    return b;
}

/* The input points at the bench's own parameters, wherever the bench lies. */
static inline kv_status replay(bench *b, int32_t *evict_at) {
    b->input.params = &b->params;
    return kv_replay(b->policy, &b->input, evict_at ? evict_at : b->evict_at);
}

static inline void bench_free(bench *b) {
    kv_params_free(&b->params);
    free(b->evict_at);
}

static inline void replay_case(const kv_policy *policy, const char *setting, const naive_case *c,
                               const kv_run *run, int32_t *evict_at) {
    bench b = bench_new(policy, setting, c, run);
    cr_assert_eq(replay(&b, evict_at), KV_OK, "%s: %s", policy->name, kv_error_message());
    bench_free(&b);
}

#endif
