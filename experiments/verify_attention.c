/* `kvlab verify`: dense sweep, masked attention, dense attention, over a table of awkward shapes and values.
 *
 * Tolerances: logits are fp32 on both sides, so a logit of size L carries about L 2^-23, and that is the relative error of a
 * probability. L is bounded by scale max|q| max|k|. */
#include "experiments/verify.h"

#include <math.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "reference/select.h"

typedef enum values {
    GRID, /* small multiples of 1/8: every product and sum is exact, so integer results must be equal */
    HALF,    /* normal, rounded to half */
    BFLOAT,  /* normal, rounded to bfloat16 */
    SINGLE,  /* normal, fp32: the split path */
    HUGE_,   /* logits of several hundred: most probabilities underflow */
    TIES,    /* four different keys only */
    ZEROS,   /* +0 and -0: every row uniform */
    DENORMAL /* half denormals beside ordinary values */
} values;

typedef struct shape {
    const char *name;
    int32_t n, n_q, n_kv, d, sinks, window, pad; /* pad: tokens of the stride behind the document */
    values values;
    float softcap;
} shape;

static const shape shapes[] = {
    {"one token", 1, 2, 1, 64, 4, 256, 0, HALF, 0},
    {"two tokens, window 1", 2, 2, 1, 128, 0, 1, 3, HALF, 0},
    {"63", 63, 4, 2, 64, 2, 8, 1, GRID, 0},
    {"64", 64, 4, 1, 128, 2, 8, 0, GRID, 0},
    {"65", 65, 3, 1, 64, 4, 16, 7, HALF, 0},
    {"127 d128", 127, 8, 1, 128, 1, 5, 1, HALF, 0},
    {"129 no sinks", 129, 8, 2, 64, 0, 3, 0, GRID, 0},
    {"255 group 1", 255, 3, 3, 128, 4, 32, 2, BFLOAT, 0},
    {"257 group 2", 257, 4, 2, 64, 130, 40, 0, HALF, 0},
    {"300 group 5", 300, 5, 1, 64, 4, 64, 4, BFLOAT, 0},
    {"513 group 4 d128", 513, 8, 2, 128, 4, 100, 0, HALF, 0},
    {"640 group 7", 640, 7, 1, 64, 4, 256, 0, GRID, 0},
    {"1000 window over all", 1000, 4, 1, 64, 4, 1000, 0, HALF, 0},
    {"1023 d128 grid", 1023, 4, 1, 128, 4, 256, 1, GRID, 0},
    {"400 d48", 400, 2, 1, 48, 4, 20, 3, HALF, 0},
    {"200 d80", 200, 4, 2, 80, 4, 20, 0, BFLOAT, 0},
    {"333 fp32", 333, 4, 2, 64, 4, 30, 0, SINGLE, 0},
    {"270 fp32 d128", 270, 2, 1, 128, 4, 30, 2, SINGLE, 0},
    {"350 softcap", 350, 4, 2, 64, 4, 30, 0, HALF, 5.0f},
    {"350 huge", 350, 4, 2, 64, 4, 30, 0, HUGE_, 0},
    {"500 ties", 500, 4, 2, 64, 4, 30, 0, TIES, 0},
    {"500 ties d128", 500, 2, 1, 128, 0, 1, 0, TIES, 0},
    {"300 zeros", 300, 4, 2, 64, 4, 30, 0, ZEROS, 0},
    {"300 denormals", 300, 4, 2, 64, 4, 30, 0, DENORMAL, 0},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

typedef struct problem {
    kv_span span;
    float *q, *k, *v;
    double logit, v_max; /* bounds */
} problem;

static void problem_free(problem *p) {
    free(p->q);
    free(p->k);
    free(p->v);
}

static float value(values kind, uint32_t array, uint32_t head, uint32_t t, uint32_t c) {
    const double x = kv_rand_normal(11, array, head, t, c);
    switch (kind) {
    case GRID: return (float)(round(fmax(-15, fmin(15, 4 * x))) / 8);
    case BFLOAT: return kv_bf16_to_f32(kv_f32_to_bf16((float)x));
    case SINGLE: return (float)x;
    case HUGE_: return kv_f16_to_f32(kv_f32_to_f16((float)(9 * x)));
    case TIES:
        return array == 1 ? value(GRID, 9, head, kv_rand(5, head, t, 0, 0).v[0] % 4, c)
                          : value(GRID, array + 10, head, t, c);
    case ZEROS: return array == 2 ? (float)round(4 * x) : x < 0 ? -0.0f : 0.0f;
    case DENORMAL: return kv_f16_to_f32(kv_f32_to_f16((float)(t % 3 ? x * 0x1p-20 : x)));
    default: return kv_f16_to_f32(kv_f32_to_f16((float)x));
    }
}

/* Fills valid tokens, returns the largest row norm, *v_max the largest element; what lies behind the document is NaN. */
static double fill(float *x, const shape *s, uint32_t array, int32_t heads, int64_t stride,
                   double *v_max) {
    double top = 0;
    for (int32_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < stride; t++) {
            double sum = 0;
            for (int32_t c = 0; c < s->d; c++) {
                const float y =
                    t < s->n ? value(s->values, array, (uint32_t)h, (uint32_t)t, (uint32_t)c) : NAN;
                x[((size_t)h * (size_t)stride + (size_t)t) * (size_t)s->d + (size_t)c] = y;
                if (t < s->n) sum += (double)y * (double)y, *v_max = fmax(*v_max, fabs((double)y));
            }
            top = fmax(top, sqrt(sum));
        }
    return top;
}

static kv_status problem_make(const shape *s, problem *p) {
    kv_status st = KV_OK;
    const int64_t stride = s->n + s->pad;
    const size_t cell = (size_t)stride * (size_t)s->d;
    memset(p, 0, sizeof *p);
    KV_NEW(p->q, (size_t)s->n_q * cell);
    KV_NEW(p->k, (size_t)s->n_kv * cell);
    KV_NEW(p->v, (size_t)s->n_kv * cell);
    const float scale = s->values == GRID || s->values == TIES ? 0.125f : 1 / sqrtf((float)s->d);
    double largest = 0;
    const double q = fill(p->q, s, 0, s->n_q, stride, &largest),
                 k = fill(p->k, s, 1, s->n_kv, stride, &largest);
    (void)fill(p->v, s, 2, s->n_kv, stride, &p->v_max);
    p->logit = (double)scale * q * k;
    p->span = (kv_span){.n_token = s->n,
                        .stride = stride,
                        .n_q_head = s->n_q,
                        .n_kv_head = s->n_kv,
                        .head_dim = s->d,
                        .q = p->q,
                        .k = p->k,
                        .v = p->v,
                        .scale = scale,
                        .softcap = s->softcap};
out:
    return st;
}

/* Relative error of a probability whose logits are bounded by `logit`; the constant covers exp2, sums and the accumulators. */
static double probability_error(double logit) { return 3e-6 + 3e-7 * logit; }

static double product(const shape *s, const problem *p, int32_t h, int32_t u, int32_t t) {
    const size_t d = (size_t)s->d, stride = (size_t)p->span.stride;
    const float *q = p->q + ((size_t)h * stride + (size_t)u) * d;
    const float *k = p->k + ((size_t)(h / (s->n_q / s->n_kv)) * stride + (size_t)t) * d;
    double sum = 0;
    for (size_t c = 0; c < d; c++) sum += (double)q[c] * (double)k[c];
    return sum;
}

/* Smallest key of the largest product over E(u), -1 if E(u) is empty. */
static int32_t exact_top(const shape *s, const problem *p, int32_t h, int32_t u) {
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
static void compare_top(kv_verify *v, const shape *s, const problem *p, const kv_dense *got,
                        const kv_dense *want) {
    int64_t near = 0, wrong = 0;
    const double error = probability_error(p->logit);
    const bool exact = s->values == GRID || s->values == TIES || s->values == ZEROS;
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

static void compare_dense(kv_verify *v, const shape *s, const problem *p, const kv_dense *got,
                          const kv_dense *want) {
    const kv_verify_shape rows = {s->n_q, s->n, got->stride};
    const kv_verify_shape outputs = {s->n_q, s->n * s->d, got->stride * s->d};
    const double error = probability_error(p->logit);
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

static kv_status check_dense(kv_verify *v, const shape *s, const problem *p,
                             const kv_dense_request *request) {
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
    problem p = {0};
    kv_dense dense = {0};
    float *sparse = NULL;
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        if (kv_verify_skips(v, s->n)) continue;
        KV_TRY(problem_make(s, &p));
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
        problem_free(&p);
        memset(&p, 0, sizeof p);
        KV_TRY(kv_interrupt_poll());
    }
out:
    kv_dense_free(&dense);
    free(sparse);
    problem_free(&p);
    return st;
}

typedef enum decisions {
    KEPT_ALL,   /* KV_NEVER everywhere */
    KEPT_ONE,   /* every query sees itself only */
    PRIORITIES, /* kv_select of random priorities at a quarter of the tokens */
    RANDOM,     /* any interval */
    NOTHING,    /* some queries see no key */
    DECISIONS
} decisions;
static const char *const decision_names[DECISIONS] = {"all", "itself", "priorities", "random",
                                                      "nothing"};

static kv_status decide(decisions kind, const shape *s, const problem *p, int32_t *evict_at) {
    kv_status st = KV_OK;
    const int64_t stride = p->span.stride;
    float *priority = NULL;
    for (int32_t h = 0; h < s->n_kv; h++)
        for (int32_t t = 0; t < stride; t++) {
            const uint32_t x = kv_rand(21, (uint32_t)h, (uint32_t)t, 0, 0).v[0];
            int32_t at = KV_NEVER;
            if (kind == KEPT_ONE) at = t + 1;
            if (kind == RANDOM) at = x % 3 ? t + 1 + (int32_t)(x % 200) : KV_NEVER;
            if (kind == NOTHING) at = t / 70 % 2 ? 0 : t + 1;
            evict_at[(size_t)h * (size_t)stride + (size_t)t] = at;
        }
    if (kind != PRIORITIES) return KV_OK;
    const kv_run run = {
        .budget = s->sinks + s->window + s->n / 4 + 1, .sinks = s->sinks, .window = s->window};
    KV_NEW(priority, (size_t)s->n_kv * (size_t)stride);
    for (int32_t h = 0; h < s->n_kv; h++)
        for (int32_t t = 0; t < s->n; t++)
            priority[(size_t)h * (size_t)stride + (size_t)t] =
                (float)kv_rand_uniform(22, (uint32_t)h, (uint32_t)t, 0, 0);
    KV_TRY(kv_select(&p->span, &run, priority, evict_at));
out:
    free(priority);
    return st;
}

/* Where evict_at is 0 a query does not even see itself: outside the contract, so the CPU is asked about evict_at = t + 1 and its rows
 * are emptied here. */
static void empty_rows(const shape *s, const int32_t *evict_at, int64_t stride, kv_masked *want) {
    for (int32_t h = 0; h < s->n_q; h++)
        for (int32_t u = 0; u < s->n; u++) {
            const size_t at = (size_t)h * (size_t)stride + (size_t)u;
            if (evict_at[(size_t)(h / (s->n_q / s->n_kv)) * (size_t)stride + (size_t)u] != 0)
                continue;
            memset(want->o + at * (size_t)s->d, 0, (size_t)s->d * sizeof *want->o);
            want->lse[at] = want->lse_long[at] = -INFINITY;
        }
}

/* Long-range mass near 2^-126 of the whole: which of its terms count as 0 depends on when the running maximum moved. */
static void drop_vanished(const float *lse, float *lse_long, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (lse_long[i] < lse[i] - 75) lse_long[i] = -INFINITY;
}

static kv_status check_masked(kv_verify *v, const shape *s, const problem *p, const int32_t *legal,
                              const int32_t *evict_at) {
    kv_status st = KV_OK;
    kv_masked got = {0}, want = {0};
    kv_masked_request request = {.evict_at = legal,
                                 .sinks = s->sinks,
                                 .window = s->window,
                                 .want_output = true,
                                 .want_long = true};
    const kv_verify_shape rows = {s->n_q, s->n, p->span.stride};
    const kv_verify_shape outputs = {s->n_q, s->n * s->d, p->span.stride * s->d};
    const double error = probability_error(p->logit);
    KV_TRY(kv_masked_compute(&p->span, &request, &want));
    empty_rows(s, evict_at, p->span.stride, &want);
    request.evict_at = evict_at;
    KV_TRY(kv_verify_ops(v)->masked(&p->span, &request, &got));
    kv_verify_f32(v, "lse", rows, got.lse, want.lse, 0, error);
    drop_vanished(got.lse, got.lse_long, (size_t)s->n_q * (size_t)p->span.stride);
    drop_vanished(want.lse, want.lse_long, (size_t)s->n_q * (size_t)p->span.stride);
    kv_verify_f32(v, "lse_long", rows, got.lse_long, want.lse_long, 0, error);
    kv_verify_f32(v, "o", outputs, got.o, want.o, 0, (error + 2e-6) * (p->v_max + 1e-30));
out:
    kv_masked_free(&got);
    kv_masked_free(&want);
    return st;
}

kv_status kv_verify_masked(kv_verify *v) {
    kv_status st = KV_OK;
    problem p = {0};
    int32_t *evict_at = NULL, *legal = NULL;
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        if (kv_verify_skips(v, s->n)) continue;
        KV_TRY(problem_make(s, &p));
        KV_NEW(evict_at, (size_t)s->n_kv * (size_t)p.span.stride);
        KV_NEW(legal, (size_t)s->n_kv * (size_t)p.span.stride);
        for (decisions kind = 0; kind < DECISIONS; kind++) {
            kv_verify_case(v, "%s, %s", s->name, decision_names[kind]);
            KV_TRY(decide(kind, s, &p, evict_at));
            KV_TRY(decide(kind == NOTHING ? KEPT_ONE : kind, s, &p, legal));
            KV_TRY(check_masked(v, s, &p, legal, evict_at));
        }
        free(evict_at);
        free(legal);
        evict_at = legal = NULL;
        problem_free(&p);
        memset(&p, 0, sizeof p);
        KV_TRY(kv_interrupt_poll());
    }
out:
    free(evict_at);
    free(legal);
    problem_free(&p);
    return st;
}

kv_status kv_verify_attend(kv_verify *v) {
    kv_status st = KV_OK;
    problem p = {0};
    float *got = NULL, *want = NULL, *lse = NULL, *lse_want = NULL;
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        if (kv_verify_skips(v, s->n)) continue;
        KV_TRY(problem_make(s, &p));
        const size_t cells = (size_t)s->n_q * (size_t)p.span.stride;
        const double error = probability_error(p.logit);
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
        problem_free(&p);
        memset(&p, 0, sizeof p);
        KV_TRY(kv_interrupt_poll());
    }
out:
    free(got);
    free(want);
    free(lse);
    free(lse_want);
    problem_free(&p);
    return st;
}
