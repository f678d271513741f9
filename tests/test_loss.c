/* Boundary loss: golden vector maths.md 12.3, values and gradients against the literal form, samples, edge sizes; AdamW. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference/adamw.h"
#include "reference/core/rand.h"
#include "reference/loss_boundary.h"
#include "reference/scorer_net.h"
#include "tests/naive/naive_loss.h"

enum { GOLDEN_S = 24 };

/* r of maths.md 12.2 in double: max over two query heads of log(eps + mean future mass). */
static void golden_target(double *r) {
    double q[2][GOLDEN_S][4], k[GOLDEN_S][4];
    for (int t = 0; t < GOLDEN_S; t++)
        for (int j = 0; j < 4; j++) {
            k[t][j] = 1.5 * sin(.7 * t + 1.1 * j);
            for (int g = 0; g < 2; g++) q[g][t][j] = 1.5 * cos(.5 * t + .8 * j + 1.7 * g);
        }
    for (int t = 0; t < GOLDEN_S; t++) {
        double best = 0;
        for (int g = 0; g < 2; g++) {
            double mass = 0;
            for (int u = t + 3; u < GOLDEN_S; u++) {
                double sum = 0, own = 0;
                for (int x = 0; x <= u; x++) {
                    double l = 0;
                    for (int j = 0; j < 4; j++) l += q[g][u][j] * k[x][j] / 2;
                    sum += exp(l);
                    if (x == t) own = exp(l);
                }
                mass += own / sum;
            }
            best = fmax(best, mass / fmax(1, GOLDEN_S - t - 3));
        }
        r[t] = log(1e-8 + best);
    }
}

Test(loss, golden_vector) {
    double r[GOLDEN_S], rhat[GOLDEN_S], d_rhat[GOLDEN_S], slope;
    float r32[GOLDEN_S];
    int32_t query[GOLDEN_S];
    kv_pair pair[GOLDEN_S];
    naive_loss_count count;
    const kv_run run = {.budget = 11, .sinks = 2, .window = 3};
    const kv_loss_options o = {.margin = .5, .temp = .7, .balance = true};
    double lg = kv_net_log_gamma(.4, &slope);
    golden_target(r);
    cr_assert_float_eq(r[2], -2.2868812029, 1e-9, "r[2] = %.10f", r[2]);
    for (int t = 0; t < GOLDEN_S; t++) {
        rhat[t] = r[t] + .9 * sin(1.9 * t);
        r32[t] = (float)r[t];
    }
    int32_t n = kv_boundary_queries(GOLDEN_S, &run, &o, 0, 0, 0, query);
    cr_assert_eq(n, 13);
    cr_expect(query[0] == 11 && query[12] == 23);
    double naive = naive_boundary_loss(r, rhat, GOLDEN_S, &run, lg, lg, &o, query, n, &count);
    cr_expect_float_eq(naive, 0.4192348512, 1e-10, "naive L = %.12f", naive);
    cr_expect(count.keep + count.same == 7 && count.drop == 6 && count.same == 1,
              "%d keep, %d drop, %d degenerate", count.keep, count.drop, count.same);
    cr_assert_eq(kv_boundary_pairs(r32, GOLDEN_S, &run, lg, query, n, 0, pair), KV_OK);
    kv_loss got = kv_boundary_loss(pair, n, &o, rhat, GOLDEN_S, lg, d_rhat);
    /* the target is stored in fp32 */
    cr_expect_float_eq(got.loss, 0.4192348512, 1e-7, "L = %.12f", got.loss);
    cr_expect_float_eq(got.log_gamma * slope, 2.7894e-4, 1e-8, "dL/dtheta = %.8g",
                       got.log_gamma * slope);
    cr_expect_eq(got.n, 12);
}

Test(loss, value_and_gradients_follow_the_definition) {
    enum { N = 60 };
    for (uint32_t c = 0; c < 60; c++) {
        char name[128];
        kv_rng rng = kv_rng_make(11, c);
        int32_t n = 20 + (int32_t)kv_rng_below(&rng, 41);
        kv_run run = {.sinks = (int32_t)kv_rng_below(&rng, 3),
                      .window = 1 + (int32_t)kv_rng_below(&rng, 4)};
        run.budget = run.sinks + run.window + 1 + (int32_t)kv_rng_below(&rng, 8);
        kv_loss_options o = {.margin = c % 3 ? .5 : 0,
                             .temp = c % 2 ? 1 : .6,
                             .balance = c % 5,
                             .sample = c % 4 == 3 ? 7 : 0,
                             .tail = (int32_t)(c % 2) * 4};
        snprintf(name, sizeof name, "case %u: n %d, s %d, w %d, B %d, margin %g, balance %d", c, n,
                 run.sinks, run.window, run.budget, o.margin, o.balance);
        double r[N], rhat[N], moved[N], d_rhat[N];
        float r32[N];
        int32_t query[N];
        kv_pair pair[N];
        /* few levels in every third case: ties decide by age and position */
        for (int32_t t = 0; t < n; t++) {
            double x = kv_rand_normal(12, c, (uint32_t)t, 0, 0);
            r[t] = r32[t] = (float)(c % 3 == 0 ? floor(x) : x);
            rhat[t] = kv_rand_normal(12, c, (uint32_t)t, 1, 0);
        }
        /* a decay that fp32 priorities resolve exactly against these levels */
        double teacher = c % 3 == 0 ? -0x1p-10 : log1p(-1e-3), student = log1p(-4e-4);
        int32_t nq = kv_boundary_queries(n, &run, &o, 3, (int32_t)c, 0, query);
        cr_assert_eq(kv_boundary_pairs(r32, n, &run, teacher, query, nq, 0, pair), KV_OK);
        kv_loss got = kv_boundary_loss(pair, nq, &o, rhat, n, student, d_rhat);
        double want = naive_boundary_loss(r, rhat, n, &run, teacher, student, &o, query, nq, NULL);
        cr_assert_float_eq(got.loss, want, 1e-12, "%s: %.15g, want %.15g", name, got.loss, want);
        double off = 0, size = 0, h = 1e-5;
        for (int32_t t = 0; t <= n; t++) { /* the last one is the decay */
            double loss[4];
            const double step[4] = {h, -h, 2 * h, -2 * h};
            for (int k = 0; k < 4; k++) {
                memcpy(moved, rhat, sizeof moved);
                if (t < n) moved[t] += step[k];
                loss[k] = naive_boundary_loss(r, moved, n, &run, teacher,
                                              student + (t == n ? step[k] / 100 : 0), &o, query, nq,
                                              NULL);
            }
            double fd = (8 * (loss[0] - loss[1]) - (loss[2] - loss[3])) / (12 * h);
            double ours = t < n ? d_rhat[t] : got.log_gamma / 100;
            off += (fd - ours) * (fd - ours);
            size += fd * fd;
        }
        cr_expect_leq(sqrt(off), 1e-6 * sqrt(size) + 1e-10, "%s: gradient off by %g of %g", name,
                      sqrt(off), sqrt(size));
    }
}

Test(loss, samples_and_edges) {
    enum { N = 300 };
    int32_t query[N], again[N];
    kv_run run = {.budget = 20, .sinks = 4, .window = 8};
    kv_loss_options o = kv_loss_defaults;
    cr_expect_eq(kv_boundary_queries(84, &run, &o, 1, 0, 0, query), 0, "no query is old enough");
    cr_expect_eq(kv_boundary_queries(85, &run, &o, 1, 0, 0, query), 1);
    cr_expect_eq(query[0], 20);
    o.sample = 10;
    cr_expect_eq(kv_boundary_queries(N, &run, &o, 1, 5, 2, query), 10);
    for (int i = 0; i < 10; i++) {
        double low = 20 + i * 21.6, high = low + 21.6; /* 216 positions in 10 bins */
        cr_expect(query[i] >= floor(low) && query[i] <= high, "draw %d is %d, bin [%g, %g)", i,
                  query[i], low, high);
    }
    kv_boundary_queries(N, &run, &o, 1, 5, 2, again);
    cr_expect_eq(memcmp(query, again, 10 * sizeof *query), 0, "the same address, other draws");
    kv_boundary_queries(N, &run, &o, 1, 6, 2, again);
    cr_expect_neq(memcmp(query, again, 10 * sizeof *query), 0, "another step, the same draws");
    /* all targets equal: incumbents stay, every newcomer is dropped; one class only, margins from age alone */
    float r[N] = {0};
    double rhat[N] = {0}, d[N];
    kv_pair pair[N];
    o.sample = 0;
    int32_t n = kv_boundary_queries(N, &run, &o, 1, 0, 0, query);
    cr_assert_eq(kv_boundary_pairs(r, N, &run, 0, query, n, 1000, pair), KV_OK);
    for (int32_t i = 0; i < n; i++)
        cr_expect(!pair[i].keep && pair[i].fresh == query[i] - 8 + 1000 && pair[i].margin == 0);
    for (int32_t i = 0; i < n; i++) {
        pair[i].fresh -= 1000;
        pair[i].bound -= 1000;
    }
    kv_loss none = kv_boundary_loss(pair, n, &o, rhat, N, 0, d);
    cr_expect(none.loss == 0 && none.n == 0 && d[50] == 0, "weightless pairs give a loss");
    r[100] = NAN;
    cr_expect_eq(kv_boundary_pairs(r, N, &run, 0, query, n, 0, pair), KV_E_DATA);
}

/* Against the update rule written out for one parameter, 5 steps; fp32 storage of parameter and moments rounds to 6e-8. */
Test(loss, adamw_follows_its_definition) {
    const kv_adamw o = {.rate = .01, .beta1 = .9, .beta2 = .95, .eps = 1e-8, .weight_decay = .1};
    float p = .7f, m32 = 0, v32 = 0;
    double q = .7f, m = 0, v = 0;
    for (int step = 1; step <= 5; step++) {
        float g = (float)cos(step);
        kv_adamw_step(&o, step, 1, &g, .5, &p, &m32, &v32);
        m = .9 * m + .1 * (.5 * g);
        v = .95 * v + .05 * (.5 * g) * (.5 * g);
        q = q - .01 * .1 * q -
            .01 * (m / (1 - pow(.9, step))) / (sqrt(v / (1 - pow(.95, step))) + 1e-8);
        cr_expect_float_eq(p, q, 3e-7, "step %d: %.9g, want %.9g", step, (double)p, q);
    }
    cr_expect_float_eq(kv_rate_factor(0, 200, 20), .05, 1e-12);
    cr_expect_float_eq(kv_rate_factor(100, 200, 20), .51, 1e-12);
    cr_expect_lt(kv_rate_factor(199, 200, 20), .0201);
    cr_expect_float_eq(kv_clip_factor(4, 1), .25, 0);
    cr_expect_float_eq(kv_clip_factor(.5, 1), 1, 0);
    cr_expect_float_eq(kv_clip_factor(4, 0), 1, 0);
    /* dtheta of log gamma, and its bounds */
    double slope, h = 1e-4;
    for (double theta = -12; theta <= 12; theta += .75) {
        double lg = kv_net_log_gamma(theta, &slope);
        double fd =
            (kv_net_log_gamma(theta + h, NULL) - kv_net_log_gamma(theta - h, NULL)) / (2 * h);
        cr_expect_float_eq(slope, fd, 1e-7 * slope + 1e-15, "theta %g", theta);
        cr_expect(lg >= log1p(-1e-3) && lg <= log1p(-1e-6), "theta %g: log gamma %g", theta, lg);
    }
}
