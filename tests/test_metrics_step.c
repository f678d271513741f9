/* The step bound: golden values of maths.md 12.8, agreement with its definition, above every priority policy. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

#include "reference/attention.h"
#include "reference/core/cpu.h"
#include "reference/metrics.h"
#include "tests/naive/naive_case.h"
#include "tests/naive/naive_metrics.h"
#include "tests/naive/naive_replay.h"

/* The work is too small for more than one thread. */
static void one_thread(void) { kv_threads_set(1); }
TestSuite(metrics_step, .init = one_thread);

static void step_mass(const kv_span *span, const kv_run *run, double *mass) {
    kv_dense dense;
    const kv_dense_request request = {.window = 1}; /* the log-sum-exp alone */
    cr_assert_eq(kv_dense_compute(span, &request, &dense), KV_OK);
    cr_assert_eq(kv_oracle_step_mass(span, run, &dense, mass), KV_OK);
    kv_dense_free(&dense);
}

Test(metrics_step, golden_bounds) {
    const struct {
        const char *name;
        kv_run run;
        double mass[2];
    } cases[] = {
        {"step", {.budget = 11, .sinks = 2, .window = 3}, {.8387646874, .8369312233}},
        {"free B", {.budget = 11}, {.8819385864, .8899089879}},
        {"free B+1", {.budget = 12}, {.9123325234, .9195590864}},
    };
    naive_case c = naive_case_golden();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double mass[2][48];
        naive_step_mass(&c.span, &cases[i].run, mass[0]);
        step_mass(&c.span, &cases[i].run, mass[1]);
        for (int32_t h = 0; h < 2; h++)
            for (int way = 0; way < 2; way++) {
                double mean = 0;
                for (int32_t u = 11; u < 24; u++) mean += mass[way][h * 24 + u] / 13;
                cr_assert_float_eq(mean, cases[i].mass[h], 1e-6,
                                   "%s h=%d way=%d: %.10f, golden %.10f", cases[i].name, h, way,
                                   mean, cases[i].mass[h]);
            }
    }
    naive_case_free(&c);
}

/* The result of a run that has nothing but the step bound. */
static void check_result(const kv_span *span, const kv_run *run, const kv_metrics_shape *shape,
                         const double *mass, double at_least) {
    kv_metrics *m;
    kv_metrics_result r;
    cr_assert_eq(kv_metrics_open(shape, run, &m), KV_OK);
    cr_assert_eq(kv_metrics_add_step(m, span, mass), KV_OK);
    cr_assert_eq(kv_metrics_finish(m, &r), KV_OK);
    cr_assert_eq(r.n_counted, span->n_token - run->budget);
    cr_assert_geq(r.retained_mass, at_least - 1e-6, "B=%d: %.9g, oracle %.9g", run->budget,
                  r.retained_mass, at_least);
    cr_assert_eq(r.mass_by_layer[0], r.retained_mass);
    cr_assert(isnan(r.recall_mean) && isnan(r.recall_chance) && isnan(r.kept_mean) &&
              isnan(r.output_error) && isnan(r.retained_mass_long) && isnan(r.retrieval_hit));
    kv_metrics_result_free(&r);
    kv_metrics_free(m);
}

/* The step bound against its definition, at sizes that cross panels and blocks, with ties; and above every priority policy. */
Test(metrics_step, equals_its_definition_and_bounds_the_oracle) {
    for (int32_t variant = 0; variant < 6; variant++) {
        const int32_t n = variant == 5 ? 9 : 75, n_q = variant % 2 ? 4 : 3,
                      n_kv = variant % 2 ? 2 : 1;
        naive_case c = naive_case_random(20 + (uint64_t)variant, n, n + 4, n_q, n_kv, 8,
                                         variant == 2 ? 6 : 1.5);
        if (variant == 3) c.span.softcap = 3;
        if (variant == 4)
            for (int32_t i = 0; i < n_kv * (n + 4) * 8; i++) c.k[i] = .25f;
        double *got = calloc((size_t)(n_kv * (n + 4)), sizeof *got),
               *want = calloc((size_t)(n_kv * (n + 4)), sizeof *want);
        const int32_t budgets[] = {7, 8, 30, n - 1, n, n + 1};
        for (size_t b = 0; b < 6; b++) {
            const kv_run run = {.budget = budgets[b], .sinks = 3, .window = 4, .eps = 1e-8};
            step_mass(&c.span, &run, got);
            naive_step_mass(&c.span, &run, want);
            for (int32_t h = 0; h < n_kv; h++)
                for (int32_t u = 0; u < n; u++)
                    cr_assert_float_eq(got[h * (n + 4) + u], want[h * (n + 4) + u], 2e-6,
                                       "variant=%d B=%d h=%d u=%d: %.9g, naive %.9g", variant,
                                       budgets[b], h, u, got[h * (n + 4) + u],
                                       want[h * (n + 4) + u]);
            if (budgets[b] >= n) continue;
            int32_t *evict_at = malloc((size_t)(n_kv * (n + 4)) * sizeof *evict_at);
            kv_metrics_result oracle;
            naive_oracle(&c.span, &run, 1, evict_at);
            const naive_document doc = {&c.span, evict_at, evict_at, NULL, NULL};
            const kv_metrics_shape shape = {1, n_q, n_kv, 8, 2};
            naive_metrics(&doc, 1, &shape, &run, &oracle);
            check_result(&c.span, &run, &shape, got, oracle.retained_mass);
            kv_metrics_result_free(&oracle);
            free(evict_at);
        }
        free(got);
        free(want);
        naive_case_free(&c);
    }
}

/* The same bytes on any number of threads. */
Test(metrics_step, threads_do_not_matter) {
    const kv_run run = {.budget = 20, .sinks = 2, .window = 5};
    naive_case c = naive_case_random(3, 90, 90, 8, 4, 8, 2);
    double mass[2][4 * 90];
    for (int i = 0; i < 2; i++) {
        kv_threads_set(1 + 2 * i);
        step_mass(&c.span, &run, mass[i]);
    }
    kv_threads_set(0);
    cr_assert_arr_eq(mass[0], mass[1], sizeof mass[0]);
    naive_case_free(&c);
}
