/* Future-attention targets: golden vectors of maths.md 12.2 and 12.10, definition, bounds between the group reductions. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reference/ops.h"
#include "reference/target.h"
#include "tests/naive/naive_attention.h"
#include "tests/naive/naive_case.h"

static const kv_run golden_run = {.sinks = 2, .window = 3, .eps = 1e-8};

static void target(const kv_span *s, const kv_run *run, double power, bool mean, float *r) {
    const kv_policy_input input = {.span = s, .run = run};
    cr_assert_eq(kv_target_of(&input, power, mean, r), KV_OK, "%s", kv_error_message());
}

Test(target, golden_vectors) {
    static const struct {
        double power;
        bool mean;
        int32_t t;
        double r;
    } golden[] = {
        {1, false, 2, -2.2868812029},  {1, false, 7, -2.7796975634}, {1, false, 10, -3.1426784100},
        {1, false, 20, -2.0489386222}, {1, true, 10, -3.2465472221}, {1, false, 21, -18.420681},
        {2, false, 2, -3.8341536898},  {2, false, 7, -4.7230319295}, {2, false, 20, -4.0978767975},
    };
    naive_case c = naive_case_golden(); /* its KV head 0 is the case of maths.md 12.2 */
    float r[48];
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++) {
        target(&c.span, &golden_run, golden[i].power, golden[i].mean, r);
        cr_assert_float_eq(r[golden[i].t], golden[i].r, 2e-6, "power %g mean %d r[%d] = %.9g, %.9g",
                           golden[i].power, golden[i].mean, golden[i].t, (double)r[golden[i].t],
                           golden[i].r);
    }
    naive_case_free(&c);
}

Test(target, matches_definition_for_all_powers) {
    static const double powers[] = {.5, 1, 1.5, 2, 4, 16, INFINITY};
    naive_case c = naive_case_random(7, 60, 64, 6, 2, 8, 1.5);
    const kv_run run = {.sinks = 4, .window = 6, .eps = 1e-8};
    kv_dense dense;
    kv_dense_request request = {.sinks = 4, .window = 6, .n_power = 7};
    memcpy(request.power, powers, sizeof powers);
    cr_assert_eq(kv_dense_compute(&c.span, &request, &dense), KV_OK);
    float r[128], from_dense[128];
    double m[128];
    for (int a = 0; a < 7; a++)
        for (int mean = 0; mean < 2; mean++) {
            const kv_policy_input input = {.span = &c.span, .run = &run, .dense = &dense};
            target(&c.span, &run, powers[a], mean, r);
            cr_assert_eq(kv_target_of(&input, powers[a], mean, from_dense), KV_OK);
            cr_assert_eq(kv_target_mass(&c.span, &dense, powers[a], mean, m), KV_OK);
            for (int32_t h = 0; h < 2; h++)
                for (int32_t t = 0; t < 60; t++) {
                    const int at = h * 64 + t;
                    const double mass = naive_target_mass(&c.span, 6, powers[a], mean, h, t);
                    const double log_mass =
                        naive_target_log(&c.span, 6, powers[a], mean, 1e-8, h, t);
                    /* power times the error of a logit of size 10, 3e-6 */
                    cr_assert_float_eq(m[at], mass, 5e-5 * mass, "power %g t %d: %g, %g", powers[a],
                                       t, m[at], mass);
                    cr_assert_float_eq(r[at], log_mass, 5e-5, "power %g t %d", powers[a], t);
                    cr_assert_float_eq(from_dense[at], log_mass, 5e-5, "power %g t %d", powers[a],
                                       t);
                }
        }
    cr_assert_eq(kv_target_mass(&c.span, &dense, 3, false, m), KV_E_INTERNAL);
    kv_dense_free(&dense);
    naive_case_free(&c);
}

/* max/G <= mean <= max, hence r - log G <= r_mean <= r (maths.md 2.2); the last tokens, never judged, get log eps. */
Test(target, group_mean_lies_within_log_g_of_the_maximum) {
    naive_case c = naive_case_random(9, 90, 90, 8, 2, 16, 2);
    const kv_run run = {.sinks = 1, .window = 20, .eps = 1e-8};
    float high[180], mean[180];
    target(&c.span, &run, 2, false, high);
    target(&c.span, &run, 2, true, mean);
    for (int32_t i = 0; i < 180; i++) {
        cr_assert(mean[i] <= high[i] + 1e-6f && mean[i] >= high[i] - logf(4) - 1e-6f, "%d", i);
        if (i % 90 > 70) cr_assert_eq(high[i], (float)log(1e-8), "%d", i);
    }
    naive_case_free(&c);
}

/* A sweep made for another window or under a sparse normaliser is not reused. */
Test(target, foreign_sweeps_are_not_reused) {
    naive_case c = naive_case_random(9, 40, 40, 1, 1, 16, 1);
    const kv_run run = {.window = 4, .eps = 1e-8};
    float expected[40], r[40], lse[40] = {0};
    target(&c.span, &run, 1, false, expected);
    for (int which = 0; which < 2; which++) {
        kv_dense dense;
        const kv_dense_request request = {
            .window = which ? 4 : 9, .n_power = 1, .power = {1}, .lse = which ? lse : NULL};
        cr_assert_eq(kv_dense_compute(&c.span, &request, &dense), KV_OK);
        const kv_policy_input input = {.span = &c.span, .run = &run, .dense = &dense};
        cr_assert_eq(kv_target_of(&input, 1, false, r), KV_OK);
        cr_assert_eq(memcmp(r, expected, sizeof r), 0, "case %d", which);
        kv_dense_free(&dense);
    }
    naive_case_free(&c);
}

/* Is t in A(u) under these priorities (maths.md 1)? */
static bool kept(const float *priority, const kv_run *run, int32_t u, int32_t t) {
    if (t < run->sinks || t > u - run->window) return true;
    int32_t better = 0;
    for (int32_t x = run->sinks; x <= u - run->window; x++)
        better += priority[x] > priority[t] || (priority[x] == priority[t] && x < t);
    return better < run->budget - run->sinks - run->window;
}

/* maths.md 2.4 with the key set of the dense target's own cache. */
Test(target, sparse_normaliser) {
    enum { S = 40, G = 3 };
    static const double powers[] = {1, 2, INFINITY};
    static const double log_gamma[] = {-1e-3, -2e-2};
    naive_case c = naive_case_random(11, S, S + 3, 2 * G, 2, 8, 1.5);
    const kv_span *s = &c.span;
    const kv_run run = {.budget = 15, .sinks = 2, .window = 5, .eps = 1e-8};
    const kv_policy_input input = {.span = s, .run = &run, .ops = &kv_ops_cpu};
    float r[2 * (S + 3)], priority[S];
    for (size_t a = 0; a < 3; a++)
        for (int mean = 0; mean < 2; mean++) {
            float dense[2 * (S + 3)];
            target(s, &run, powers[a], mean, dense);
            memcpy(r, dense, sizeof r);
            cr_assert_eq(kv_target_sparse(&input, powers[a], mean, log_gamma, r), KV_OK, "%s",
                         kv_error_message());
            for (int32_t h = 0; h < 2; h++) {
                for (int32_t t = 0; t < S; t++)
                    priority[t] = (float)((double)dense[h * s->stride + t] - t * log_gamma[h]);
                for (int32_t t = run.sinks; t < S - run.window; t++) {
                    double reduced = 0;
                    for (int32_t g = 0; g < G; g++) {
                        double m = 0;
                        for (int32_t u = t + run.window; u < S; u++) {
                            double sum = 0, at_t = 0;
                            for (int32_t x = 0; x <= u; x++) {
                                double l = 0;
                                for (int32_t i = 0; i < s->head_dim; i++)
                                    l += (double)s->q[((h * G + g) * s->stride + u) * 8 + i] *
                                         (double)s->k[(h * s->stride + x) * 8 + i];
                                const double e = exp(l * (double)s->scale);
                                if (kept(priority, &run, u, x)) sum += e;
                                if (x == t) at_t = e;
                            }
                            const double p = at_t / sum;
                            m = isinf(powers[a]) ? fmax(m, p) : m + pow(p, powers[a]);
                        }
                        if (!isinf(powers[a])) m /= S - t - run.window;
                        reduced = mean ? reduced + m / G : fmax(reduced, m);
                    }
                    const double want = log(1e-8 + reduced), got = r[h * s->stride + t];
                    cr_assert_float_eq(got, want, 1e-5, "power %g mean %d head %d r[%d] = %g, %g",
                                       powers[a], mean, h, t, got, want);
                }
            }
        }
    naive_case_free(&c);
}
