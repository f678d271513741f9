/* Bounds on retained mass: the assignment behind oracle_exact, golden values of maths.md 12.8, their order (contract.md 2). */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

#include "reference/assignment.h"
#include "reference/core/cpu.h"
#include "reference/core/rand.h"
#include "tests/naive/naive_select.h"
#include "tests/replay_bench.h"

static void one_thread(void) { kv_threads_set(1); } /* the cases are tiny */
TestSuite(bounds, .init = one_thread);

/* Bounds of maths.md 12.8 (per KV head, group mean): step and exact. */
Test(bounds, golden_bounds) {
    enum { N = 24 };
    const double step[2] = {.8387646874, .8369312233};
    const double exact[4] = {.8025683671, .7636566962, .7703930874, .7978302058};
    const kv_run run = {.budget = 11, .sinks = 2, .window = 3, .eps = 1e-8};
    naive_case c = naive_case_golden();
    double mass[N * N];
    int32_t got[2 * N];
    replay_case(&kv_policy_oracle_exact, NULL, &c, &run, got);
    for (int h = 0; h < 2; h++) {
        naive_group_mass(&c.span, h, mass);
        double bound = naive_step_bound(mass, N, &run);
        double kept = naive_retained(mass, N, run.budget, got + h * N);
        double want = (exact[2 * h] + exact[2 * h + 1]) / 2; /* per query head there */
        cr_expect(fabs(bound - step[h]) < 1e-7, "step bound of head %d: %.10f", h, bound);
        cr_expect(fabs(kept - want) < 1e-7, "exact oracle of head %d: %.10f", h, kept);
    }
    naive_case_free(&c);
}

Test(bounds, assignment_equals_exhaustive_search) {
    for (uint32_t i = 0; i < 600; i++) {
        kv_rng r = kv_rng_make(21, i);
        int32_t n_row = 1 + (int32_t)kv_rng_below(&r, 6);
        int32_t n_column = n_row + (int32_t)kv_rng_below(&r, 3), column_of[6];
        double cost[6 * 8], total = 0;
        for (int32_t j = 0; j < n_row * n_column; j++) {
            bool allowed = i % 2 || j % n_column <= j / n_column + n_column - n_row;
            cost[j] = !allowed ? INFINITY
                      : i % 3  ? kv_rng_uniform(&r)
                               : (double)kv_rng_below(&r, 3);
        }
        cr_assert_eq(kv_assign(cost, n_row, n_column, column_of), KV_OK, "case %u: %s", i,
                     kv_error_message());
        uint32_t taken = 0;
        for (int32_t row = 0; row < n_row; row++) {
            cr_assert(!(taken >> column_of[row] & 1u), "case %u: column %d twice", i,
                      column_of[row]);
            taken |= 1u << column_of[row];
            total += cost[row * n_column + column_of[row]];
        }
        double want = naive_assign(cost, n_row, n_column);
        cr_assert(fabs(total - want) <= 1e-12, "case %u: %.15g, by exhaustive search %.15g", i,
                  total, want);
    }
    const double blocked[4] = {INFINITY, 1, INFINITY, 2};
    int32_t column_of[2];
    cr_assert_eq(kv_assign(blocked, 2, 2, column_of), KV_E_INTERNAL);
}

/* contract.md 2, per KV head with the group mean: step bound >= oracle_exact >= every priority policy. */
Test(bounds, bounds_are_ordered) {
    const setup priority[] = {
        {&kv_policy_random, NULL},  {&kv_policy_streaming, NULL}, {&kv_policy_knorm, NULL},
        {&kv_policy_keydiff, NULL}, {&kv_policy_oracle, NULL},    {&kv_policy_oracle, "power=max"},
    };
    for (uint32_t i = 0; i < 40; i++) {
        kv_rng r = kv_rng_make(17, i);
        int32_t n = 30 + (int32_t)kv_rng_below(&r, 40);
        kv_run run = {.sinks = (int32_t)kv_rng_below(&r, 4),
                      .window = 1 + (int32_t)kv_rng_below(&r, 6),
                      .eps = 1e-8,
                      .oracle_delta = 2e-5};
        run.budget = run.sinks + run.window + (int32_t)kv_rng_below(&r, 12);
        naive_case c = naive_case_random(i + 7, n, n, 4, 2, 4, 1.8);
        double *mass = malloc((size_t)(n * n) * sizeof *mass);
        int32_t *exact = malloc((size_t)(2 * n) * sizeof *exact),
                *other = malloc((size_t)(2 * n) * sizeof *other);
        replay_case(&kv_policy_oracle_exact, NULL, &c, &run, exact);
        for (int32_t h = 0; h < 2; h++) {
            naive_group_mass(&c.span, h, mass);
            double step = naive_step_bound(mass, n, &run),
                   best = naive_retained(mass, n, run.budget, exact + h * n);
            cr_assert(step >= best - 1e-12, "case %u head %d: step %.12f < exact %.12f", i, h, step,
                      best);
            for (size_t p = 0; p < sizeof priority / sizeof *priority; p++) {
                replay_case(priority[p].policy, priority[p].setting, &c, &run, other);
                double kept = naive_retained(mass, n, run.budget, other + h * n);
                cr_assert(best >= kept - 1e-12, "case %u head %d: exact %.12f < %s %.12f", i, h,
                          best, priority[p].policy->name, kept);
            }
            int32_t due = 0;
            for (int32_t t = 0; t < n; t++) {
                int32_t e = exact[h * n + t];
                due += e != KV_NEVER;
                cr_assert(e == KV_NEVER ||
                              (t >= run.sinks && e >= t + run.window && e >= run.budget),
                          "case %u: the exact oracle evicts %d at %d", i, t, e);
            }
            cr_assert_eq(due, n - run.budget, "case %u: %d evictions", i, due);
        }
        free(mass);
        free(exact);
        free(other);
        naive_case_free(&c);
    }
}
