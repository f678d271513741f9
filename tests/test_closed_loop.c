/* Closed-loop replay: golden vectors of maths.md 12.8, agreement with the step-by-step cache, edge cases. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/cpu.h"
#include "reference/replay.h"
#include "tests/naive/naive_case.h"
#include "tests/naive/naive_replay.h"

/* The work is too small for more than one thread. */
static void one_thread(void) { kv_threads_set(1); }
TestSuite(closed_loop, .init = one_thread);

static const kv_attention_rule tova = {.per_layer = true, .reduce = KV_REDUCE_MEAN, .decay = 0},
                               tova_head = {.reduce = KV_REDUCE_MEAN, .decay = 0},
                               cumulative = {
                                   .per_layer = true, .reduce = KV_REDUCE_MEAN, .decay = 1};

static kv_attention_rule h2o(int32_t budget, kv_reduce reduce) {
    return (kv_attention_rule){.reduce = reduce, .decay = 1, .protect_recent = budget / 2};
}

typedef struct problem {
    naive_case c;
    int32_t *got, *want; /* [n_kv_head][stride] */
} problem;

static problem with_rows(naive_case c) {
    const size_t n = (size_t)(c.span.n_kv_head * c.span.stride);
    return (problem){c, malloc(n * sizeof(int32_t)), malloc(n * sizeof(int32_t))};
}

static void drop(problem *p) {
    naive_case_free(&p->c);
    free(p->got);
    free(p->want);
}

Test(closed_loop, golden_vectors) {
    const struct {
        const char *name;
        kv_attention_rule rule;
        const char *row[2];
    } cases[] = {
        {"tova",
         tova,
         {"15 17 - 20 - 23 12 13 14 16 18 19 21 22 - - - - - - - - - -",
          "15 17 - 20 - 23 12 13 14 16 18 19 21 22 - - - - - - - - - -"}},
        {"tova:reduce=head",
         tova_head,
         {"15 17 - - 21 23 12 13 14 16 18 19 20 22 - - - - - - - - - -",
          "15 17 - 20 22 - 12 13 14 16 18 19 21 - - - - - - - - - 23 -"}},
        {"h2o",
         h2o(11, KV_REDUCE_SUM),
         {"- - - - - 12 - 13 14 15 16 17 18 19 20 21 22 23 - - - - - -",
          "- - - - - - 12 13 14 15 16 17 18 19 20 21 22 23 - - - - - -"}},
        {"h2o:reduce=mean",
         h2o(11, KV_REDUCE_MEAN),
         {"- - - - - 12 - 13 14 15 16 17 18 19 20 21 22 23 - - - - - -",
          "- - - - - - 12 13 14 15 16 17 18 19 20 21 22 23 - - - - - -"}},
        {"cumulative",
         cumulative,
         {"- - - - - - - - - - - 12 13 14 15 16 17 18 19 20 21 22 23 -",
          "- - - - - - - - - - - 12 13 14 15 16 17 18 19 20 21 22 23 -"}},
    };
    problem p = with_rows(naive_case_golden());
    const int32_t *got = p.got, *want = p.want;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_assert_eq(kv_replay_attention(&p.c.span, &cases[i].rule, 11, p.got), KV_OK);
        naive_closed_loop(&p.c.span, &cases[i].rule, 11, p.want);
        for (int32_t h = 0; h < 2; h++) {
            int32_t row[24];
            cr_assert_eq(naive_case_row(cases[i].row[h], 24, row), 24, "%s h%d", cases[i].name, h);
            for (int32_t t = 0; t < 24; t++) {
                cr_assert_eq(got[h * 24 + t], row[t], "%s h%d t=%d: %d, golden %d", cases[i].name,
                             h, t, got[h * 24 + t], row[t]);
                cr_assert_eq(want[h * 24 + t], row[t], "naive %s h%d t=%d: %d, golden %d",
                             cases[i].name, h, t, want[h * 24 + t], row[t]);
            }
        }
    }
    drop(&p);
}

static void compare(problem *p, const kv_attention_rule *rule, int32_t budget, const char *what) {
    const kv_span *s = &p->c.span;
    cr_assert_eq(kv_replay_attention(s, rule, budget, p->got), KV_OK, "%s: %s", what,
                 kv_error_message());
    naive_closed_loop(s, rule, budget, p->want);
    for (int32_t h = 0; h < s->n_kv_head; h++)
        for (int32_t t = 0; t < s->n_token; t++)
            cr_assert_eq(
                p->got[h * s->stride + t], p->want[h * s->stride + t],
                "%s n=%d budget=%d decay=%g reduce=%d per_layer=%d h=%d t=%d: %d, naive %d", what,
                s->n_token, budget, rule->decay, (int)rule->reduce, rule->per_layer, h, t,
                p->got[h * s->stride + t], p->want[h * s->stride + t]);
}

/* Random spans: the smallest statistics differ by far more than fp32 logits err (the seeds were not chosen). A spread of 6 makes
 * logits of +-100: sharp softmax, underflow, and evicted maxima. */
static void agree_on_random_spans(void) {
    static const int32_t heads[][2] = {{1, 1}, {2, 1}, {4, 2}, {8, 2}, {3, 3}, {6, 2}};
    uint64_t seed = 1;
    for (size_t shape = 0; shape < sizeof heads / sizeof *heads; shape++)
        for (int variant = 0; variant < 4; variant++) {
            const int32_t n = 70, d = variant == 3 ? 5 : 8;
            problem p =
                with_rows(naive_case_random(seed++, n, variant % 2 ? n + 13 : n, heads[shape][0],
                                            heads[shape][1], d, variant == 2 ? 6 : 1.5));
            if (variant == 1) p.c.span.softcap = 2;
            const int32_t budgets[] = {1, 2, 7, 31, 48, n - 2, n - 1, n, n + 1};
            for (size_t b = 0; b < sizeof budgets / sizeof *budgets; b++) {
                const kv_attention_rule rules[] = {tova,
                                                   tova_head,
                                                   cumulative,
                                                   h2o(budgets[b], KV_REDUCE_SUM),
                                                   h2o(budgets[b], KV_REDUCE_MAX),
                                                   {.decay = .9, .protect_recent = budgets[b]}};
                for (size_t r = 0; r < sizeof rules / sizeof *rules; r++)
                    compare(&p, &rules[r], budgets[b], "random");
            }
            drop(&p);
        }
}

Test(closed_loop, equals_the_step_by_step_cache) { agree_on_random_spans(); }

Test(closed_loop, equals_the_step_by_step_cache_without_vector_units) {
    setenv("KV_ISA", "generic", 1); /* read once per process, and each test is one */
    agree_on_random_spans();
    cr_assert_eq(kv_cpu_isa(), KV_ISA_GENERIC);
}

/* Equal keys make every probability of a query equal: the largest t leaves, u itself under tova. */
Test(closed_loop, ties_go_to_the_newest) {
    problem p = with_rows(naive_case_random(9, 40, 40, 4, 2, 4, 1));
    for (int32_t i = 0; i < 2 * 40 * 4; i++) p.c.k[i] = .5f;
    compare(&p, &tova, 10, "equal keys");
    for (int32_t t = 0; t < 40; t++)
        cr_assert_eq(p.got[t], t < 10 || t == 39 ? KV_NEVER : t + 1, "tova t=%d: %d", t, p.got[t]);
    compare(&p, &cumulative, 10, "equal keys");
    for (int32_t t = 0; t < 40; t++)
        cr_assert_eq(p.got[t], t < 10 || t == 39 ? KV_NEVER : t + 1, "cumulative t=%d: %d", t,
                     p.got[t]);
    /* Two periods of keys: pairs of equal statistics, broken by position. */
    for (int32_t h = 0; h < 2; h++)
        for (int32_t t = 0; t < 40; t++)
            for (int32_t c = 0; c < 4; c++)
                p.c.k[(h * 40 + t) * 4 + c] = (float)sin(1.3 * (t % 5) + c + h);
    compare(&p, &tova, 10, "periodic keys");
    compare(&p, &tova_head, 17, "periodic keys");
    /* Probabilities far below 2^-126 tie at 0. */
    for (int32_t h = 0; h < 2; h++)
        for (int32_t t = 0; t < 40; t++)
            for (int32_t c = 0; c < 4; c++)
                p.c.k[(h * 40 + t) * 4 + c] = t % 7 == 3 ? 60.f : -60.f - (float)t;
    for (int32_t i = 0; i < 4 * 40 * 4; i++) p.c.q[i] = 1;
    compare(&p, &tova, 10, "underflow");
    compare(&p, &cumulative, 10, "underflow");
    drop(&p);
}

/* The same bytes for any thread count. */
Test(closed_loop, threads_do_not_matter) {
    problem p = with_rows(naive_case_random(77, 300, 310, 8, 4, 16, 1.3));
    const kv_attention_rule rules[] = {tova, tova_head, cumulative, h2o(60, KV_REDUCE_SUM)};
    for (size_t r = 0; r < 4; r++) {
        kv_threads_set(1);
        cr_assert_eq(kv_replay_attention(&p.c.span, &rules[r], 60, p.want), KV_OK);
        kv_threads_set(3);
        cr_assert_eq(kv_replay_attention(&p.c.span, &rules[r], 60, p.got), KV_OK);
        kv_threads_set(0);
        for (int32_t h = 0; h < 4; h++)
            cr_assert_arr_eq(p.got + h * 310, p.want + h * 310, 300 * sizeof(int32_t), "rule %zu",
                             r);
    }
    drop(&p);
}

Test(closed_loop, refuses_impossible_rules) {
    problem p = with_rows(naive_case_golden());
    kv_attention_rule rule = {.protect_recent = 12};
    cr_assert_eq(kv_replay_attention(&p.c.span, &rule, 11, p.got), KV_E_USAGE);
    cr_assert(strstr(kv_error_message(), "12 newest keys"), "%s", kv_error_message());
    cr_assert_eq(kv_replay_attention(&p.c.span, &tova, 0, p.got), KV_E_USAGE);
    p.c.k[17] = NAN;
    cr_assert_eq(kv_replay_attention(&p.c.span, &cumulative, 11, p.got), KV_E_DATA);
    cr_assert(strstr(kv_error_message(), "not a number"), "%s", kv_error_message());
    drop(&p);
}
