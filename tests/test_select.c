/* Selection: golden vector of maths.md 12.1, pointer = Fenwick = definition, invariants of 3.7, ties, edge sizes. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/cpu.h"
#include "reference/core/num.h"
#include "reference/core/rand.h"
#include "reference/select.h"
#include "tests/naive/naive_case.h"
#include "tests/naive/naive_select.h"

static kv_run run_of(int32_t sinks, int32_t window, int32_t k) {
    return (kv_run){.budget = sinks + window + k, .sinks = sinks, .window = window};
}

Test(select, golden_vector) {
    enum { N = 20 };
    const int32_t want_rank[N] = {9,  1,  12, 17, 6,  4, 15, 14, 3,  7,
                                  18, 11, 0,  10, 19, 8, 2,  13, 16, 5};
    const int32_t want_tau[N] = {N, N, N, N, N, N, 17, 12, 12, 12, 6, 6, 6, 6, 4, 4, 4, 4, 3, 3};
    int32_t want[N], rank[N], at[N], evict_at[N], tau[N], fenwick[N];
    float priority[N];
    cr_assert_eq(naive_case_row("- - 10 7 14 18 8 9 - 11 12 13 - 15 16 17 - 19 - -", N, want), N);
    for (int32_t t = 0; t < N; t++) priority[t] = kv_static_priority(sin(1.7 * t), t, log1p(-1e-3));
    cr_assert_eq(kv_rank(priority, N, rank, at), KV_OK);
    cr_assert_eq(kv_cutoff_pointer(rank, at, N, 1, 2, 4, evict_at, tau), KV_OK);
    cr_assert_eq(kv_cutoff_fenwick(rank, N, 1, 2, 4, fenwick), KV_OK);
    for (int32_t t = 0; t < N; t++) {
        cr_expect_eq(rank[t], want_rank[t], "rank[%d] = %d", t, rank[t]);
        cr_expect_eq(tau[t], want_tau[t], "tau[%d] = %d", t, tau[t]);
        cr_expect_eq(fenwick[t], want_tau[t], "Fenwick tau[%d] = %d", t, fenwick[t]);
        cr_expect_eq(evict_at[t], want[t], "evict_at[%d] = %d", t, evict_at[t]);
    }
}

/* Values on few levels, so that ties, signed zeros and infinities are common. */
static float level(kv_rng *r, uint32_t levels) {
    static const float special[] = {-INFINITY, -1.5f, -0.0f, 0.0f, 0x1p-140f, 2.0f, INFINITY};
    return levels == 0 ? (float)kv_rng_uniform(r) - 0.5f : special[kv_rng_below(r, levels)];
}

/* maths.md 3.7, on one head. */
static void check_invariants(const kv_run *run, int32_t n, const int32_t *evict_at,
                             const char *name) {
    int32_t due[128] = {0};
    int64_t lived = 0, kept = 0;
    for (int32_t t = 0; t < n; t++) {
        cr_assert(evict_at[t] == KV_NEVER || evict_at[t] >= t + run->window, "%s: %d leaves at %d",
                  name, t, evict_at[t]);
        cr_assert(t >= run->sinks || evict_at[t] == KV_NEVER, "%s: sink %d leaves", name, t);
        if (evict_at[t] != KV_NEVER) due[evict_at[t]]++;
        lived += (evict_at[t] < n ? evict_at[t] : n) - t;
    }
    for (int32_t q = 0; q < n; q++) {
        cr_assert_eq(due[q], q >= run->budget, "%s: %d tokens leave at %d", name, due[q], q);
        kept += q + 1 < run->budget ? q + 1 : run->budget;
    }
    cr_assert_eq(lived, kept, "%s: tokens live %lld steps, the cache holds %lld", name,
                 (long long)lived, (long long)kept);
}

Test(select, pointer_equals_fenwick_equals_definition) {
    enum { N = 72, CASES = 1500 };
    for (uint32_t c = 0; c < CASES; c++) {
        kv_rng r = kv_rng_make(11, c);
        const uint32_t levels[] = {0, 1, 2, 7};
        int32_t n = 1 + (int32_t)kv_rng_below(&r, N - 2), evict_at[N], tau[N], fenwick[N], want[N];
        kv_run run = run_of((int32_t)kv_rng_below(&r, 6), 1 + (int32_t)kv_rng_below(&r, 9),
                            (int32_t)kv_rng_below(&r, c % 3 ? 12 : (uint32_t)n + 2));
        int32_t k = run.budget - run.sinks - run.window, rank[N], at[N];
        float priority[N];
        for (int32_t t = 0; t < n; t++) priority[t] = level(&r, levels[c % 4]);
        char name[96];
        snprintf(name, sizeof name, "case %u: n=%d s=%d w=%d k=%d levels=%u", c, n, run.sinks,
                 run.window, k, levels[c % 4]);
        cr_assert_eq(kv_rank(priority, n, rank, at), KV_OK, "%s", name);
        for (int32_t t = 0; t < n; t++) {
            cr_assert_eq(rank[t], naive_rank(priority, n, t), "%s: rank[%d]", name, t);
            cr_assert_eq(at[rank[t]], t, "%s: at[rank[%d]]", name, t);
        }
        cr_assert_eq(kv_cutoff_pointer(rank, at, n, run.sinks, run.window, k, evict_at, tau),
                     KV_OK);
        naive_evict_at(priority, &run, n, want);
        for (int32_t t = 0; t < n; t++)
            cr_assert_eq(evict_at[t], want[t], "%s: evict_at[%d] = %d, by definition %d", name, t,
                         evict_at[t], want[t]);
        check_invariants(&run, n, evict_at, name);
        /* A token that is gone stays gone: the mask by definition is the interval. */
        for (int32_t q = 0; q < n; q++)
            for (int32_t t = 0; t <= q; t++)
                cr_assert_eq(naive_keep(priority, &run, q, t), q < evict_at[t],
                             "%s: query %d, token %d", name, q, t);
        if (k == 0) {
            cr_assert_eq(kv_cutoff_fenwick(rank, n, run.sinks, run.window, k, fenwick),
                         KV_E_INTERNAL, "%s", name);
            continue;
        }
        cr_assert_eq(kv_cutoff_fenwick(rank, n, run.sinks, run.window, k, fenwick), KV_OK);
        for (int32_t q = 0; q < n; q++) {
            cr_assert_eq(tau[q], naive_tau(priority, &run, n, q), "%s: tau[%d] = %d", name, q,
                         tau[q]);
            cr_assert_eq(fenwick[q], tau[q], "%s: Fenwick tau[%d] = %d", name, q, fenwick[q]);
            cr_assert(q == 0 || tau[q] <= tau[q - 1], "%s: tau rises at %d", name, q);
        }
    }
}

/* Several heads, stride beyond the document: each head as if alone, nothing written outside, same bytes on any thread count. */
Test(select, heads_strides_and_threads) {
    enum { N = 300, STRIDE = 317, H = 30 }; /* enough tokens for several threads */
    kv_span span = {.n_token = N, .stride = STRIDE, .n_q_head = H, .n_kv_head = H, .layer_id = 7};
    kv_run run = run_of(3, 10, 20);
    float *priority = malloc(H * STRIDE * sizeof *priority);
    int32_t *one = malloc(H * STRIDE * sizeof *one), *three = malloc(H * STRIDE * sizeof *three);
    int32_t want[N];
    kv_rng r = kv_rng_make(5, 0);
    for (int i = 0; i < H * STRIDE; i++)
        priority[i] = i % STRIDE < N ? (float)kv_rng_below(&r, 50) : NAN;
    memset(one, 0x5a, H * STRIDE * sizeof *one);
    memset(three, 0x5a, H * STRIDE * sizeof *three);
    kv_threads_set(1);
    cr_assert_eq(kv_select(&span, &run, priority, one), KV_OK, "%s", kv_error_message());
    kv_threads_set(3);
    cr_assert_eq(kv_select(&span, &run, priority, three), KV_OK, "%s", kv_error_message());
    cr_assert_arr_eq(one, three, H * STRIDE * sizeof *one);
    for (int h = 0; h < H; h++) {
        naive_evict_at(priority + h * STRIDE, &run, N, want);
        cr_assert_arr_eq(one + h * STRIDE, want, sizeof want, "head %d", h);
        for (int t = N; t < STRIDE; t++)
            cr_assert_eq(one[h * STRIDE + t], 0x5a5a5a5a, "head %d: wrote past the document", h);
    }
    priority[3 * STRIDE + 41] = NAN;
    cr_assert_eq(kv_select(&span, &run, priority, one), KV_E_DATA);
    cr_assert(strstr(kv_error_message(), "layer 7, KV head 3") &&
                  strstr(kv_error_message(), "token 41"),
              "message: %s", kv_error_message());
    free(priority);
    free(one);
    free(three);
}

/* Edges of the budget: nothing to keep long, everything kept, one token, window or sinks beyond the document. */
Test(select, edge_sizes) {
    enum { N = 12 };
    float priority[N];
    for (int t = 0; t < N; t++) priority[t] = (float)(t * 5 % 7);
    for (int32_t n = 1; n <= N; n++)
        for (int32_t s = 0; s <= N + 1; s++)
            for (int32_t w = 1; w <= N + 1; w++)
                for (int32_t k = 0; k <= N + 1; k++) {
                    kv_run run = run_of(s, w, k);
                    kv_span span = {
                        .n_token = n, .stride = n, .n_q_head = 1, .n_kv_head = 1, .head_dim = 1};
                    int32_t got[N], want[N];
                    cr_assert_eq(kv_select(&span, &run, priority, got), KV_OK);
                    naive_evict_at(priority, &run, n, want);
                    for (int32_t t = 0; t < n; t++) {
                        cr_assert_eq(got[t], want[t], "n=%d s=%d w=%d k=%d t=%d: %d, not %d", n, s,
                                     w, k, t, got[t], want[t]);
                        cr_assert(run.budget < n || got[t] == KV_NEVER,
                                  "n=%d s=%d w=%d k=%d t=%d: leaves although all fit", n, s, w, k,
                                  t);
                        cr_assert(k > 0 || t < s || t + w >= n || got[t] == t + w,
                                  "n=%d s=%d w=%d k=0 t=%d: %d", n, s, w, t, got[t]);
                    }
                }
}

/* contract.md 1, "Ties": equal scores give the StreamingLLM set under a decay above the fp32 spacing, the first tokens without. */
Test(select, all_scores_equal) {
    enum { N = 4096, S = 4, W = 16, K = 100 };
    kv_run run = run_of(S, W, K);
    kv_span span = {.n_token = N, .stride = N, .n_q_head = 1, .n_kv_head = 1, .head_dim = 1};
    float *priority = malloc(N * sizeof *priority);
    int32_t *evict_at = malloc(N * sizeof *evict_at);
    const double delta[] = {1e-5, 0, 1e-6};
    for (int i = 0; i < 3; i++) {
        int wrong = 0;
        for (int32_t t = 0; t < N; t++)
            priority[t] = kv_static_priority(log(1e-8), t, log1p(-delta[i]));
        cr_assert_eq(kv_select(&span, &run, priority, evict_at), KV_OK);
        for (int32_t t = 0; t < N; t++) {
            int32_t leaves = delta[i] > 0 ? t + W + K : t + W;
            bool stays = leaves >= N || t < (delta[i] > 0 ? S : S + K);
            wrong += evict_at[t] != (stays ? KV_NEVER : leaves);
        }
        cr_assert(delta[i] == 1e-6 ? wrong > 0 : wrong == 0, "delta=%g: %d tokens differ", delta[i],
                  wrong);
    }
    free(priority);
    free(evict_at);
}
