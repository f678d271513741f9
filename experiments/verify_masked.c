/* `kvlab verify`: attention under evict_at, with the recorded rotation and with keys turned to their place in the cache, over the table
 * of verify_problem.h. */
#include <math.h>
#include <string.h>

#include "experiments/verify_problem.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "reference/select.h"

typedef enum decisions {
    KEPT_ALL,   /* KV_NEVER everywhere */
    KEPT_ONE,   /* every query sees itself only */
    PRIORITIES, /* kv_select of random priorities at a quarter of the tokens */
    RANDOM,     /* any interval */
    NOTHING,    /* some queries see no key */
    STREAMING,  /* sinks and the newest */
    DECISIONS
} decisions;
static const char *const decision_names[DECISIONS] = {"all",    "itself",  "priorities",
                                                      "random", "nothing", "streaming"};

static kv_status decide(decisions kind, const kv_verify_attention_shape *s,
                        const kv_verify_problem *p, int32_t *evict_at) {
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
            if (kind == STREAMING) at = t < s->sinks ? KV_NEVER : t + 1 + s->n / 4;
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
static void empty_rows(const kv_verify_attention_shape *s, const int32_t *evict_at, int64_t stride,
                       kv_masked *want) {
    for (int32_t h = 0; h < s->n_q; h++)
        for (int32_t u = 0; u < s->n; u++) {
            const size_t at = (size_t)h * (size_t)stride + (size_t)u;
            if (evict_at[(size_t)(h / (s->n_q / s->n_kv)) * (size_t)stride + (size_t)u] != 0)
                continue;
            memset(want->o + at * (size_t)s->d, 0, (size_t)s->d * sizeof *want->o);
            want->lse[at] = want->lse_long[at] = -INFINITY;
            if (want->lse_orig) want->lse_orig[at] = -INFINITY;
        }
}

/* Long-range mass near 2^-126 of the whole: which of its terms count as 0 depends on when the running maximum moved. */
static void drop_vanished(const float *lse, float *lse_long, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (lse_long[i] < lse[i] - 75) lse_long[i] = -INFINITY;
}

static kv_status check_masked(kv_verify *v, const kv_verify_attention_shape *s,
                              const kv_verify_problem *p, bool rerotate, const int32_t *legal,
                              const int32_t *evict_at) {
    kv_status st = KV_OK;
    kv_masked got = {0}, want = {0};
    kv_masked_request request = {.evict_at = legal,
                                 .sinks = s->sinks,
                                 .window = s->window,
                                 .rerotate = rerotate,
                                 .want_output = true,
                                 .want_long = true};
    const kv_verify_shape rows = {s->n_q, s->n, p->span.stride};
    const kv_verify_shape outputs = {s->n_q, s->n * s->d, p->span.stride * s->d};
    const size_t cells = (size_t)s->n_q * (size_t)p->span.stride;
    const double error = kv_verify_probability_error(p->logit);
    KV_TRY(kv_masked_compute(&p->span, &request, &want));
    empty_rows(s, evict_at, p->span.stride, &want);
    request.evict_at = evict_at;
    KV_TRY(kv_verify_ops(v)->masked(&p->span, &request, &got));
    kv_verify_f32(v, "lse", rows, got.lse, want.lse, 0, error);
    if (rerotate) kv_verify_f32(v, "lse_orig", rows, got.lse_orig, want.lse_orig, 0, error);
    drop_vanished(rerotate ? got.lse_orig : got.lse, got.lse_long, cells);
    drop_vanished(rerotate ? want.lse_orig : want.lse, want.lse_long, cells);
    kv_verify_f32(v, "lse_long", rows, got.lse_long, want.lse_long, 0, error);
    kv_verify_f32(v, "o", outputs, got.o, want.o, 0, (error + 2e-6) * (p->v_max + 1e-30));
out:
    kv_masked_free(&got);
    kv_masked_free(&want);
    return st;
}

/* Positions of `turned`: as in the text; with gaps, so that keys are turned whatever is kept; falling, so that they are turned back. */
enum { RUN, GAPS, FALLING, PLACES };
static const char *const place_names[PLACES] = {"", ", gaps", ", falling"};

typedef struct places {
    double inv_freq[64];
    int32_t *position; /* [n] */
} places;

static void place(int how, const kv_verify_attention_shape *s, places *x, kv_span *span) {
    for (int32_t c = 0; c < s->d / 2; c++) x->inv_freq[c] = pow(1e4, -2.0 * c / s->d);
    for (int32_t t = 0; t < s->n; t++)
        x->position[t] = how == GAPS ? 1000 + t + t / 50 * 3 : 5 * (s->n - t);
    span->inv_freq = x->inv_freq;
    span->position = how == RUN ? NULL : x->position;
}

/* All shapes and decisions: as recorded, or turned. */
static kv_status check_all(kv_verify *v, bool turned) {
    kv_status st = KV_OK;
    kv_verify_problem p = {0};
    places x = {.position = NULL};
    int32_t *evict_at = NULL, *legal = NULL;
    for (int i = 0; i < kv_verify_attention_count; i++) {
        const kv_verify_attention_shape *s = &kv_verify_attention_shapes[i];
        if (kv_verify_skips(v, s->n)) continue;
        KV_TRY(kv_verify_problem_make(s, &p));
        KV_NEW(evict_at, (size_t)s->n_kv * (size_t)p.span.stride);
        KV_NEW(legal, (size_t)s->n_kv * (size_t)p.span.stride);
        KV_NEW(x.position, s->n);
        for (decisions kind = 0; kind < DECISIONS; kind++) {
            const int how = (i + (int)kind) % PLACES;
            if (turned) place(how, s, &x, &p.span);
            kv_verify_case(v, "%s, %s%s", s->name, decision_names[kind],
                           turned ? place_names[how] : "");
            KV_TRY(decide(kind, s, &p, evict_at));
            KV_TRY(decide(kind == NOTHING ? KEPT_ONE : kind, s, &p, legal));
            KV_TRY(check_masked(v, s, &p, turned, legal, evict_at));
        }
        free(evict_at);
        free(legal);
        free(x.position);
        evict_at = legal = x.position = NULL;
        kv_verify_problem_free(&p);
        KV_TRY(kv_interrupt_poll());
    }
out:
    free(evict_at);
    free(legal);
    free(x.position);
    kv_verify_problem_free(&p);
    return st;
}

kv_status kv_verify_masked(kv_verify *v) { return check_all(v, false); }

kv_status kv_verify_turned(kv_verify *v) { return check_all(v, true); }
