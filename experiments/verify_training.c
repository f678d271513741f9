/* Verification of what training adds to the networks: boundary pairs, loss and its gradients, AdamW. */
#include "experiments/verify.h"

#include <math.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/rand.h"

typedef enum scores {
    UNIFORM,
    FEW,   /* five values: ties everywhere */
    SAME,  /* one value: age alone decides */
    RISING /* every arrival replaces a key */
} scores;
static const char *const scores_name[] = {"uniform", "few values", "one value", "rising"};

typedef struct shape {
    int32_t n, lanes, docs;
    kv_run run;
    kv_loss_options loss;
    scores target;
} shape;

#define RUN(b, s, w) \
    { .budget = (b), .sinks = (s), .window = (w), .seed = 5 }
#define LOSS(m, t, b, s, l) \
    { .margin = (m), .temp = (t), .balance = (b), .sample = (s), .tail = (l) }
static const shape shapes[] = {
    {1, 1, 1, RUN(20, 2, 8), LOSS(.5, 1, true, 0, 0), UNIFORM},
    {60, 2, 1, RUN(60, 2, 8), LOSS(.5, 1, true, 0, 4), UNIFORM}, /* nothing to decide */
    {22, 3, 1, RUN(20, 2, 8), LOSS(.5, 1, true, 0, 1), UNIFORM}, /* one pair */
    {240, 2, 3, RUN(30, 2, 8), LOSS(.5, 1, true, 0, 8), FEW},
    {500, 3, 1, RUN(50, 4, 16), LOSS(.5, 1, true, 0, 64), UNIFORM},
    {500, 3, 1, RUN(50, 4, 16), LOSS(.5, 1, false, 0, 64), FEW},
    {500, 3, 1, RUN(50, 4, 16), LOSS(0, 1, true, 0, 64), FEW},
    {500, 3, 1, RUN(50, 4, 16), LOSS(.5, .1, true, 0, 0), SAME},
    {500, 3, 1, RUN(21, 4, 16), LOSS(.5, 1, true, 0, 3), RISING}, /* one slot */
    {500, 3, 1, RUN(50, 4, 16), LOSS(.5, 1, true, 64, 64), UNIFORM},
    {500, 3, 1, RUN(50, 0, 1), LOSS(.5, 3, false, 400, 1), FEW}, /* queries drawn twice */
    {517, 2, 5, RUN(40, 2, 8), LOSS(.5, 1, true, 0, 16), UNIFORM},
    {517, 2, 5, RUN(40, 2, 8), LOSS(.5, 1, true, 20, 16), FEW},
    {3000, 12, 1, RUN(400, 4, 256), LOSS(.5, 1, true, 0, 64), RISING},
    {16384, 2, 1, RUN(2048, 4, 256), LOSS(.5, 1, true, 0, 64), UNIFORM},
    {16391, 2, 1, RUN(2048, 4, 256), LOSS(.5, 1, true, 0, 64), FEW},
    {20000, 2, 2, RUN(1024, 4, 256), LOSS(.5, 1, true, 64, 64), UNIFORM},
};
#undef RUN
#undef LOSS
enum { SHAPES = sizeof shapes / sizeof *shapes, MOST_DOCS = 5, STEP = 3 };

typedef struct problem {
    int64_t doc_first[MOST_DOCS + 1];
    float *target, *rhat, *e, *wanted_e; /* [lanes][n] */
    double *log_gamma;                   /* [lanes] */
    kv_pair *pair, *want;                /* [lanes][n_pair]; want [lanes][n] before it is packed */
    kv_loss *loss, *wanted_loss;         /* [lanes] */
    double *rhat64, *d_rhat;             /* [n] */
    int32_t *query;                      /* [n] */
    int32_t n_pair;
} problem;

static void problem_free(problem *p) {
    void *owned[] = {p->target, p->rhat, p->e,           p->wanted_e, p->log_gamma, p->pair,
                     p->want,   p->loss, p->wanted_loss, p->rhat64,   p->d_rhat,    p->query};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    *p = (problem){.n_pair = 0};
}

static float target_of(scores kind, int32_t lane, int32_t t) {
    const double x = kv_rand_uniform(17, (uint32_t)kind, (uint32_t)lane, (uint32_t)t, 0);
    switch (kind) {
    case FEW: return (float)floor(5 * x);
    case SAME: return -1.5f;
    case RISING: return (float)(1e-2 * t + 1e-3 * x);
    default: return (float)(4 * x - 12);
    }
}

static kv_status problem_make(const shape *s, problem *p) {
    kv_status st = KV_OK;
    const size_t n = (size_t)s->n, lanes = (size_t)s->lanes;
    KV_NEW(p->target, lanes * n);
    KV_NEW(p->rhat, lanes * n);
    KV_NEW(p->e, lanes * n);
    KV_NEW(p->wanted_e, lanes * n);
    KV_NEW(p->log_gamma, lanes);
    KV_NEW(p->pair, lanes * n);
    KV_NEW(p->want, lanes * n);
    KV_NEW(p->loss, lanes);
    KV_NEW(p->wanted_loss, lanes);
    KV_NEW(p->rhat64, n);
    KV_NEW(p->d_rhat, n);
    KV_NEW(p->query, n);
    for (int32_t i = 0; i <= s->docs; i++) p->doc_first[i] = (int64_t)s->n * i / s->docs;
    for (int32_t lane = 0; lane < s->lanes; lane++) {
        p->log_gamma[lane] = log1p(-1e-3 * pow(10, -3.0 * lane / s->lanes));
        for (int32_t t = 0; t < s->n; t++) {
            const size_t at = (size_t)lane * n + (size_t)t;
            p->target[at] = target_of(s->target, lane, t);
            p->rhat[at] =
                p->target[at] + (float)kv_rand_normal(18, (uint32_t)lane, (uint32_t)t, 0, 0);
        }
    }
out:
    return st;
}

/* The CPU's pairs, loss and gradients of all lanes. */
static kv_status reference(const shape *s, problem *p) {
    kv_status st = KV_OK;
    const size_t n = (size_t)s->n;
    for (int32_t lane = 0; lane < s->lanes; lane++) {
        kv_pair *pair = p->want + (size_t)lane * (size_t)p->n_pair;
        int32_t count = 0;
        for (int32_t doc = 0; doc < s->docs; doc++) {
            const int64_t first = p->doc_first[doc];
            const int32_t size = (int32_t)(p->doc_first[doc + 1] - first);
            const int32_t queries =
                kv_boundary_queries(size, &s->run, &s->loss, s->run.seed, STEP, doc, p->query);
            if (queries == 0) continue;
            KV_TRY(kv_boundary_pairs(p->target + (size_t)lane * n + first, size, &s->run,
                                     p->log_gamma[lane], p->query, queries, (int32_t)first,
                                     pair + count));
            count += queries;
        }
        if (lane == 0) p->n_pair = count;
        for (size_t t = 0; t < n; t++) p->rhat64[t] = (double)p->rhat[(size_t)lane * n + t];
        p->wanted_loss[lane] =
            kv_boundary_loss(pair, count, &s->loss, p->rhat64, s->n, p->log_gamma[lane], p->d_rhat);
        for (size_t t = 0; t < n; t++)
            p->wanted_e[(size_t)lane * n + t] = (float)(p->d_rhat[t] / s->lanes);
    }
out:
    return st;
}

static void compare_pairs(kv_verify *v, const shape *s, const problem *p, int32_t n_pair) {
    const kv_verify_shape one = {1, 1, 1};
    kv_verify_i32(v, "pairs of a lane", one, &n_pair, &p->n_pair);
    for (int64_t i = 0; n_pair == p->n_pair && i < (int64_t)s->lanes * n_pair; i++) {
        const kv_pair *got = &p->pair[i], *want = &p->want[i];
        const int32_t a[] = {got->fresh, got->bound, got->keep},
                      b[] = {want->fresh, want->bound, want->keep};
        kv_verify_i32(v, "pair", (kv_verify_shape){1, 3, 3}, a, b);
        kv_verify_f64(v, "margin", one, &got->margin, &want->margin, 0, 0);
    }
}

/* Sums of doubles in another order; ages are up to n, and a pair's slope up to 1 / temp. */
static void compare_losses(kv_verify *v, const shape *s, const problem *p) {
    const kv_verify_shape one = {1, 1, 1};
    for (int32_t lane = 0; lane < s->lanes; lane++) {
        const kv_loss *got = &p->loss[lane], *want = &p->wanted_loss[lane];
        const int32_t a = (int32_t)got->n, b = (int32_t)want->n;
        kv_verify_f64(v, "loss", one, &got->loss, &want->loss, 1e-12, 0);
        kv_verify_f64(v, "d log gamma", one, &got->log_gamma, &want->log_gamma, 1e-12,
                      1e-13 * s->n / s->loss.temp);
        kv_verify_f64(v, "right", one, &got->right, &want->right, 0, 0);
        kv_verify_f64(v, "keep", one, &got->keep, &want->keep, 0, 0);
        kv_verify_i32(v, "pairs with weight", one, &a, &b);
    }
    kv_verify_f32(v, "e", (kv_verify_shape){s->lanes, s->n, s->n}, p->e, p->wanted_e, 1.2e-7,
                  1e-14 / s->loss.temp);
}

static kv_status gpu_loss(kv_verify *v, const shape *s, problem *p) {
    kv_status st = KV_OK;
    kv_gpu *g = kv_verify_gpu(v);
    kv_gpu_boundary *b = NULL;
    kv_gpu_buffer *rhat = NULL, *e = NULL, *loss = NULL;
    int32_t n_pair = 0;
    const size_t cells = (size_t)s->lanes * (size_t)s->n * 4;
    KV_TRY(kv_gpu_new(g, cells, &rhat));
    KV_TRY(kv_gpu_new(g, cells, &e));
    KV_TRY(kv_gpu_new(g, (size_t)s->lanes * sizeof *p->loss, &loss));
    KV_TRY(kv_gpu_put(rhat, p->rhat, cells));
    KV_TRY(kv_gpu_boundary_new(g, &s->run, &s->loss, s->lanes, s->n, s->docs, p->doc_first,
                               p->target, &b));
    /* Another step and other decays first: what they leave must not matter. */
    for (int step = 0; step <= STEP; step += STEP) {
        double log_gamma[16];
        for (int32_t i = 0; i < s->lanes; i++) log_gamma[i] = p->log_gamma[i] * (step ? 1 : 2);
        KV_TRY(kv_gpu_boundary_pairs(b, step, log_gamma));
        KV_TRY(kv_gpu_boundary_loss(b, rhat, e, loss));
    }
    KV_TRY(kv_gpu_boundary_get(b, &n_pair, p->pair));
    KV_TRY(kv_gpu_get(e, p->e, cells));
    KV_TRY(kv_gpu_get(loss, p->loss, (size_t)s->lanes * sizeof *p->loss));
    compare_pairs(v, s, p, n_pair);
    compare_losses(v, s, p);
out:
    kv_gpu_boundary_free(b);
    (void)kv_gpu_free(rhat);
    (void)kv_gpu_free(e);
    (void)kv_gpu_free(loss);
    return st;
}

kv_status kv_verify_boundary(kv_verify *v) {
    kv_status st = KV_OK;
    problem p = {.n_pair = 0};
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        if (kv_verify_skips(v, s->n)) continue;
        kv_verify_case(v,
                       "n %d in %d documents, %d lanes, B %d, margin %g, temp %g%s, sample %d, %s",
                       s->n, s->docs, s->lanes, s->run.budget, s->loss.margin, s->loss.temp,
                       s->loss.balance ? ", balanced" : "", s->loss.sample, scores_name[s->target]);
        KV_TRY(problem_make(s, &p));
        KV_TRY(reference(s, &p));
        KV_TRY(gpu_loss(v, s, &p));
        problem_free(&p);
        KV_TRY(kv_interrupt_poll());
    }
out:
    problem_free(&p);
    return st;
}

typedef struct group {
    int64_t n;
    double scale, clip, weight_decay; /* scale: of the gradient */
} group;
static const group groups[] = {{1, 1, 0, 0},          {33, 1, 1, 0},     {1000, 1e-3, 1, .1},
                               {262144, 1, 1e-2, 0},  {400001, 1, 1, 0}, {70001, 1e-12, 0, .01},
                               {5000, INFINITY, 1, 0}};
enum { GROUPS = sizeof groups / sizeof *groups, STEPS = 3, ARRAYS = 4 };

/* Equal bytes where the norm does not reach the clip; else the sum's order may move the scale by a rounding. */
static kv_status check_group(kv_verify *v, const group *o) {
    kv_status st = KV_OK;
    kv_gpu *g = kv_verify_gpu(v);
    enum { GRAD, PARAM, M1, M2 };
    static const char *const name[ARRAYS] = {"grad", "param", "moment 1", "moment 2"};
    float *want[ARRAYS] = {NULL}, *got = NULL;
    kv_gpu_buffer *there[ARRAYS] = {NULL}, *sum_there = NULL;
    const size_t n = (size_t)o->n;
    bool clipped = false;
    KV_NEW(got, n);
    KV_TRY(kv_gpu_new(g, sizeof(double), &sum_there));
    for (int a = 0; a < ARRAYS; a++) {
        KV_NEW(want[a], n);
        KV_TRY(kv_gpu_new(g, n * 4, &there[a]));
        for (size_t i = 0; a == PARAM && i < n; i++)
            want[a][i] = (float)kv_rand_normal(3, (uint32_t)i, 0, 0, 0);
        KV_TRY(kv_gpu_put(there[a], want[a], n * 4));
    }
    for (int step = 1; step <= STEPS; step++) {
        const kv_adamw adamw = {.rate = 3e-3 / step,
                                .beta1 = .9,
                                .beta2 = .95,
                                .eps = 1e-8,
                                .weight_decay = o->weight_decay};
        double sum;
        for (size_t i = 0; i < n; i++)
            want[GRAD][i] =
                (float)(o->scale * kv_rand_normal(4, (uint32_t)i, (uint32_t)step, 0, 0));
        KV_TRY(kv_gpu_put(there[GRAD], want[GRAD], n * 4));
        KV_TRY(kv_gpu_adamw(g, &adamw, step, o->clip, o->n, there[GRAD], there[PARAM], there[M1],
                            there[M2], sum_there));
        KV_TRY(kv_gpu_get(sum_there, &sum, sizeof sum));
        const double wanted = kv_sum_of_squares(o->n, want[GRAD]);
        kv_verify_f64(v, "sum of squares", (kv_verify_shape){1, 1, 1}, &sum, &wanted, 1e-12, 0);
        if (!isfinite(wanted)) continue;
        const double scale = kv_clip_factor(sqrt(wanted), o->clip);
        clipped |= scale != 1;
        kv_adamw_step(&adamw, step, o->n, want[GRAD], scale, want[PARAM], want[M1], want[M2]);
    }
    for (int a = PARAM; a < ARRAYS; a++) {
        KV_TRY(kv_gpu_get(there[a], got, n * 4));
        kv_verify_f32(v, name[a], (kv_verify_shape){1, (int32_t)n, o->n}, got, want[a],
                      clipped ? 4e-7 : 0, clipped ? 1e-9 : 0);
    }
out:
    for (int a = 0; a < ARRAYS; a++) {
        free(want[a]);
        (void)kv_gpu_free(there[a]);
    }
    (void)kv_gpu_free(sum_there);
    free(got);
    return st;
}

kv_status kv_verify_adamw(kv_verify *v) {
    kv_status st = KV_OK;
    for (int i = 0; i < GROUPS; i++) {
        if (kv_verify_skips(v, (int32_t)groups[i].n)) continue;
        kv_verify_case(v, "%lld parameters, gradients of %g, clip %g, weight decay %g",
                       (long long)groups[i].n, groups[i].scale, groups[i].clip,
                       groups[i].weight_decay);
        KV_TRY(check_group(v, &groups[i]));
    }
out:
    return st;
}
