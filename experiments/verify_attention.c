/* `kvlab verify`: dense sweep and dense attention, over the table of verify_problem.h. */
#include <math.h>
#include <string.h>

#include "experiments/verify_problem.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"

static double product(const kv_verify_attention_shape *s, const kv_verify_problem *p, int32_t h,
                      int32_t u, int32_t t) {
    const size_t d = (size_t)s->d, stride = (size_t)p->span.stride;
    const float *q = p->q + ((size_t)h * stride + (size_t)u) * d;
    const float *k = p->k + ((size_t)(h / (s->n_q / s->n_kv)) * stride + (size_t)t) * d;
    double sum = 0;
    for (size_t c = 0; c < d; c++) sum += (double)q[c] * (double)k[c];
    return sum;
}

/* Smallest key of the largest product over E(u), -1 if E(u) is empty. */
static int32_t exact_top(const kv_verify_attention_shape *s, const kv_verify_problem *p, int32_t h,
                         int32_t u) {
    int32_t at = -1;
    double best = -INFINITY;
    for (int32_t t = s->sinks; t <= u - s->window; t++) {
        const double x = product(s, p, h, u, t);
        if (x > best) best = x, at = t;
    }
    return at;
}

/* Keys of the largest long-range probability. Exact values: the smallest of the equal ones (the CPU, whose queries carry a rounded
 * factor, cannot tell equal logits of different keys apart, so the truth is formed here). Other values: another key than the
 * CPU's is a near tie when its logit is as large within the error. */
static void compare_top(kv_verify *v, const kv_verify_attention_shape *s,
                        const kv_verify_problem *p, const kv_dense *got, const kv_dense *want) {
    int64_t near = 0, wrong = 0;
    const double error = kv_verify_probability_error(p->logit);
    const bool exact =
        s->values == KV_VALUES_GRID || s->values == KV_VALUES_TIES || s->values == KV_VALUES_ZEROS;
    for (int32_t h = 0; h < s->n_q; h++)
        for (int32_t u = 0; u < s->n; u++) {
            const size_t at = (size_t)h * (size_t)got->stride + (size_t)u;
            const int32_t a = got->top_t[at], b = exact ? exact_top(s, p, h, u) : want->top_t[at];
            if (a == b) continue;
            const bool valid = a >= s->sinks && a <= u - s->window && b >= 0;
            const double gap =
                valid ? (product(s, p, h, u, b) - product(s, p, h, u, a)) * (double)p->span.scale
                      : INFINITY;
            /* Below 2^-126 both are 0 on one side or the other. */
            const bool tie = valid && (fabs(gap) <= error || want->top_p[at] < 0x1p-120f);
            near += !exact && tie;
            wrong += exact || !tie;
        }
    kv_verify_decisions(v, "top_t", (int64_t)s->n_q * s->n, near, wrong);
}

static void compare_dense(kv_verify *v, const kv_verify_attention_shape *s,
                          const kv_verify_problem *p, const kv_dense *got, const kv_dense *want) {
    const kv_verify_shape rows = {s->n_q, s->n, got->stride};
    const kv_verify_shape outputs = {s->n_q, s->n * s->d, got->stride * s->d};
    const double error = kv_verify_probability_error(p->logit);
    kv_verify_f32(v, "lse", rows, got->lse, want->lse, 0, error);
    for (int32_t i = 0; i < got->request.n_power; i++) {
        const double power = got->request.power[i], factor = isinf(power) ? 1 : fmax(1, power);
        /* Terms below 2^-126 vanish in fp32; their sum is below this. */
        kv_verify_f64(v, "column", rows, got->column[i], want->column[i], factor * error,
                      s->n * 0x1p-124);
    }
    if (got->request.want_events) {
        kv_verify_f32(v, "long_mass", rows, got->long_mass, want->long_mass, error, 1e-30);
        kv_verify_f32(v, "top_p", rows, got->top_p, want->top_p, error, 0x1p-120);
        compare_top(v, s, p, got, want);
    }
    if (got->o)
        kv_verify_f32(v, "o", outputs, got->o, want->o, 0, (error + 2e-6) * (p->v_max + 1e-30));
}

static kv_status check_dense(kv_verify *v, const kv_verify_attention_shape *s,
                             const kv_verify_problem *p, const kv_dense_request *request) {
    kv_status st = KV_OK;
    kv_dense got = {0}, want = {0};
    KV_TRY(kv_dense_compute(&p->span, request, &want));
    KV_TRY(kv_verify_ops(v)->dense(&p->span, request, &got));
    compare_dense(v, s, p, &got, &want);
out:
    kv_dense_free(&got);
    kv_dense_free(&want);
    return st;
}

kv_status kv_verify_dense(kv_verify *v) {
    kv_status st = KV_OK;
    kv_verify_problem p = {0};
    kv_dense dense = {0};
    float *sparse = NULL;
    for (int i = 0; i < kv_verify_attention_count; i++) {
        const kv_verify_attention_shape *s = &kv_verify_attention_shapes[i];
        if (kv_verify_skips(v, s->n)) continue;
        KV_TRY(kv_verify_problem_make(s, &p));
        const kv_dense_request all = {.sinks = s->sinks,
                                      .window = s->window,
                                      .n_power = 5,
                                      .power = {1, 2, INFINITY, 0.5, 6},
                                      .want_output = true,
                                      .want_events = true};
        kv_verify_case(v, "%s", s->name);
        KV_TRY(check_dense(v, s, &p, &all));
        /* A normaliser below the row's own: probabilities above 1. */
        const size_t cells = (size_t)s->n_q * (size_t)p.span.stride;
        KV_NEW(sparse, cells);
        KV_TRY(kv_dense_compute(
            &p.span, &(kv_dense_request){.sinks = s->sinks, .window = s->window}, &dense));
        for (size_t c = 0; c < cells; c++)
            sparse[c] = dense.lse[c] - (float)(6 * kv_rand_uniform(3, (uint32_t)c, 0, 0, 0));
        kv_dense_free(&dense);
        const kv_dense_request only = {
            .sinks = s->sinks, .window = s->window, .n_power = 2, .power = {1, 2}, .lse = sparse};
        kv_verify_case(v, "%s, sparse normaliser", s->name);
        KV_TRY(check_dense(v, s, &p, &only));
        free(sparse);
        sparse = NULL;
        kv_verify_problem_free(&p);
        KV_TRY(kv_interrupt_poll());
    }
out:
    kv_dense_free(&dense);
    free(sparse);
    kv_verify_problem_free(&p);
    return st;
}

kv_status kv_verify_attend(kv_verify *v) {
    kv_status st = KV_OK;
    kv_verify_problem p = {0};
    float *got = NULL, *want = NULL, *lse = NULL, *lse_want = NULL;
    for (int i = 0; i < kv_verify_attention_count; i++) {
        const kv_verify_attention_shape *s = &kv_verify_attention_shapes[i];
        if (kv_verify_skips(v, s->n)) continue;
        KV_TRY(kv_verify_problem_make(s, &p));
        const size_t cells = (size_t)s->n_q * (size_t)p.span.stride;
        const double error = kv_verify_probability_error(p.logit);
        KV_NEW(got, cells * (size_t)s->d);
        KV_NEW(want, cells * (size_t)s->d);
        KV_NEW(lse, cells);
        KV_NEW(lse_want, cells);
        kv_verify_case(v, "%s", s->name);
        KV_TRY(kv_attend(&p.span, want, lse_want));
        KV_TRY(kv_verify_ops(v)->attend(&p.span, got, lse));
        kv_verify_f32(v, "lse", (kv_verify_shape){s->n_q, s->n, p.span.stride}, lse, lse_want, 0,
                      error);
        kv_verify_f32(v, "o", (kv_verify_shape){s->n_q, s->n * s->d, p.span.stride * s->d}, got,
                      want, 0, (error + 2e-6) * (p.v_max + 1e-30));
        free(got);
        free(want);
        free(lse);
        free(lse_want);
        got = want = lse = lse_want = NULL;
        kv_verify_problem_free(&p);
        KV_TRY(kv_interrupt_poll());
    }
out:
    free(got);
    free(want);
    free(lse);
    free(lse_want);
    kv_verify_problem_free(&p);
    return st;
}
