/* Verification of oracle_step: the mass of the best keys of every query, over the table of verify_problem.h. */
#include <math.h>
#include <string.h>

#include "experiments/verify_problem.h"
#include "reference/core/mem.h"
#include "reference/metrics.h"

/* So long that the rows of all queries are not held at once. */
static const kv_verify_attention_shape long_shape = {"6000 in batches", 6000, 4, 4, 64, 4, 256, 1,
                                                     KV_VALUES_HALF,    0};

static kv_status check(kv_verify *v, const kv_verify_attention_shape *s, const kv_verify_problem *p,
                       const kv_dense *dense, int32_t k) {
    kv_status st = KV_OK;
    const size_t cells = (size_t)s->n_kv * (size_t)p->span.stride;
    const kv_run run = {.budget = s->sinks + s->window + k, .sinks = s->sinks, .window = s->window};
    double *got = NULL, *want = NULL;
    kv_verify_case(v, "%s, k %d", s->name, k);
    KV_NEW(got, cells);
    KV_NEW(want, cells);
    KV_TRY(kv_oracle_step_mass(&p->span, &run, dense, want));
    KV_TRY(kv_verify_ops(v)->step_mass(&p->span, &run, dense, got));
    kv_verify_f64(v, "mass", (kv_verify_shape){s->n_kv, s->n, p->span.stride}, got, want,
                  kv_verify_probability_error(p->logit), 1e-30);
out:
    free(got);
    free(want);
    return st;
}

static kv_status check_shape(kv_verify *v, const kv_verify_attention_shape *s) {
    kv_status st = KV_OK;
    kv_verify_problem p = {0};
    kv_dense dense = {0};
    const kv_dense_request request = {.sinks = s->sinks, .window = s->window};
    const int32_t rest = s->n - s->sinks - s->window,
                  k[] = {0, 1, rest / 9, rest / 2, rest - 1, rest};
    KV_TRY(kv_verify_problem_make(s, &p));
    KV_TRY(kv_dense_compute(&p.span, &request, &dense));
    for (size_t i = 0; i < sizeof k / sizeof *k; i++)
        if (k[i] >= 0) KV_TRY(check(v, s, &p, &dense, k[i]));
out:
    kv_verify_problem_free(&p);
    kv_dense_free(&dense);
    return st;
}

kv_status kv_verify_step(kv_verify *v) {
    kv_status st = KV_OK;
    for (int i = 0; i < kv_verify_attention_count; i++) {
        if (kv_verify_skips(v, kv_verify_attention_shapes[i].n)) continue;
        KV_TRY(check_shape(v, &kv_verify_attention_shapes[i]));
        KV_TRY(kv_interrupt_poll());
    }
    if (!kv_verify_skips(v, long_shape.n)) KV_TRY(check_shape(v, &long_shape));
out:
    return st;
}
