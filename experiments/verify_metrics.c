/* Verification of the sums behind the metrics. First from the same arrays on both sides: counts must be equal, sums of doubles may
 * differ by their order. Then through the device table, where each side attends by itself. */
#include "experiments/verify.h"

#include <math.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/num.h"
#include "reference/core/rand.h"
#include "reference/metrics.h"
#include "reference/metrics_sums.h"

enum { DOCUMENTS = 3, KIND_COUNT = 5 };

typedef struct shape {
    const char *name;
    int32_t n_document, n[DOCUMENTS], n_q, n_kv, d, sinks, window, budget;
    bool ties;   /* few different keys, probabilities and masses */
    bool empty;  /* some queries see no key */
    bool bare;   /* neither kinds nor the policy's own target */
    bool turned; /* keys re-rotated to their place in the cache */
} shape;

static const shape shapes[] = {
    {"one token", 1, {1}, 2, 1, 64, 4, 256, 300, false, false, false, false},
    {"one token, counted", 1, {1}, 1, 1, 64, 0, 1, 0, false, false, false, false},
    {"budget 0", 1, {130}, 2, 2, 64, 0, 1, 0, false, false, false, false},
    {"budget 1", 1, {130}, 2, 1, 64, 0, 1, 1, false, false, true, false},
    {"budget n", 1, {200}, 4, 2, 64, 2, 8, 200, false, false, false, false},
    {"budget n - 1", 1, {200}, 4, 2, 128, 2, 8, 199, false, false, false, false},
    {"k 0", 1, {300}, 4, 1, 64, 4, 16, 20, false, false, false, false},
    {"group 1", 1, {257}, 3, 3, 48, 4, 32, 70, false, false, false, false},
    {"group 2", 1, {300}, 4, 2, 80, 4, 32, 70, false, false, true, false},
    {"group 3", 1, {333}, 3, 1, 64, 1, 5, 50, false, false, false, false},
    {"group 4", 1, {700}, 8, 2, 128, 4, 64, 200, false, false, false, false},
    {"group 5", 1, {255}, 5, 1, 64, 0, 3, 60, false, false, false, false},
    {"group 6", 1, {256}, 6, 1, 64, 4, 16, 64, false, false, false, false},
    {"group 7", 1, {512}, 14, 2, 64, 4, 16, 64, false, false, false, false},
    {"group 8", 1, {400}, 8, 1, 64, 4, 16, 128, false, false, false, false},
    {"ties", 1, {500}, 4, 2, 64, 4, 30, 100, true, false, false, false},
    {"ties, one below the budget", 2, {300, 40}, 2, 1, 64, 0, 1, 90, true, false, false, false},
    {"three documents", 3, {300, 1, 129}, 4, 2, 64, 4, 16, 64, false, false, false, false},
    {"rows without keys", 1, {400}, 4, 2, 64, 4, 30, 100, false, true, false, false},
    {"rows without keys, ties", 2, {300, 200}, 2, 1, 64, 0, 1, 50, true, true, false, false},
    {"turned", 2, {250, 70}, 4, 2, 48, 4, 16, 64, false, false, false, true},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

typedef struct problem {
    const shape *s;
    int64_t stride;
    float *q, *k, *v;                 /* [n_q | n_kv][stride][d] */
    int32_t *evict_at, *oracle, *own; /* [n_kv][stride] */
    uint8_t *kind;                    /* [stride] */
    double logit, v_max;              /* bounds */
    double inv_freq[64];
} problem;

static void problem_free(problem *p) {
    void *owned[] = {p->q, p->k, p->v, p->evict_at, p->oracle, p->own, p->kind};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
}

static float value(const shape *s, uint32_t array, uint32_t head, uint32_t t, uint32_t c) {
    if (s->ties) t %= 4;
    const double x = (array == 0 ? 2 : 1) * kv_rand_normal(61, array, head, t, c);
    return kv_f16_to_f32(kv_f32_to_f16((float)x));
}

/* Returns the largest norm of a row. */
static double fill(const problem *p, uint32_t array, int32_t heads, float *x, double *largest) {
    double top = 0;
    for (int32_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < p->stride; t++) {
            double sum = 0;
            for (int32_t c = 0; c < p->s->d; c++) {
                const float y = value(p->s, array, (uint32_t)h, (uint32_t)t, (uint32_t)c);
                x[(h * p->stride + t) * p->s->d + c] = y;
                sum += (double)y * (double)y;
                *largest = fmax(*largest, fabs((double)y));
            }
            top = fmax(top, sqrt(sum));
        }
    return top;
}

/* Any interval; every query sees itself. Positions count from the document's start. */
static void decide(const shape *s, uint32_t seed, int64_t stride, int32_t *evict_at) {
    for (int32_t h = 0; h < s->n_kv; h++)
        for (int32_t t = 0; t < stride; t++) {
            const uint32_t x = kv_rand(62, seed, (uint32_t)h, (uint32_t)t, 0).v[0];
            const int32_t life = s->ties ? 1 + 40 * (int32_t)(x % 4) : 1 + (int32_t)(x % 300);
            evict_at[h * stride + t] = x % 5 == 0 ? KV_NEVER : t + life;
        }
}

static kv_status problem_make(const shape *s, problem *p) {
    kv_status st = KV_OK;
    *p = (problem){.s = s, .stride = 3};
    for (int32_t i = 0; i < s->n_document; i++) p->stride += s->n[i];
    const int64_t cells = p->stride * s->d;
    double largest = 0;
    KV_NEW(p->q, s->n_q * cells);
    KV_NEW(p->k, s->n_kv * cells);
    KV_NEW(p->v, s->n_kv * cells);
    KV_NEW(p->evict_at, s->n_kv * p->stride);
    KV_NEW(p->oracle, s->n_kv * p->stride);
    KV_NEW(p->own, s->n_kv * p->stride);
    KV_NEW(p->kind, p->stride);
    const double q = fill(p, 0, s->n_q, p->q, &largest), k = fill(p, 1, s->n_kv, p->k, &largest);
    (void)fill(p, 2, s->n_kv, p->v, &p->v_max);
    p->logit = q * k / sqrt((double)s->d);
    for (int32_t c = 0; c < s->d / 2; c++) p->inv_freq[c] = pow(1e4, -2.0 * c / s->d);
    decide(s, 0, p->stride, p->evict_at);
    decide(s, 1, p->stride, p->oracle);
    decide(s, 2, p->stride, p->own);
    for (int64_t t = 0; t < p->stride; t++)
        p->kind[t] = (uint8_t)(t % 7 == 0 ? 255 : t % KIND_COUNT);
out:
    return st;
}

/* Decisions of a document are addressed by its first token, like q, k and v. */
static kv_span span_of(const problem *p, int32_t document) {
    const shape *s = p->s;
    int64_t first = 0;
    for (int32_t i = 0; i < document; i++) first += s->n[i];
    return (kv_span){.n_token = s->n[document],
                     .stride = p->stride,
                     .n_q_head = s->n_q,
                     .n_kv_head = s->n_kv,
                     .head_dim = s->d,
                     .q = p->q + first * s->d,
                     .k = p->k + first * s->d,
                     .v = p->v + first * s->d,
                     .scale = 1 / sqrtf((float)s->d),
                     .inv_freq = p->inv_freq,
                     .first = first};
}

static kv_metrics_item item_of(const problem *p, const kv_span *span, const kv_dense *dense,
                               const int32_t *evict_at) {
    return (kv_metrics_item){.span = span,
                             .dense = dense,
                             .evict_at = evict_at,
                             .evict_oracle = p->oracle,
                             .evict_own = p->s->bare ? NULL : p->own,
                             .kind = p->s->bare ? NULL : p->kind + span->first,
                             .rerotate = p->s->turned};
}

static kv_status sums_make(const shape *s, kv_layer_sums *sums) {
    kv_status st = KV_OK;
    *sums = (kv_layer_sums){0};
    KV_NEW(sums->head, s->n_kv);
    KV_NEW(sums->query, s->n_q);
out:
    return st;
}

static void sums_free(kv_layer_sums *sums) {
    free(sums->head);
    free(sums->query);
}

static void compare_counts(kv_verify *v, const char *what, int64_t got, int64_t want) {
    const int64_t difference = got - want;
    const int32_t zero = 0, clipped = difference > 0 ? 1 : difference < 0 ? -1 : 0;
    kv_verify_i32(v, what, (kv_verify_shape){1, 1, 1}, &clipped, &zero);
}

static void compare(kv_verify *v, const char *what, double got, double want, double relative,
                    double absolute) {
    if (isnan(got) && isnan(want))
        return; /* budget 0: the first query has nothing to choose from */
    kv_verify_f64(v, what, (kv_verify_shape){1, 1, 1}, &got, &want, relative, absolute);
}

static void compare_heads(kv_verify *v, const shape *s, const kv_layer_sums *got,
                          const kv_layer_sums *want, double relative) {
    for (int32_t h = 0; h < s->n_kv; h++) {
        const kv_head_sums *a = &got->head[h], *b = &want->head[h];
        compare_counts(v, "common", a->common, b->common);
        compare_counts(v, "own", a->own, b->own);
        compare_counts(v, "kept", a->kept, b->kept);
        compare_counts(v, "kept_max", a->kept_max, b->kept_max);
        compare_counts(v, "long_kept", a->long_kept, b->long_kept);
        compare(v, "chance", a->chance, b->chance, 1e-12, 0);
        compare(v, "ratio", a->ratio, b->ratio, relative, 0);
    }
    for (int32_t i = 0; i < KV_KINDS; i++) {
        compare_counts(v, "kind_common", got->kind_common[i], want->kind_common[i]);
        compare_counts(v, "kind_all", got->kind_all[i], want->kind_all[i]);
    }
}

static void compare_exact(kv_verify *v, const shape *s, const kv_layer_sums *got,
                          const kv_layer_sums *want) {
    compare_heads(v, s, got, want, 1e-10);
    for (int32_t i = 0; i < s->n_q; i++) {
        const kv_query_sums *a = &got->query[i], *b = &want->query[i];
        compare_counts(v, "hits", a->hits, b->hits);
        compare_counts(v, "retrievals", a->retrievals, b->retrievals);
        compare(v, "mass", a->mass, b->mass, 1e-12, 0);
        compare(v, "long_kept", a->long_kept, b->long_kept, 1e-12, 0);
        compare(v, "long_all", a->long_all, b->long_all, 1e-12, 0);
        compare(v, "difference", a->difference, b->difference, 1e-12, 0);
        compare(v, "output", a->output, b->output, 1e-12, 0);
    }
}

/* Each side with outputs of its own: an element of o is off by `error` v_max on either side, so the two vectors of all differences are
 * off by at most e = 2 error v_max sqrt(cells), and their squared lengths by 2 e |x| + e^2. */
static void compare_own(kv_verify *v, const problem *p, const kv_layer_sums *got,
                        const kv_layer_sums *want) {
    const shape *s = p->s;
    const double error = 5e-6 + 3e-7 * p->logit;
    compare_heads(v, s, got, want, 4 * error);
    for (int32_t i = 0; i < s->n_q; i++) {
        const kv_query_sums *a = &got->query[i], *b = &want->query[i];
        const double e = 2 * error * p->v_max * sqrt((double)p->stride * s->d);
        compare(v, "mass", a->mass, b->mass, 2 * error, 0);
        compare(v, "long_kept", a->long_kept, b->long_kept, 2 * error, 1e-30);
        compare(v, "long_all", a->long_all, b->long_all, 2 * error, 1e-30);
        compare(v, "difference", a->difference, b->difference, 0,
                2 * e * sqrt(b->difference) + e * e);
        compare(v, "output", a->output, b->output, 0, 2 * e * sqrt(b->output) + e * e);
    }
}

/* A query counts as a retrieval from .5 on; within the error of .5 either answer is right. */
static void compare_retrievals(kv_verify *v, const problem *p, const kv_layer_sums *got,
                               const kv_layer_sums *want, int64_t undecided) {
    int64_t differ = 0, cells = 0;
    for (int32_t i = 0; i < p->s->n_q; i++) {
        const kv_query_sums *a = &got->query[i], *b = &want->query[i];
        const int64_t d = a->retrievals - b->retrievals, e = a->hits - b->hits;
        cells += b->retrievals;
        differ += (d < 0 ? -d : d) + (e < 0 ? -e : e);
    }
    const int64_t near = differ < 2 * undecided ? differ : 2 * undecided;
    kv_verify_decisions(v, "retrievals", cells, near, differ - near);
}

static kv_status dense_of(const kv_ops *ops, const problem *p, const kv_span *span, kv_dense *out) {
    const kv_dense_request request = {.sinks = p->s->sinks,
                                      .window = p->s->window,
                                      .n_power = 1,
                                      .power = {1},
                                      .want_output = !ops->resident,
                                      .want_events = true};
    return ops->dense(span, &request, out);
}

/* Whole rows of `masked` without a visible key: no output, no mass; evict_at says that no key of these is ever seen. */
static void empty_rows(const problem *p, const kv_span *span, int32_t *evict_at,
                       kv_masked *masked) {
    const shape *s = p->s;
    for (int32_t u = 0; s->empty && u < span->n_token; u++) {
        if (u / 30 % 2) continue;
        for (int32_t h = 0; h < s->n_kv; h++) evict_at[h * p->stride + u] = 0;
        for (int32_t i = 0; i < s->n_q; i++) {
            const size_t at = (size_t)(i * p->stride + u);
            memset(masked->o + at * (size_t)s->d, 0, (size_t)s->d * sizeof *masked->o);
            masked->lse[at] = masked->lse_long[at] = -INFINITY;
        }
    }
}

static kv_status from_same_arrays(kv_verify *v, const problem *p, const kv_run *run) {
    kv_status st = KV_OK;
    kv_layer_sums got = {0}, want = {0};
    kv_dense dense = {0};
    kv_masked masked = {0};
    int32_t *evict_at = NULL;
    KV_NEW(evict_at, p->s->n_kv * p->stride);
    KV_TRY(sums_make(p->s, &got));
    KV_TRY(sums_make(p->s, &want));
    for (int32_t i = 0; i < p->s->n_document; i++) {
        const kv_span span = span_of(p, i);
        const kv_masked_request request = {.evict_at = evict_at,
                                           .sinks = run->sinks,
                                           .window = run->window,
                                           .want_output = true,
                                           .want_long = true};
        memcpy(evict_at, p->evict_at, (size_t)(p->s->n_kv * p->stride) * sizeof *evict_at);
        KV_TRY(dense_of(&kv_ops_cpu, p, &span, &dense));
        KV_TRY(kv_masked_compute(&span, &request, &masked));
        empty_rows(p, &span, evict_at, &masked);
        kv_metrics_item item = item_of(p, &span, &dense, evict_at);
        item.masked = &masked;
        KV_TRY(kv_metrics_measure(run, &item, &want));
        KV_TRY(kv_verify_measure(kv_verify_gpu(v), run, &item, &got));
        kv_dense_free(&dense);
        kv_masked_free(&masked);
    }
    compare_exact(v, p->s, &got, &want);
out:
    kv_dense_free(&dense);
    kv_masked_free(&masked);
    free(evict_at);
    sums_free(&got);
    sums_free(&want);
    return st;
}

static kv_status through_table(kv_verify *v, const problem *p, const kv_run *run) {
    kv_status st = KV_OK;
    const kv_ops *const ops[] = {kv_verify_ops(v), &kv_ops_cpu};
    kv_layer_sums sums[2] = {0};
    kv_dense dense = {0};
    kv_span span = {0};
    int64_t undecided = 0;
    for (int side = 0; side < 2; side++) {
        KV_TRY(sums_make(p->s, &sums[side]));
        for (int32_t i = 0; i < p->s->n_document; i++) {
            span = span_of(p, i);
            KV_TRY(ops[side]->hold(&span));
            KV_TRY(dense_of(ops[side], p, &span, &dense));
            const kv_metrics_item item = item_of(p, &span, &dense, p->evict_at);
            KV_TRY(ops[side]->measure(run, &item, &sums[side]));
            for (int64_t c = 0; side && c < p->s->n_q * p->stride; c++)
                undecided += c % p->stride < span.n_token &&
                             fabs((double)dense.top_p[c] - .5) < 5e-6 + 3e-7 * p->logit;
            kv_dense_free(&dense);
            ops[side]->release(&span);
        }
    }
    compare_own(v, p, &sums[0], &sums[1]);
    if (!p->s->ties) compare_retrievals(v, p, &sums[0], &sums[1], undecided);
out:
    kv_dense_free(&dense);
    sums_free(&sums[0]);
    sums_free(&sums[1]);
    return st;
}

kv_status kv_verify_metrics(kv_verify *v) {
    kv_status st = KV_OK;
    problem p = {0};
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        if (kv_verify_skips(v, s->n[0])) continue;
        const kv_run run = {.budget = s->budget, .sinks = s->sinks, .window = s->window};
        KV_TRY(problem_make(s, &p));
        kv_verify_case(v, "%s, same arrays", s->name);
        KV_TRY(from_same_arrays(v, &p, &run));
        kv_verify_case(v, "%s, own attention", s->name);
        if (!s->empty) KV_TRY(through_table(v, &p, &run));
        problem_free(&p);
        p = (problem){0};
        KV_TRY(kv_interrupt_poll());
    }
out:
    problem_free(&p);
    return st;
}
