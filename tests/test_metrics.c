/* Metrics: golden vectors of maths.md 12.8, agreement with the table of contract.md 3 written out, undefined values, bounds. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference/attention.h"
#include "reference/core/cpu.h"
#include "reference/core/rand.h"
#include "reference/metrics.h"
#include "reference/replay.h"
#include "tests/naive/naive_case.h"
#include "tests/naive/naive_metrics.h"
#include "tests/naive/naive_replay.h"

/* The work is too small for more than one thread. */
static void one_thread(void) { kv_threads_set(1); }
TestSuite(metrics, .init = one_thread);

/* fp32 logits of size ~10 and their log-sum-exp carry 1e-6; one more decimal for the sums of squares behind output_error. */
static const double TOLERANCE = 1e-5;

static int32_t *rows(const kv_span *s) {
    return malloc((size_t)(s->n_kv_head * s->stride) * sizeof(int32_t));
}

/* The real path: dense sweep, masked attention, kv_metrics_add for each document. */
static void measure(const naive_document *doc, int32_t n_doc, const kv_metrics_shape *shape,
                    const kv_run *run, kv_metrics_result *out) {
    kv_metrics *m;
    cr_assert_eq(kv_metrics_open(shape, run, &m), KV_OK);
    for (int32_t i = 0; i < n_doc; i++) {
        kv_dense dense;
        kv_masked masked;
        const kv_dense_request want_dense = {.sinks = run->sinks,
                                             .window = run->window,
                                             .n_power = 1,
                                             .power = {1},
                                             .want_output = true,
                                             .want_events = true};
        const kv_masked_request want_masked = {.evict_at = doc[i].evict_at,
                                               .sinks = run->sinks,
                                               .window = run->window,
                                               .want_output = true,
                                               .want_long = true};
        cr_assert_eq(kv_dense_compute(doc[i].span, &want_dense, &dense), KV_OK);
        cr_assert_eq(kv_masked_compute(doc[i].span, &want_masked, &masked), KV_OK);
        const kv_metrics_item item = {.span = doc[i].span,
                                      .dense = &dense,
                                      .masked = i % 2 ? NULL : &masked, /* or by itself */
                                      .ops = i % 2 ? &kv_ops_cpu : NULL,
                                      .evict_at = doc[i].evict_at,
                                      .evict_oracle = doc[i].evict_oracle,
                                      .evict_own = doc[i].evict_own,
                                      .kind = doc[i].kind};
        cr_assert_eq(kv_metrics_add(m, &item), KV_OK, "%s", kv_error_message());
        kv_dense_free(&dense);
        kv_masked_free(&masked);
    }
    cr_assert_eq(kv_metrics_finish(m, out), KV_OK, "%s", kv_error_message());
    kv_metrics_free(m);
}

static void same(double got, double want, double tolerance, const char *field, int32_t i,
                 const char *what) {
    if (isnan(want))
        cr_assert(isnan(got), "%s[%d] of %s is %.12g, undefined expected", field, i, what, got);
    else
        cr_assert(fabs(got - want) <= tolerance * fmax(1, fabs(want)),
                  "%s[%d] of %s is %.12g, expected %.12g", field, i, what, got, want);
}

static void same_result(const kv_metrics_result *a, const kv_metrics_result *b,
                        const kv_metrics_shape *shape, const char *what) {
    const int32_t layers = shape->n_layer, heads = layers * shape->n_kv_head,
                  queries = layers * shape->n_q_head;
#define SCALAR(field, tolerance) \
    same((double)a->field, (double)b->field, tolerance, #field, 0, what)
#define ARRAY(field, n, tolerance) \
    for (int32_t i = 0; i < (n); i++) \
    same((double)a->field[i], (double)b->field[i], tolerance, #field, i, what)
    SCALAR(n_counted, 0);
    SCALAR(kept_max, 0);
    SCALAR(n_retrieval, 0);
    SCALAR(cache_bytes, 0);
    SCALAR(recall_mean, 1e-12);
    SCALAR(recall_chance, 1e-12);
    SCALAR(recall_adjusted, 1e-10);
    SCALAR(recall_own, 1e-12);
    SCALAR(long_kept_mean, 1e-12);
    SCALAR(kept_mean, 1e-12);
    SCALAR(retrieval_hit, 1e-12);
    SCALAR(retained_mass, TOLERANCE);
    SCALAR(retained_mass_long, TOLERANCE);
    SCALAR(future_mass_ratio, TOLERANCE);
    SCALAR(output_error, TOLERANCE);
    ARRAY(recall_by_kind, KV_KINDS, 1e-12);
    ARRAY(recall, heads, 1e-12);
    ARRAY(chance, heads, 1e-12);
    ARRAY(own, heads, 1e-12);
    ARRAY(adjusted, heads, 1e-10);
    ARRAY(long_kept, heads, 1e-12);
    ARRAY(kept, heads, 1e-12);
    ARRAY(ratio, heads, TOLERANCE);
    ARRAY(mass, queries, TOLERANCE);
    ARRAY(mass_long, queries, TOLERANCE);
    ARRAY(error, queries, TOLERANCE);
    ARRAY(hits, queries, 0);
    ARRAY(retrievals, queries, 0);
    ARRAY(mass_by_layer, layers, TOLERANCE);
    ARRAY(hit_by_layer, layers, 1e-12);
    ARRAY(error_by_layer, layers, TOLERANCE);
    ARRAY(kept_by_layer, layers, 1e-12);
#undef SCALAR
#undef ARRAY
}

static const kv_run golden_run = {
    .budget = 11, .sinks = 2, .window = 3, .eps = 1e-8, .oracle_delta = 0};

Test(metrics, golden_vectors) {
    const struct {
        const char *name;
        kv_attention_rule rule; /* unused by the oracle */
        double recall[2], chance[2], ratio[2], mass[4], error[4];
    } cases[] = {
        {"tova",
         {.per_layer = true, .reduce = KV_REDUCE_MEAN},
         {.7435897436, .8974358974},
         {.6728829217, .6728829217},
         {1.1634275285, 1.2224633964},
         {.7605070321, .6174410022, .7920542692, .6488062177},
         {2.4551266733, 2.6768642813, 2.0007550692, 2.602152733}},
        {"h2o",
         {.reduce = KV_REDUCE_SUM, .decay = 1, .protect_recent = 5},
         {.7820512821, .7051282051},
         {.5910905846, .5910905846},
         {1.0392946222, 1.0316878095},
         {.7781188811, .7100752057, .7774871405, .7357609599},
         {1.9440076771, 2.3222929512, 1.9404159965, 2.5683448409}},
        {"oracle",
         {0},
         {1, 1},
         {.5066490725, .5066490725},
         {1, 1},
         {.6735018877, .7477798549, .6857977879, .7227330563},
         {2.7165419757, 1.772646782, 2.4959324142, 2.1716641078}},
    };
    naive_case c = naive_case_golden();
    const kv_metrics_shape shape = {1, 4, 2, 4, 2};
    int32_t *evict_at = rows(&c.span), *oracle = rows(&c.span);
    naive_oracle(&c.span, &golden_run, 1, oracle);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kv_metrics_result got[2];
        const naive_document doc = {&c.span, i == 2 ? oracle : evict_at, oracle, NULL, NULL};
        if (i < 2) naive_closed_loop(&c.span, &cases[i].rule, 11, evict_at);
        naive_metrics(&doc, 1, &shape, &golden_run, &got[0]);
        measure(&doc, 1, &shape, &golden_run, &got[1]);
        for (int way = 0; way < 2; way++) { /* q, k, v are fp32 here, fp64 in maths.md */
            const double tolerance = way ? 1e-5 : 1e-6;
            cr_assert_eq(got[way].n_counted, 13);
            cr_assert_eq(got[way].kept_max, i == 2 ? 11 : 12, "%s", cases[i].name);
            for (int32_t h = 0; h < 2; h++) {
                same(got[way].recall[h], cases[i].recall[h], 1e-10, "recall", h, cases[i].name);
                same(got[way].chance[h], cases[i].chance[h], 1e-10, "chance", h, cases[i].name);
                same(got[way].ratio[h], cases[i].ratio[h], tolerance, "ratio", h, cases[i].name);
            }
            for (int32_t h = 0; h < 4; h++) {
                same(got[way].mass[h], cases[i].mass[h], tolerance, "mass", h, cases[i].name);
                same(got[way].error[h], cases[i].error[h], tolerance, "error", h, cases[i].name);
            }
            kv_metrics_result_free(&got[way]);
        }
    }
    free(evict_at);
    free(oracle);
    naive_case_free(&c);
}

/* Arbitrary decisions, as an imported file may hold them: some at once, some after the end of the window, some never. */
static void arbitrary(const kv_span *s, uint64_t seed, int32_t *evict_at) {
    for (int32_t h = 0; h < s->n_kv_head; h++)
        for (int32_t t = 0; t < s->n_token; t++) {
            const double x = kv_rand_uniform(seed, (uint32_t)h, (uint32_t)t, 3, 4);
            const int32_t at = t + 1 + (int32_t)(x * 1.5 * s->n_token);
            evict_at[h * s->stride + t] = at < s->n_token ? at : KV_NEVER;
        }
}

enum { DECISIONS = 6 };
static const char *decide(int which, const kv_span *s, const kv_run *run, uint64_t seed,
                          int32_t *evict_at) {
    const kv_attention_rule tova = {.per_layer = true, .reduce = KV_REDUCE_MEAN},
                            cumulative = {.per_layer = true, .reduce = KV_REDUCE_MEAN, .decay = 1},
                            h2o = {.reduce = KV_REDUCE_SUM,
                                   .decay = 1,
                                   .protect_recent = run->budget / 2};
    switch (which) {
    case 0: naive_closed_loop(s, &tova, run->budget, evict_at); return "tova";
    case 1: naive_closed_loop(s, &cumulative, run->budget, evict_at); return "cumulative";
    case 2: naive_closed_loop(s, &h2o, run->budget, evict_at); return "h2o";
    case 3: naive_oracle(s, run, 2, evict_at); return "oracle:power=2";
    case 4: arbitrary(s, seed, evict_at); return "arbitrary";
    default: /* full */
        for (int64_t i = 0; i < s->n_kv_head * s->stride; i++) evict_at[i] = KV_NEVER;
        return "full";
    }
}

/* Two layers, two documents of different length in one recording (stride = all tokens), token kinds, recall_own. */
static void one_configuration(uint64_t seed, int32_t n_q, int32_t n_kv, double spread,
                              float softcap, const kv_run *run) {
    enum { FIRST = 26, SECOND = 37, ALL = FIRST + SECOND, D = 8 };
    const kv_metrics_shape shape = {2, n_q, n_kv, D, 4};
    naive_case c[2];
    kv_span span[4];
    int32_t *evict_at[4], *oracle[4], *own[4];
    uint8_t kind[ALL];
    for (int32_t t = 0; t < ALL; t++) kind[t] = (uint8_t)(t % 5 == 0 ? 200 : t % 3);
    for (int32_t l = 0; l < 2; l++) {
        c[l] = naive_case_random(seed + (uint64_t)l, ALL, ALL, n_q, n_kv, D, spread);
        c[l].span.softcap = softcap;
        for (int32_t i = 0; i < 2; i++) {
            kv_span *s = &span[l * 2 + i];
            *s = c[l].span;
            s->layer_index = l;
            s->n_token = i ? SECOND : FIRST;
            s->q += i * FIRST * D;
            s->k += i * FIRST * D;
            s->v += i * FIRST * D;
        }
    }
    for (int i = 0; i < 4; i++) {
        evict_at[i] = rows(&span[i]);
        oracle[i] = rows(&span[i]);
        own[i] = rows(&span[i]);
        naive_oracle(&span[i], run, 1, oracle[i]);
        naive_oracle(&span[i], run, 3, own[i]);
    }
    for (int which = 0; which < DECISIONS; which++) {
        char what[160];
        const char *name = "";
        naive_document doc[4];
        for (int i = 0; i < 4; i++) {
            name = decide(which, &span[i], run, seed + 10, evict_at[i]);
            doc[i] = (naive_document){&span[i], evict_at[i], oracle[i], which % 2 ? own[i] : NULL,
                                      which % 3 ? kind + (i % 2) * FIRST : NULL};
        }
        snprintf(what, sizeof what, "%s seed=%d heads=%d/%d spread=%g softcap=%g B=%d s=%d w=%d",
                 name, (int)seed, n_q, n_kv, spread, (double)softcap, run->budget, run->sinks,
                 run->window);
        kv_metrics_result got, want;
        measure(doc, 4, &shape, run, &got);
        naive_metrics(doc, 4, &shape, run, &want);
        same_result(&got, &want, &shape, what);
        if (which == DECISIONS - 1 && got.n_counted > 0) /* full keeps exactly everything */
            cr_assert(got.retained_mass == 1 && !(got.recall_mean < 1), "%s: %.17g", what,
                      got.retained_mass);
        kv_metrics_result_free(&got);
        kv_metrics_result_free(&want);
    }
    for (int i = 0; i < 4; i++) {
        free(evict_at[i]);
        free(oracle[i]);
        free(own[i]);
    }
    naive_case_free(&c[0]);
    naive_case_free(&c[1]);
}

Test(metrics, equal_the_table_written_out) {
    static const int32_t heads[][2] = {{1, 1}, {2, 2}, {4, 2}, {4, 1}};
    static const int32_t budgets[] = {7, 8, 15, 25, 26, 27, 36, 37, 38}; /* s + w is 7 */
    uint64_t seed = 1;
    for (size_t h = 0; h < 4; h++)
        for (size_t b = 0; b < sizeof budgets / sizeof *budgets; b++) {
            const kv_run run = {.budget = budgets[b],
                                .sinks = 2,
                                .window = 5,
                                .eps = 1e-8,
                                .oracle_delta = 2e-5,
                                .target_mean = h == 3};
            one_configuration(seed, heads[h][0], heads[h][1], b % 2 ? 3 : 1.4, h == 1 ? 2 : 0,
                              &run);
            seed += 2;
        }
    one_configuration(seed, 2, 1, 2, 0, &(kv_run){.budget = 1, .window = 1, .eps = 1e-8});
    one_configuration(seed, 2, 1, 2, 0, &(kv_run){.budget = 9, .window = 1, .eps = 1e-8});
    one_configuration(seed, 2, 1, 2, 0, &(kv_run){.budget = 40, .window = 40, .eps = 1e-8});
}

/* What no random case reaches: sums over zeros, masses that differ by 20 orders, zero output. */
Test(metrics, running_sums_stay_exact) {
    enum { N = 400 };
    const kv_run run = {.budget = 10, .sinks = 1, .window = 2};
    const kv_metrics_shape shape = {1, 1, 1, 2, 2};
    naive_case c = naive_case_random(5, N, N, 1, 1, 2, 1);
    static double column[N];
    static float zero[2 * N], lse[N], top_p[N];
    static int32_t top_t[N], evict_at[N], oracle[N];
    for (int32_t t = 0; t < N; t++) {
        const double later = t < N - 2 ? N - t - 2 : 1;
        const double m = t < 100 ? .37 : t < 200 ? 1e-20 : t < 300 ? 0 : 1e-3 * t;
        column[t] = m * later;
        lse[t] = -INFINITY; /* of nothing kept in E(u) */
        oracle[t] = t == 0 ? KV_NEVER : t + 20;
        evict_at[t] = t == 0 ? KV_NEVER : t + 5 + t % 9;
    }
    kv_dense dense = {.request = {.sinks = 1, .window = 2, .n_power = 1, .power = {1}},
                      .stride = N,
                      .lse = zero,
                      .column = {column},
                      .long_mass = zero,
                      .top_p = top_p,
                      .top_t = top_t,
                      .o = zero};
    kv_masked masked = {.o = zero, .lse = zero, .lse_long = lse};
    const kv_metrics_item item = {.span = &c.span,
                                  .dense = &dense,
                                  .masked = &masked,
                                  .evict_at = evict_at,
                                  .evict_oracle = oracle};
    kv_metrics *m;
    kv_metrics_result r;
    cr_assert_eq(kv_metrics_open(&shape, &run, &m), KV_OK);
    cr_assert_eq(kv_metrics_add(m, &item), KV_OK, "%s", kv_error_message());
    cr_assert_eq(kv_metrics_finish(m, &r), KV_OK);
    double want = 0;
    for (int32_t u = 10; u < N; u++) {
        double part = 0, whole = 0;
        for (int32_t t = 1; t <= u - 2; t++) {
            const double mass = column[t] / (N - t - 2);
            part += u < evict_at[t] ? mass : 0;
            whole += u < oracle[t] ? mass : 0;
        }
        want += (whole == 0 ? 1 : part / whole) / (N - 10);
    }
    same(r.future_mass_ratio, want, 1e-11, "future_mass_ratio", 0, "fabricated masses");
    cr_assert_eq(r.output_error, 0, "0/0 is %g", r.output_error);
    cr_assert(isnan(r.retained_mass_long), "no long mass: %g", r.retained_mass_long);
    cr_assert(isnan(r.retrieval_hit) && r.n_retrieval == 0);
    kv_metrics_result_free(&r);
    kv_metrics_free(m);
    naive_case_free(&c);
}

Test(metrics, ties_at_one_half_are_retrievals) {
    enum { N = 6 };
    const kv_run run = {.budget = 2, .sinks = 0, .window = 1};
    const kv_metrics_shape shape = {1, 1, 1, 2, 2};
    float q[2 * N] = {0}, k[2 * N] = {0}, v[2 * N] = {0};
    kv_span span = {.n_token = N,
                    .stride = N,
                    .n_q_head = 1,
                    .n_kv_head = 1,
                    .head_dim = 2,
                    .q = q,
                    .k = k,
                    .v = v,
                    .scale = 1};
    /* Keys 0 and 1 attract every query, so each has p = .5 up to what exp(-1000) adds: nothing. */
    for (int32_t t = 0; t < N; t++) {
        q[2 * t] = 1;
        k[2 * t] = t < 2 ? 0 : -1000;
    }
    int32_t evict_at[N] = {5, 3, KV_NEVER, KV_NEVER, KV_NEVER, KV_NEVER}, oracle[N];
    naive_oracle(&span, &run, 1, oracle);
    const naive_document doc = {&span, evict_at, oracle, NULL, NULL};
    kv_metrics_result got, want;
    measure(&doc, 1, &shape, &run, &got);
    naive_metrics(&doc, 1, &shape, &run, &want);
    same_result(&got, &want, &shape, "two equal keys");
    cr_assert_eq(got.n_retrieval, 4, "%d", (int)got.n_retrieval);
    cr_assert_float_eq(got.retrieval_hit, .75, 1e-12, "t* is key 0: %g", got.retrieval_hit);
    kv_metrics_result_free(&got);
    kv_metrics_result_free(&want);
}

/* Per-head threads: the same bytes. */
Test(metrics, threads_do_not_matter) {
    const kv_run run = {.budget = 20, .sinks = 2, .window = 5, .eps = 1e-8};
    const kv_metrics_shape shape = {1, 8, 4, 8, 2};
    naive_case c = naive_case_random(3, 90, 90, 8, 4, 8, 2);
    int32_t *evict_at = rows(&c.span), *oracle = rows(&c.span);
    kv_metrics_result r[2];
    arbitrary(&c.span, 1, evict_at);
    naive_oracle(&c.span, &run, 1, oracle);
    const naive_document doc = {&c.span, evict_at, oracle, oracle, NULL};
    for (int i = 0; i < 2; i++) {
        kv_threads_set(1 + 2 * i);
        measure(&doc, 1, &shape, &run, &r[i]);
    }
    kv_threads_set(0);
    cr_assert_arr_eq(r[0].ratio, r[1].ratio, 4 * sizeof(double));
    cr_assert_arr_eq(r[0].chance, r[1].chance, 4 * sizeof(double));
    cr_assert_arr_eq(r[0].mass, r[1].mass, 8 * sizeof(double));
    cr_assert_arr_eq(r[0].mass_long, r[1].mass_long, 8 * sizeof(double));
    cr_assert_arr_eq(r[0].error, r[1].error, 8 * sizeof(double));
    for (int i = 0; i < 2; i++) kv_metrics_result_free(&r[i]);
    free(evict_at);
    free(oracle);
    naive_case_free(&c);
}

Test(metrics, misuse_is_named) {
    const kv_run run = {.budget = 11, .sinks = 2, .window = 3};
    const kv_metrics_shape shape = {2, 4, 2, 4, 2};
    naive_case c = naive_case_golden();
    double mass[48] = {0};
    kv_metrics *m;
    kv_metrics_result r;
    cr_assert_eq(kv_metrics_open(&shape, &run, &m), KV_OK);
    c.span.layer_index = 2;
    cr_assert_eq(kv_metrics_add_step(m, &c.span, mass), KV_E_INTERNAL);
    cr_assert(strstr(kv_error_message(), "got layer 2"), "%s", kv_error_message());
    c.span.layer_index = 1;
    cr_assert_eq(kv_metrics_add_step(m, &c.span, mass), KV_OK);
    cr_assert_eq(kv_metrics_finish(m, &r), KV_E_INTERNAL);
    cr_assert(strstr(kv_error_message(), "layer 1 has 13 counted queries, layer 0 has 0"), "%s",
              kv_error_message());
    kv_metrics_free(m);
    naive_case_free(&c);
}
