/* CPU attention against its definition: dense sweep, masked attention, re-rotation, dense output; every instruction set by KV_ISA. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference/attention.h"
#include "reference/core/cpu.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "tests/naive/naive_attention.h"
#include "tests/naive/naive_case.h"

typedef struct shape {
    int32_t n_token, pad, n_q_head, n_kv_head, head_dim, sinks, window;
    double spread, softcap;
} shape;

/* Sizes around the tiles (6 rows, 24 rows, 48 queries, 8 to 64 keys, 256 keys), odd head sizes, groups, strides, windows beyond the
 * text, no sinks, wide logits (spread 6: most probabilities underflow), soft cap. */
static const shape shapes[] = {
    {1, 0, 1, 1, 4, 0, 1, 1, 0},        {2, 3, 2, 1, 1, 1, 1, 1, 0},
    {7, 0, 3, 3, 5, 2, 3, 2, 0},        {24, 0, 4, 2, 4, 2, 3, 1, 0},
    {25, 7, 4, 1, 16, 0, 30, 1, 0},     {49, 1, 2, 2, 17, 4, 1, 1, 30},
    {63, 0, 2, 1, 64, 4, 8, 1, 0},      {257, 3, 4, 2, 64, 4, 32, 1, 0},
    {300, 0, 1, 1, 128, 300, 16, 1, 0}, {530, 5, 2, 1, 8, 3, 64, 6, 0},
    {515, 0, 2, 2, 80, 0, 100, 1.5, 5}, {600, 1, 3, 1, 64, 4, 600, 1, 0},
};
/* Small ones for re-rotation, whose definition turns every pair of vectors. */
static const shape turned_shapes[] = {
    {24, 0, 4, 2, 4, 2, 3, 1, 0},   {63, 1, 2, 1, 64, 4, 8, 1, 0},
    {70, 0, 3, 1, 18, 0, 8, 1, 20}, {280, 3, 2, 1, 6, 4, 16, 1.5, 0},
    {90, 0, 1, 1, 6, 4, 16, 12, 0},
};
enum {
    N_SHAPE = sizeof shapes / sizeof *shapes,
    N_TURNED = sizeof turned_shapes / sizeof *turned_shapes
};

static naive_case make(const shape *x, uint64_t seed) {
    naive_case c = naive_case_random(seed, x->n_token, x->n_token + x->pad, x->n_q_head,
                                     x->n_kv_head, x->head_dim, x->spread);
    c.span.softcap = (float)x->softcap;
    return c;
}

/* Error of an fp32 logit: each of head_dim terms and each packed q carries up to 2^-24 of its size, which for the random cases is
 * about spread^2 sqrt(head_dim) before the scale. The bound is generous by a factor of about 4. */
static double logit_error(const shape *x) {
    return 4 * 0x1p-24 * (4 + x->spread * x->spread * sqrt(x->head_dim)) +
           1e-6 * (x->softcap > 0 ? x->softcap : 0);
}

static void near(double found, double expected, double relative, double absolute, const char *what,
                 const shape *x, int32_t i, int32_t u) {
    if (isinf(expected) && found == expected) return;
    cr_assert(fabs(found - expected) <= relative * fabs(expected) + absolute,
              "%s: S=%d heads=%d/%d d=%d sinks=%d window=%d spread=%g: head %d at %d is %.9g, "
              "expected %.9g",
              what, x->n_token, x->n_q_head, x->n_kv_head, x->head_dim, x->sinks, x->window,
              x->spread, i, u, found, expected);
}

static void check_rows(const shape *x, const kv_span *s, const kv_dense *d, const naive_dense *n) {
    const double e = logit_error(x);
    for (int32_t i = 0; i < s->n_q_head; i++)
        for (int32_t u = 0; u < s->n_token; u++) {
            const int64_t at = i * s->stride + u;
            near((double)d->lse[at], n->lse[at], 2e-7, e, "lse", x, i, u);
            near((double)d->long_mass[at], n->long_mass[at], 3 * e, 1e-37, "long mass", x, i, u);
            near((double)d->top_p[at], n->top_p[at], 3 * e, 1e-37, "top p", x, i, u);
            if (d->top_t[at] != n->top_t[at]) { /* a near tie: the other key must be as large */
                cr_assert(d->top_t[at] >= x->sinks && d->top_t[at] <= u - x->window);
                near((double)d->top_p[at], n->top_p[at], 3 * e, 0, "top t", x, i, u);
            }
            for (int32_t c = 0; c < s->head_dim; c++)
                near((double)d->o[at * s->head_dim + c], n->o[at * s->head_dim + c], 0, 12 * e,
                     "output", x, i, u);
        }
}

static void check_columns(const shape *x, const kv_span *s, const kv_dense_request *r,
                          const kv_dense *d, const naive_dense *n) {
    for (int32_t a = 0; a < r->n_power; a++)
        for (int32_t i = 0; i < s->n_q_head; i++)
            for (int32_t t = 0; t < s->n_token; t++) {
                const double power = isinf(r->power[a]) ? 1 : r->power[a];
                char what[48];
                snprintf(what, sizeof what, "column of power %g%s", r->power[a],
                         r->lse ? ", sparse" : "");
                /* where p is close to 2^-126, or its power to 2^-1008, one side may count it and the other not */
                near(d->column[a][i * s->stride + t], n->column[a][i * s->stride + t],
                     3 * power * logit_error(x),
                     2 * x->n_token * fmax(pow(0x1p-126, power), 0x1p-1007), what, x, i, t);
            }
}

/* Fast path (powers 1, 2, max from exponentials), general path (others, from logits), and a normaliser under which p exceeds 1. */
static void check_dense(const shape *x, uint64_t seed) {
    static const kv_dense_request requests[] = {
        {.n_power = 3, .power = {1, 2, INFINITY}, .want_output = true, .want_events = true},
        {.n_power = 7,
         .power = {.5, 1, 1.5, 2, 4, 16, INFINITY},
         .want_output = true,
         .want_events = true},
        {.n_power = 4, .power = {1, 2, INFINITY, .5}, .want_output = true, .want_events = true},
    };
    naive_case c = make(x, seed);
    const int64_t cells = c.span.n_q_head * c.span.stride;
    float *lse = calloc((size_t)cells, sizeof *lse);
    for (int64_t at = 0; at < cells; at++)
        lse[at] = (float)(6 * kv_rand_normal(seed, (uint32_t)at, 0, 0, 9) - 3);
    for (size_t a = 0; a < sizeof requests / sizeof *requests; a++) {
        kv_dense_request r = requests[a];
        kv_dense d;
        naive_dense n;
        r.sinks = x->sinks;
        r.window = x->window;
        r.lse = a == 2 ? lse : NULL;
        cr_assert_eq(kv_dense_compute(&c.span, &r, &d), KV_OK, "%s", kv_error_message());
        naive_dense_compute(&c.span, &r, &n);
        check_rows(x, &c.span, &d, &n);
        check_columns(x, &c.span, &r, &d, &n);
        kv_dense_free(&d);
        naive_dense_free(&n);
    }
    free(lse);
    naive_case_free(&c);
}

/* Lifetimes: everything stays; random; each token sees itself only; nobody sees anything; StreamingLLM. */
enum { LIVES = 5 };
static void fill_lives(const kv_span *s, const shape *x, int which, uint64_t seed,
                       int32_t *evict_at) {
    for (int32_t h = 0; h < s->n_kv_head; h++)
        for (int32_t t = 0; t < s->n_token; t++) {
            const double roll = kv_rand_uniform(seed, (uint32_t)h, (uint32_t)t, 7, 7);
            const int32_t stay = 1 + s->n_token / 8;
            const int32_t value[LIVES] = {
                KV_NEVER, roll < .2 ? KV_NEVER : t + 1 + (int32_t)(roll * roll * s->n_token), t + 1,
                t, t < x->sinks ? KV_NEVER : t + stay};
            evict_at[h * s->stride + t] = value[which];
        }
}

static void check_masked(const shape *x, uint64_t seed, bool rerotate) {
    naive_case c = make(x, seed);
    kv_span *s = &c.span;
    double inv_freq[64];
    int32_t *position = calloc((size_t)s->n_token, sizeof *position);
    int32_t *evict_at = calloc((size_t)(s->n_kv_head * s->stride), sizeof *evict_at);
    float *o = calloc((size_t)(s->n_q_head * s->stride * s->head_dim), sizeof *o);
    for (int32_t j = 0; j < s->head_dim / 2; j++) inv_freq[j] = pow(1e4, -2.0 * j / s->head_dim);
    for (int32_t t = 0; t < s->n_token; t++) position[t] = 1000 + t + t / 50 * 3;
    s->inv_freq = inv_freq;
    for (int which = 0; which < LIVES * (rerotate ? 2 : 1); which++) {
        const double e = logit_error(x);
        kv_masked m;
        naive_masked n;
        fill_lives(s, x, which % LIVES, seed, evict_at);
        s->position = which >= LIVES ? position : NULL;
        const kv_masked_request r = {evict_at, x->sinks, x->window,           rerotate,
                                     true,     true,     which % 2 ? o : NULL};
        cr_assert_eq(kv_masked_compute(s, &r, &m), KV_OK, "%s", kv_error_message());
        cr_assert_eq(m.o == NULL, which % 2, "a new array, or the caller's");
        const float *found = which % 2 ? o : m.o;
        naive_masked_compute(s, &r, &n);
        for (int32_t i = 0; i < s->n_q_head; i++)
            for (int32_t u = 0; u < s->n_token; u++) {
                const int64_t at = i * s->stride + u;
                near((double)m.lse[at], n.lse[at], 2e-7, e, "masked lse", x, i, u);
                /* what lies 2^-126 below the largest logit may be dropped */
                if (n.lse_long[at] > n.lse_orig[at] - 80)
                    near((double)m.lse_long[at], n.lse_long[at], 2e-7, e, "lse long", x, i, u);
                if (rerotate)
                    near((double)m.lse_orig[at], n.lse_orig[at], 2e-7, e, "lse orig", x, i, u);
                for (int32_t j = 0; j < s->head_dim; j++)
                    near((double)found[at * s->head_dim + j], n.o[at * s->head_dim + j], 0, 12 * e,
                         "masked output", x, i, u);
            }
        cr_assert_eq(m.lse_orig != NULL, rerotate);
        kv_masked_free(&m);
        naive_masked_free(&n);
    }
    free(position);
    free(evict_at);
    free(o);
    naive_case_free(&c);
}

static void check_attend(const shape *x, uint64_t seed) {
    naive_case c = make(x, seed);
    const int64_t cells = c.span.n_q_head * c.span.stride;
    float *o = calloc((size_t)(cells * c.span.head_dim), sizeof *o),
          *lse = calloc((size_t)cells, sizeof *lse);
    naive_dense n;
    const kv_dense_request r = {.window = 1};
    cr_assert_eq(kv_attend(&c.span, o, lse), KV_OK, "%s", kv_error_message());
    naive_dense_compute(&c.span, &r, &n);
    for (int32_t i = 0; i < c.span.n_q_head; i++)
        for (int32_t u = 0; u < c.span.n_token; u++) {
            const int64_t at = i * c.span.stride + u;
            near((double)lse[at], n.lse[at], 2e-7, logit_error(x), "attend lse", x, i, u);
            for (int32_t j = 0; j < c.span.head_dim; j++)
                near((double)o[at * c.span.head_dim + j], n.o[at * c.span.head_dim + j], 0,
                     12 * logit_error(x), "attend output", x, i, u);
        }
    cr_assert_eq(kv_attend(&c.span, o, NULL), KV_OK);
    free(o);
    free(lse);
    naive_dense_free(&n);
    naive_case_free(&c);
}

/* Integer queries and keys: many different keys have exactly equal logits, and the smallest t must be named. */
static void check_ties(int32_t head_dim, float softcap) {
    enum { S = 400, SINKS = 3, WINDOW = 16 };
    naive_case c = naive_case_random(7, S, S, 2, 1, head_dim, 1);
    const kv_dense_request r = {.sinks = SINKS,
                                .window = WINDOW,
                                .n_power = 1,
                                .power = {1},
                                .want_output = true,
                                .want_events = true};
    kv_rng rng = kv_rng_make((uint64_t)head_dim, 0);
    kv_dense d;
    naive_dense n;
    int32_t tied = 0;
    for (int32_t i = 0; i < 2 * S * head_dim; i++) c.q[i] = (float)kv_rng_below(&rng, 7) - 3;
    for (int32_t i = 0; i < S * head_dim; i++) c.k[i] = (float)kv_rng_below(&rng, 3) - 1;
    c.span.softcap = softcap;
    cr_assert_eq(kv_dense_compute(&c.span, &r, &d), KV_OK);
    naive_dense_compute(&c.span, &r, &n);
    for (int32_t at = 0; at < 2 * S; at++) {
        const int32_t u = at % S;
        cr_assert_eq(d.top_t[at], n.top_t[at], "d %d, cap %g, head %d, query %d: %d, expected %d",
                     head_dim, (double)softcap, at / S, u, d.top_t[at], n.top_t[at]);
        for (int32_t t = n.top_t[at] + 1; n.top_t[at] >= 0 && t <= u - WINDOW; t++) {
            int32_t difference = 0;
            for (int32_t j = 0; j < head_dim; j++)
                difference += (int32_t)(c.q[at * head_dim + j] *
                                        (c.k[t * head_dim + j] - c.k[n.top_t[at] * head_dim + j]));
            tied += difference == 0;
        }
    }
    cr_assert_gt(tied, 50, "only %d ties: the test shows nothing", tied);
    kv_dense_free(&d);
    naive_dense_free(&n);
    naive_case_free(&c);
}

/* The choice of the instruction set is made once per process, and every test is a process. */
static void check_all(const char *isa, kv_isa wanted) {
    setenv("KV_ISA", isa, 1);
    if (kv_cpu_isa() != wanted) return; /* this processor lacks it */
    kv_threads_set(1); /* many small calls: threads would only wait for each other */
    for (int a = 0; a < N_SHAPE; a++) {
        check_dense(&shapes[a], 1 + (uint64_t)a);
        check_masked(&shapes[a], 100 + (uint64_t)a, false);
        check_attend(&shapes[a], 300 + (uint64_t)a);
    }
    static const int32_t sizes[] = {5, 8, 64, 80, 96, 128};
    for (size_t a = 0; a < sizeof sizes / sizeof *sizes; a++) {
        check_ties(sizes[a], 0);
        check_ties(sizes[a], 30);
    }
    for (int a = 0; a < N_TURNED; a++) check_masked(&turned_shapes[a], 200 + (uint64_t)a, true);
}
Test(attention, generic_matches_definition) { check_all("generic", KV_ISA_GENERIC); }
Test(attention, avx2_matches_definition) { check_all("avx2", KV_ISA_AVX2); }
Test(attention, avx512_matches_definition) { check_all("avx512", KV_ISA_AVX512); }

/* A text of many chunks and slabs, long enough for the narrow panels: some queries and some keys by definition. */
Test(attention, long_text_agrees_at_sampled_queries_and_keys) {
    enum { S = 8500, D = 8, SINKS = 4, WINDOW = 300 };
    naive_case c = naive_case_random(4, S, S, 1, 1, D, 1.5);
    const shape x = {S, 0, 1, 1, D, SINKS, WINDOW, 1.5, 0};
    const double e = logit_error(&x), scale = (double)c.span.scale;
    const kv_dense_request r = {.sinks = SINKS,
                                .window = WINDOW,
                                .n_power = 3,
                                .power = {1, 2, INFINITY},
                                .want_events = true};
    kv_dense d;
    double *l = calloc(S, sizeof *l);
    cr_assert_eq(kv_dense_compute(&c.span, &r, &d), KV_OK);
    for (int32_t u = S - 1; u > 0; u -= 613) {
        double max = -INFINITY, sum = 0, far = 0;
        for (int32_t t = 0; t <= u; t++) {
            l[t] = 0;
            for (int32_t j = 0; j < D; j++)
                l[t] += scale * (double)c.q[u * D + j] * (double)c.k[t * D + j];
            max = fmax(max, l[t]);
        }
        for (int32_t t = 0; t <= u; t++) sum += exp(l[t] - max);
        for (int32_t t = SINKS; t <= u - WINDOW; t++) far += exp(l[t] - max) / sum;
        near((double)d.lse[u], max + log(sum), 2e-7, e, "long lse", &x, 0, u);
        near((double)d.long_mass[u], far, 3 * e, 0, "long mass", &x, 0, u);
    }
    for (int32_t t = 0; t < S - WINDOW; t += 389) {
        double column[3] = {0};
        for (int32_t u = t + WINDOW; u < S; u++) {
            double p = 0;
            for (int32_t j = 0; j < D; j++)
                p += scale * (double)c.q[u * D + j] * (double)c.k[t * D + j];
            p = exp(p - (double)d.lse[u]);
            column[0] += p;
            column[1] += p * p;
            column[2] = fmax(column[2], p);
        }
        for (int a = 0; a < 3; a++)
            near(d.column[a][t], column[a], 6 * e, 0, "long column", &x, 0, t);
    }
    free(l);
    kv_dense_free(&d);
    naive_case_free(&c);
}

static bool same(const void *a, const void *b, int64_t n, size_t size) {
    return memcmp(a, b, (size_t)n * size) == 0;
}

Test(attention, results_do_not_depend_on_the_number_of_threads) {
    const shape x = {700, 4, 4, 2, 64, 4, 32, 1, 0};
    naive_case c = make(&x, 5);
    const int64_t cells = c.span.n_q_head * c.span.stride;
    int32_t *evict_at = calloc((size_t)cells, sizeof *evict_at);
    fill_lives(&c.span, &x, 1, 5, evict_at);
    const kv_dense_request r = {.sinks = 4,
                                .window = 32,
                                .n_power = 3,
                                .power = {1, 2, INFINITY},
                                .want_output = true,
                                .want_events = true};
    const kv_masked_request mr = {evict_at, 4, 32, false, true, true, NULL};
    kv_dense d[3];
    kv_masked m[3];
    for (int i = 0; i < 3; i++) {
        kv_threads_set(i + 1);
        cr_assert_eq(kv_dense_compute(&c.span, &r, &d[i]), KV_OK);
        cr_assert_eq(kv_masked_compute(&c.span, &mr, &m[i]), KV_OK);
        for (int a = 0; a < r.n_power; a++)
            cr_assert(same(d[0].column[a], d[i].column[a], cells, sizeof(double)),
                      "power %g, %d threads", r.power[a], i + 1);
        cr_assert(same(d[0].o, d[i].o, cells * 64, sizeof(float)), "%d threads", i + 1);
        cr_assert(same(d[0].long_mass, d[i].long_mass, cells, sizeof(float)), "%d threads", i + 1);
        cr_assert(same(m[0].o, m[i].o, cells * 64, sizeof(float)), "%d threads", i + 1);
        cr_assert(same(m[0].lse_long, m[i].lse_long, cells, sizeof(float)), "%d threads", i + 1);
    }
    for (int i = 0; i < 3; i++) {
        kv_dense_free(&d[i]);
        kv_masked_free(&m[i]);
    }
    free(evict_at);
    naive_case_free(&c);
}

/* Logits of +-10^4: one key takes all, the rest counts exactly 0. */
Test(attention, huge_logits_give_one_or_nothing) {
    const shape x = {300, 0, 1, 1, 8, 2, 4, 60, 0};
    naive_case c = make(&x, 8);
    const kv_dense_request r = {
        .sinks = 2, .window = 4, .n_power = 2, .power = {1, 4}, .want_events = true};
    kv_dense d;
    naive_dense n;
    cr_assert_eq(kv_dense_compute(&c.span, &r, &d), KV_OK);
    naive_dense_compute(&c.span, &r, &n);
    for (int32_t u = 0; u < 300; u++) {
        near((double)d.lse[u], n.lse[u], 1e-6, logit_error(&x), "huge lse", &x, 0, u);
        cr_assert(isfinite(d.long_mass[u]) && isfinite(d.column[0][u]) && isfinite(d.column[1][u]));
        if (n.top_p[u] != 0) continue;
        cr_assert_eq(d.top_p[u], 0.0f, "query %d", u);
        cr_assert_eq(d.long_mass[u], 0.0f, "query %d", u);
        cr_assert_eq(d.top_t[u], u - 4 >= 2 ? 2 : -1, "query %d: all equal, the smallest t", u);
    }
    kv_dense_free(&d);
    naive_dense_free(&n);
    naive_case_free(&c);
}

/* Equal keys have equal probabilities to the bit: two keys share the mass, .5 each, and the smaller t is named. */
Test(attention, ties_name_the_smallest_key_and_halves_are_exact) {
    naive_case c = naive_case_random(3, 400, 400, 1, 1, 16, 0);
    for (int32_t j = 0; j < 16; j++) {
        c.k[100 * 16 + j] = c.k[290 * 16 + j] = 10;
        for (int32_t u = 0; u < 400; u++) c.q[u * 16 + j] = 10;
    }
    const kv_dense_request r = {.sinks = 4, .window = 8, .want_events = true};
    kv_dense d;
    cr_assert_eq(kv_dense_compute(&c.span, &r, &d), KV_OK);
    for (int32_t u = 12; u < 400; u++) {
        cr_assert_eq(d.top_t[u], u < 108 ? 4 : 100, "query %d names %d", u, d.top_t[u]);
        if (u >= 290) cr_assert_eq(d.top_p[u], .5f, "query %d: %.9g", u, (double)d.top_p[u]);
    }
    kv_dense_free(&d);
    naive_case_free(&c);
}

Test(attention, wrong_requests_are_refused_with_a_reason) {
    naive_case c = naive_case_random(3, 10, 10, 2, 1, 5, 1);
    kv_dense d;
    kv_masked m;
    float lse[20];
    int32_t evict_at[10];
    for (int i = 0; i < 20; i++) lse[i] = -1e4f;
    cr_assert_eq(kv_dense_compute(&c.span, &(kv_dense_request){.window = 0}, &d), KV_E_USAGE);
    cr_assert_eq(kv_dense_compute(&c.span, &(kv_dense_request){.window = 1, .n_power = 1}, &d),
                 KV_E_USAGE);
    cr_assert_eq(kv_dense_compute(&c.span, &(kv_dense_request){.window = 1, .n_power = 9}, &d),
                 KV_E_INTERNAL);
    /* p = e^10000 has no value in double: an error, never a silent infinity */
    const kv_dense_request sparse = {.window = 1, .n_power = 1, .power = {1}, .lse = lse};
    cr_assert_eq(kv_dense_compute(&c.span, &sparse, &d), KV_E_DATA);
    cr_assert(strstr(kv_error_message(), "range of double"), "%s", kv_error_message());
    for (int i = 0; i < 20; i++) lse[i] = -600;
    cr_assert_eq(kv_dense_compute(&c.span, &sparse, &d), KV_OK);
    cr_assert(d.column[0][0] > 1e250);
    kv_dense_free(&d);
    const kv_masked_request turned = {evict_at, 0, 1, true, true, true, NULL};
    cr_assert_eq(kv_masked_compute(&c.span, &turned, &m), KV_E_DATA);
    c.span.n_q_head = 3;
    c.span.n_kv_head = 2;
    cr_assert_eq(kv_attend(&c.span, lse, NULL), KV_E_INTERNAL);
    naive_case_free(&c);
}
