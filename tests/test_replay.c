/* Replay and stream: decisions by definition, mask = slots, golden rows of maths.md 12.8, refusals. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/cpu.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "reference/ops.h"
#include "reference/priority.h"
#include "tests/naive/naive_replay.h"
#include "tests/naive/naive_select.h"
#include "tests/replay_bench.h"

/* Hundreds of tiny replays: waking threads would take most of the time. Thread counts are compared where the work is. */
static void one_thread(void) { kv_threads_set(1); }
TestSuite(replay, .init = one_thread);

Test(replay, golden_rows) {
    enum { N = 24 };
    const struct {
        const kv_policy *policy;
        const char *setting, *row[2];
    } cases[] = {
        {&kv_policy_tova,
         NULL,
         {"15 17 - 20 - 23 12 13 14 16 18 19 21 22 - - - - - - - - - -",
          "15 17 - 20 - 23 12 13 14 16 18 19 21 22 - - - - - - - - - -"}},
        {&kv_policy_tova,
         "reduce=head",
         {"15 17 - - 21 23 12 13 14 16 18 19 20 22 - - - - - - - - - -",
          "15 17 - 20 22 - 12 13 14 16 18 19 21 - - - - - - - - - 23 -"}},
        {&kv_policy_h2o,
         NULL,
         {"- - - - - 12 - 13 14 15 16 17 18 19 20 21 22 23 - - - - - -",
          "- - - - - - 12 13 14 15 16 17 18 19 20 21 22 23 - - - - - -"}},
        {&kv_policy_h2o,
         "reduce=mean",
         {"- - - - - 12 - 13 14 15 16 17 18 19 20 21 22 23 - - - - - -",
          "- - - - - - 12 13 14 15 16 17 18 19 20 21 22 23 - - - - - -"}},
        {&kv_policy_cumulative,
         NULL,
         {"- - - - - - - - - - - 12 13 14 15 16 17 18 19 20 21 22 23 -",
          "- - - - - - - - - - - 12 13 14 15 16 17 18 19 20 21 22 23 -"}},
        {&kv_policy_oracle,
         NULL,
         {"- - - 23 18 11 19 20 17 12 13 14 15 16 21 - - - - 22 - - - -",
          "- - 22 16 13 20 19 12 11 17 18 14 15 21 - - - - 23 - - - - -"}},
        {&kv_policy_knorm,
         NULL,
         {"- - 11 15 - - 13 12 20 - 17 14 16 - - 18 19 21 - 22 23 - - -",
          "- - 15 - 20 11 12 - - 14 13 16 - 19 17 18 - - 21 22 23 - - -"}},
    };
    naive_case c = naive_case_golden();
    const kv_run run = {.budget = 11, .sinks = 2, .window = 3, .eps = 1e-8};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t got[2 * N], want[2 * N];
        for (int h = 0; h < 2; h++)
            cr_assert_eq(naive_case_row(cases[i].row[h], N, want + h * N), N);
        replay_case(cases[i].policy, cases[i].setting, &c, &run, got);
        for (int j = 0; j < 2 * N; j++)
            cr_expect_eq(got[j], want[j], "%s %s: head %d token %d leaves at %d, not %d",
                         cases[i].policy->name, cases[i].setting ? cases[i].setting : "", j / N,
                         j % N, got[j], want[j]);
    }
    naive_case_free(&c);
}

static const setup causal[] = {
    {&kv_policy_full, NULL},
    {&kv_policy_random, NULL},
    {&kv_policy_streaming, NULL},
    {&kv_policy_knorm, NULL},
    {&kv_policy_keydiff, NULL},
    {&kv_policy_tova, NULL},
    {&kv_policy_tova, "reduce=head"},
    {&kv_policy_h2o, NULL},
    {&kv_policy_h2o, "recent_share=1"},
    {&kv_policy_h2o, "recent_share=0"},
    {&kv_policy_h2o, "reduce=max"},
    {&kv_policy_cumulative, NULL},
};
enum { N_CAUSAL = sizeof causal / sizeof *causal };

/* Keys from a small set, so that priorities tie; some are zero. */
static void repeat_keys(naive_case *c, kv_rng *r) {
    const kv_span *s = &c->span;
    for (int32_t h = 0; h < s->n_kv_head; h++)
        for (int32_t t = 4; t < s->n_token; t++) {
            float *to = c->k + (h * s->stride + t) * s->head_dim;
            uint32_t from = kv_rng_below(r, 5);
            for (int32_t j = 0; j < s->head_dim; j++)
                to[j] = from == 4 ? 0 : c->k[(h * s->stride + (int32_t)from) * s->head_dim + j];
        }
}

/* What the slots of one policy on one case did against kv_replay's mask: decisions, attention output, memory. */
static void check_stream(const setup *p, const naive_case *c, const kv_run *run, const char *name) {
    const kv_span *s = &c->span;
    const size_t n = (size_t)(s->n_kv_head * s->stride);
    bench b = bench_new(p->policy, p->setting, c, run);
    int32_t *got = malloc(n * sizeof *got);
    float *o = malloc((size_t)(s->n_q_head * s->stride * s->head_dim) * sizeof *o);
    double want[16];
    uint64_t bytes = 0, held = 0;
    memset(got, 0x5a, n * sizeof *got);
    memset(b.evict_at, 0x5a, n * sizeof *got);
    cr_assert_eq(replay(&b, NULL), KV_OK, "%s: %s", name, kv_error_message());
    cr_assert_eq(kv_stream_attend(p->policy, &b.input, 2, got, &bytes, o), KV_OK, "%s: %s", name,
                 kv_error_message());
    cr_assert_arr_eq(got, b.evict_at, n * sizeof *got, "%s: mask and slots differ", name);
    for (int32_t i = 0; i < s->n_q_head; i++)
        for (int32_t u = 0; u < s->n_token; u++) {
            naive_masked_output(s, got, i, u, want);
            for (int32_t j = 0; j < s->head_dim; j++) {
                double x = (double)o[(i * s->stride + u) * s->head_dim + j];
                cr_assert(fabs(x - want[j]) <= 2e-7 * fmax(1, fabs(want[j])),
                          "%s: output of head %d at %d is %.9g, by definition %.9g", name, i, u, x,
                          want[j]);
            }
        }
    int32_t fixed = run->budget + (p->policy->kind == KV_ATTENTION);
    if (p->policy == &kv_policy_full)
        held = (uint64_t)((s->n_token + 63) / 64 * 64);
    else
        held = (uint64_t)(fixed < s->n_token ? fixed : s->n_token);
    held *= (uint64_t)(s->n_kv_head * 2 * s->head_dim * 2);
    cr_assert_eq(bytes, held, "%s: %llu bytes allocated, not %llu", name, (unsigned long long)bytes,
                 (unsigned long long)held);
    free(got);
    free(o);
    bench_free(&b);
}

Test(replay, mask_equals_stream) {
    for (uint32_t i = 0; i < 120; i++) {
        kv_rng r = kv_rng_make(3, i);
        int32_t n = 1 + (int32_t)kv_rng_below(&r, 90), heads = 1 + (int32_t)kv_rng_below(&r, 3);
        int32_t group = 1 + (int32_t)kv_rng_below(&r, 3),
                d = 2 * (1 + (int32_t)kv_rng_below(&r, 3));
        kv_run run = {.sinks = (int32_t)kv_rng_below(&r, 5),
                      .window = 1 + (int32_t)kv_rng_below(&r, i % 8 ? 10 : 100),
                      .seed = i,
                      .eps = 1e-8};
        run.budget = run.sinks + run.window + (int32_t)kv_rng_below(&r, 20);
        naive_case c =
            naive_case_random(i, n, n + (int32_t)kv_rng_below(&r, 4), heads * group, heads, d, 1.5);
        c.span.softcap = i % 5 == 0 ? 3.0f : 0.0f;
        if (i % 3 == 0 && n > 4) repeat_keys(&c, &r);
        for (int p = 0; p < N_CAUSAL; p++) {
            char name[160];
            snprintf(name, sizeof name, "case %u: %s %s n=%d B=%d s=%d w=%d heads=%dx%d", i,
                     causal[p].policy->name, causal[p].setting ? causal[p].setting : "", n,
                     run.budget, run.sinks, run.window, heads, group);
            check_stream(&causal[p], &c, &run, name);
        }
        naive_case_free(&c);
    }
}

/* Large enough that keydiff and the attention over slots really fork. */
Test(replay, same_bytes_on_any_number_of_threads) {
    enum { N = 600, H = 2, G = 4, D = 64 };
    const kv_run run = {.budget = 520, .sinks = 4, .window = 16};
    naive_case c = naive_case_random(4, N, N, H * G, H, D, 1);
    int32_t masked[2][H * N], got[2][H * N];
    float *o[2];
    uint64_t bytes;
    for (int i = 0; i < 2; i++) {
        bench b = bench_new(&kv_policy_keydiff, NULL, &c, &run);
        o[i] = malloc(H * G * N * D * sizeof **o);
        kv_threads_set(i == 0 ? 1 : 3);
        cr_assert_eq(replay(&b, masked[i]), KV_OK, "%s", kv_error_message());
        cr_assert_eq(kv_stream_attend(b.policy, &b.input, 2, got[i], &bytes, o[i]), KV_OK, "%s",
                     kv_error_message());
        bench_free(&b);
    }
    cr_assert_arr_eq(masked[0], masked[1], sizeof masked[0]);
    cr_assert_arr_eq(got[0], got[1], sizeof got[0]);
    cr_assert_arr_eq(got[0], masked[0], sizeof got[0]);
    cr_assert_arr_eq(o[0], o[1], H * G * N * D * sizeof **o);
    free(o[0]);
    free(o[1]);
    naive_case_free(&c);
}

/* evict_at[t] = t + (B - s) for t >= s (contract.md 2), whatever the window. */
Test(replay, streaming_is_a_sliding_window) {
    enum { N = 40 };
    naive_case c = naive_case_random(1, N, N, 1, 1, 2, 1);
    for (int32_t s = 0; s < 6; s++)
        for (int32_t w = 1; w < 12; w++)
            for (int32_t budget = s + w; budget < N + 3; budget++) {
                const kv_run run = {.budget = budget, .sinks = s, .window = w};
                int32_t got[N];
                replay_case(&kv_policy_streaming, NULL, &c, &run, got);
                for (int32_t t = 0; t < N; t++) {
                    int32_t leaves = t + budget - s;
                    cr_assert_eq(got[t], t < s || leaves >= N ? KV_NEVER : leaves,
                                 "B=%d s=%d w=%d: token %d leaves at %d", budget, s, w, t, got[t]);
                }
            }
    naive_case_free(&c);
}

/* Decisions of knorm, keydiff and oracle against priorities formed by definition. */
Test(replay, scores_by_definition) {
    for (uint32_t i = 0; i < 40; i++) {
        kv_rng r = kv_rng_make(8, i);
        int32_t n = 2 + (int32_t)kv_rng_below(&r, 60);
        kv_run run = {.sinks = (int32_t)kv_rng_below(&r, 4),
                      .window = 1 + (int32_t)kv_rng_below(&r, i % 4 ? 8 : 80),
                      .eps = 1e-8,
                      .oracle_delta = i % 2 ? 2e-5 : 0,
                      .target_mean = i % 5 == 0};
        run.budget = run.sinks + run.window + 1 + (int32_t)kv_rng_below(&r, 12);
        naive_case c = naive_case_random(i + 100, n, n + 3, 4, 2, 4, 2);
        if (i % 3 == 0 && n > 4) repeat_keys(&c, &r);
        const kv_span *s = &c.span;
        const size_t size = (size_t)(2 * s->stride);
        float *priority = calloc(size, sizeof *priority);
        int32_t *got = malloc(size * sizeof *got), *want = malloc(size * sizeof *want);
        for (int which = 0; which < 5; which++) {
            static const char *const setting[] = {NULL, NULL, "anchor=all", NULL, "power=2"};
            const kv_policy *const policy[] = {&kv_policy_knorm, &kv_policy_keydiff,
                                               &kv_policy_keydiff, &kv_policy_oracle,
                                               &kv_policy_oracle};
            for (int32_t h = 0; h < 2 && which < 3; h++)
                for (int32_t t = 0; t < n; t++)
                    priority[h * s->stride + t] =
                        (float)(which == 0 ? naive_knorm(s, h, t)
                                           : naive_keydiff(s, run.window, which == 2, h, t));
            if (which < 3)
                naive_priority_loop(s, &run, priority, want);
            else
                naive_oracle(s, &run, which == 3 ? 1 : 2, want);
            replay_case(policy[which], setting[which], &c, &run, got);
            for (int32_t h = 0; h < 2; h++)
                cr_assert_arr_eq(got + h * s->stride, want + h * s->stride, (size_t)n * sizeof *got,
                                 "case %u: %s %s head %d", i, policy[which]->name,
                                 setting[which] ? setting[which] : "", h);
        }
        free(priority);
        free(got);
        free(want);
        naive_case_free(&c);
    }
}

static int asked;
static kv_status count_norms(const kv_span *span, float *priority) {
    asked++;
    return kv_norm_priorities(span, priority);
}
static int32_t asked_lead;
static kv_status count_cosines(const kv_span *span, int32_t lead, float *priority) {
    asked++;
    asked_lead = lead;
    return kv_cosine_priorities(span, lead, priority);
}

/* Priorities come from the device table, so that a device can take them over; keydiff names the last key it compares with. */
Test(replay, priorities_go_through_the_device_table) {
    enum { N = 40 };
    static const setup setups[] = {
        {&kv_policy_knorm, NULL}, {&kv_policy_keydiff, NULL}, {&kv_policy_keydiff, "anchor=all"}};
    kv_ops table = kv_ops_cpu;
    table.norm_priorities = count_norms;
    table.cosine_priorities = count_cosines;
    naive_case c = naive_case_random(12, N, N, 2, 2, 4, 1);
    for (size_t i = 0; i < sizeof setups / sizeof *setups; i++)
        for (int32_t window = 3; window < 2 * N; window += N + 10) {
            kv_run run = {.budget = window + 4, .sinks = 1, .window = window};
            bench b = bench_new(setups[i].policy, setups[i].setting, &c, &run);
            int32_t evict_at[2 * N];
            asked = asked_lead = 0;
            b.input.ops = &table;
            cr_assert_eq(replay(&b, evict_at), KV_OK, "%s", kv_error_message());
            cr_expect_eq(asked, 1, "%s", setups[i].policy->name);
            if (i > 0) cr_expect_eq(asked_lead, i == 2 || window > N ? N : window);
            bench_free(&b);
        }
    naive_case_free(&c);
}

/* Same document in another layout: same decisions. Any other part of the address: other ones. */
Test(replay, random_depends_on_its_address_only) {
    enum { N = 200 };
    kv_run run = {.budget = 40, .sinks = 2, .window = 5, .seed = 9};
    naive_case a = naive_case_random(1, N, N, 2, 2, 2, 1),
               b = naive_case_random(2, N, N + 9, 2, 2, 2, 1);
    int32_t first[2 * N], again[2 * (N + 9)], other[2 * N];
    replay_case(&kv_policy_random, NULL, &a, &run, first);
    replay_case(&kv_policy_random, NULL, &b, &run, again);
    cr_assert_arr_eq(first, again, N * sizeof *first);
    cr_assert_arr_eq(first + N, again + N + 9, N * sizeof *first);
    cr_assert(memcmp(first, first + N, N * sizeof *first) != 0, "KV heads draw the same");
    for (int i = 0; i < 4; i++) {
        kv_run changed = run;
        naive_case c = a;
        *(i == 0 ? &c.span.request : i == 1 ? &c.span.document : &c.span.layer_id) += i < 3;
        changed.seed += i == 3;
        replay_case(&kv_policy_random, NULL, &c, &changed, other);
        cr_assert(memcmp(first, other, sizeof other) != 0, "address part %d has no effect", i);
    }
    naive_case_free(&a);
    naive_case_free(&b);
}

Test(replay, marked_tokens_leave_after_the_window) {
    enum { N = 9, STRIDE = 11 };
    const kv_span span = {.n_token = N, .stride = STRIDE, .n_kv_head = 2};
    uint8_t leaves[2 * STRIDE] = {1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1};
    int32_t got[2 * STRIDE], want[N];
    memset(got, 0x5a, sizeof got);
    cr_assert_eq(kv_replay_gate(&span, 3, leaves, got), KV_OK);
    cr_assert_eq(naive_case_row("3 - - 6 - 8 - - -", N, want), N);
    cr_assert_arr_eq(got, want, sizeof want);
    cr_assert_eq(naive_case_row("- 4 - - - - - - -", N, want), N);
    cr_assert_arr_eq(got + STRIDE, want, sizeof want);
    cr_assert_eq(got[N], 0x5a5a5a5a, "wrote past the document");
}

static kv_status early(const kv_policy_input *input, int32_t *evict_at) {
    for (int32_t t = 0; t < input->span->n_token; t++) evict_at[t] = t == 3 ? 3 : 1000;
    return KV_OK;
}
static kv_status late(const kv_policy_input *input, int32_t *evict_at) {
    for (int32_t t = 0; t < input->span->n_token; t++) evict_at[t] = t + 4;
    return KV_OK;
}

Test(replay, refusals_and_canonical_form) {
    enum { N = 8 };
    const struct {
        kv_run run;
        const char *says;
    } bad[] = {{{.budget = 5, .sinks = 4, .window = 2}, "--budget is 5"},
               {{.budget = 5, .sinks = 1, .window = 0}, "--window is 0"},
               {{.budget = 5, .sinks = -1, .window = 2}, "--sinks is -1"},
               {{.budget = 0, .sinks = 0, .window = 1}, "--budget is 0"},
               {{.budget = 5, .sinks = INT32_MAX, .window = INT32_MAX}, "4294967294"}};
    const kv_policy *const any[] = {&kv_policy_full, &kv_policy_tova, &kv_policy_knorm};
    const kv_policy hasty = {.name = "hasty", .kind = KV_PRIORITY, .decide = early},
                    tardy = {.name = "tardy", .kind = KV_PRIORITY, .decide = late};
    const kv_run run = {.budget = 6, .sinks = 1, .window = 2};
    naive_case c = naive_case_random(1, N, N, 1, 1, 2, 1);
    int32_t got[N], want[N];
    uint64_t bytes;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        for (size_t p = 0; p < sizeof any / sizeof *any; p++) {
            bench b = bench_new(any[p], NULL, &c, &bad[i].run);
            cr_assert_eq(replay(&b, got), KV_E_USAGE, "%s", bad[i].says);
            cr_assert(strstr(kv_error_message(), bad[i].says), "%s: %s", bad[i].says,
                      kv_error_message());
            cr_assert_eq(kv_stream(any[p], &b.input, 2, got, &bytes), KV_E_USAGE);
            bench_free(&b);
        }

    bench b = bench_new(&kv_policy_oracle_step, NULL, &c, &run);
    cr_assert_eq(replay(&b, got), KV_E_USAGE);
    bench_free(&b);

    kv_span longer = c.span;
    longer.n_token = 1025;
    b = bench_new(&kv_policy_oracle_exact, NULL, &c, &run);
    b.input.span = &longer;
    cr_assert_eq(replay(&b, got), KV_E_USAGE);
    cr_assert(strstr(kv_error_message(), "1024") && strstr(kv_error_message(), "1025"), "%s",
              kv_error_message());
    bench_free(&b);

    const setup blind[] = {{&kv_policy_oracle, NULL},
                           {&kv_policy_oracle_exact, NULL},
                           {&kv_policy_keydiff, "anchor=all"}};
    for (int i = 0; i < 3; i++) {
        b = bench_new(blind[i].policy, blind[i].setting, &c, &run);
        b.input.params = &b.params;
        cr_assert_eq(kv_stream(b.policy, &b.input, 2, got, &bytes), KV_E_USAGE, "%s",
                     b.policy->name);
        cr_assert(strstr(kv_error_message(), "future"), "%s", kv_error_message());
        bench_free(&b);
    }

    b = bench_new(&hasty, NULL, &c, &run);
    cr_assert_eq(replay(&b, got), KV_E_INTERNAL);
    cr_assert(strstr(kv_error_message(), "token 3"), "%s", kv_error_message());
    bench_free(&b);
    naive_case_row("4 5 6 7 - - - -", N, want);
    replay_case(&tardy, NULL, &c, &run, got);
    cr_assert_arr_eq(got, want, sizeof want);
    const setup follow = {&tardy, NULL};
    b = bench_new(follow.policy, NULL, &c, &run);
    b.input.params = &b.params;
    cr_assert_eq(kv_stream(&tardy, &b.input, 2, got, &bytes), KV_OK);
    cr_assert_arr_eq(got, want, sizeof want);
    bench_free(&b);
    naive_case_free(&c);
}
