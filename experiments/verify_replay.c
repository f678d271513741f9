/* Verification of the closed loop. In lockstep the GPU follows the CPU's victims and tells how far each was from its own least
 * statistic: by rounding at most. Where every victim was the GPU's own too, the free-running decisions must be the CPU's. */
#include "experiments/verify.h"

#include <math.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/num.h"
#include "reference/core/rand.h"
#include "reference/replay.h"

typedef enum values { HALF, BFLOAT, SINGLE, TIES, HUGE_, ZEROS } values;

typedef struct shape {
    const char *name;
    int32_t n, n_q, n_kv, d, budget, pad;
    values values;
    float softcap;
    int32_t small_n, small_budget; /* instead of n and budget in a small run; 0: the same */
} shape;

/* Small runs are short: racecheck takes some 20 ms for a query and block. */
static const shape shapes[] = {
    {"one token", 1, 2, 1, 64, 1, 0, HALF, 0, 0, 0},
    {"two tokens, budget 1", 2, 2, 1, 64, 1, 1, HALF, 0, 0, 0},
    {"three tokens, budget 1", 3, 2, 1, 128, 1, 0, HALF, 0, 0, 0},
    {"nothing leaves", 40, 2, 1, 64, 39, 0, HALF, 0, 12, 11},
    {"one leaves", 41, 2, 1, 64, 39, 0, HALF, 0, 13, 11},
    {"budget 1", 70, 4, 2, 64, 1, 3, HALF, 0, 20, 1},
    {"budget 2, group 1", 200, 3, 3, 128, 2, 0, BFLOAT, 0, 20, 2},
    {"group 2", 300, 4, 2, 64, 31, 1, BFLOAT, 0, 0, 0},
    {"group 3 d128", 300, 6, 2, 128, 33, 0, HALF, 0, 0, 0},
    {"group 4", 700, 8, 2, 64, 128, 0, HALF, 0, 0, 0},
    {"group 5", 400, 5, 1, 64, 100, 0, HALF, 0, 0, 0},
    {"group 7 d128", 300, 7, 1, 128, 64, 2, BFLOAT, 0, 0, 0},
    {"group 8, 5 KV heads", 300, 40, 5, 64, 50, 0, HALF, 0, 0, 0},
    {"group 4, 8 KV heads d128", 900, 32, 8, 128, 600, 0, BFLOAT, 0, 0, 0},
    {"d48", 300, 4, 2, 48, 40, 0, HALF, 0, 0, 0},
    {"fp32", 400, 4, 2, 64, 70, 0, SINGLE, 0, 0, 0},
    {"fp32 d128 group 4", 300, 4, 1, 128, 70, 1, SINGLE, 0, 0, 0},
    {"softcap", 300, 4, 2, 64, 40, 0, HALF, 5.0f, 0, 0},
    {"ties", 500, 4, 2, 64, 60, 0, TIES, 0, 0, 0},
    {"huge", 500, 4, 2, 64, 60, 0, HUGE_, 0, 0, 0},
    {"zeros", 250, 4, 2, 64, 40, 0, ZEROS, 0, 45, 12},
    {"keys beyond shared memory", 2600, 16, 4, 128, 2300, 0, SINGLE, 0, 0, 0},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

typedef struct named_rule {
    const char *name;
    kv_attention_rule rule;
    double recent; /* share of the budget */
} named_rule;
static const named_rule rules[] = {
    {"tova", {.per_layer = true, .reduce = KV_REDUCE_MEAN, .decay = 0}, 0},
    {"tova:reduce=head", {.per_layer = false, .reduce = KV_REDUCE_MEAN, .decay = 0}, 0},
    {"h2o", {.per_layer = false, .reduce = KV_REDUCE_SUM, .decay = 1}, .5},
    {"h2o:reduce=max", {.per_layer = false, .reduce = KV_REDUCE_MAX, .decay = 1}, .25},
    {"cumulative", {.per_layer = true, .reduce = KV_REDUCE_MEAN, .decay = 1}, 0},
};
enum { RULES = sizeof rules / sizeof *rules };
/* Blocks that share a set: 0 as the GPU would choose, which is 1 in documents as short as these. Shapes and rules take them in turn. */
static const int32_t block_counts[] = {0, 2, 3, 5, 8, 4};
enum { BLOCKS = sizeof block_counts / sizeof *block_counts };

typedef struct problem {
    kv_span span;
    float *q, *k;   /* [heads][stride][d] */
    int32_t *want;  /* [n_kv][stride] the CPU's decisions */
    int32_t *got;   /* [n_kv][stride] */
    int32_t *given; /* [n_kv][n] victims of the CPU, position by query */
    float *gap;     /* [n_kv][n] */
    double logit;   /* bound */
} problem;

static void problem_free(problem *p) {
    free(p->q);
    free(p->k);
    free(p->want);
    free(p->got);
    free(p->given);
    free(p->gap);
    memset(p, 0, sizeof *p);
}

static float value(values kind, uint32_t array, uint32_t head, uint32_t t, uint32_t c) {
    if (kind == TIES && array == 1) t = kv_rand(5, head, t, 0, 0).v[0] % 4;
    const double x = kv_rand_normal(41, array, head, t, c);
    switch (kind) {
    case BFLOAT: return kv_bf16_to_f32(kv_f32_to_bf16((float)x));
    case SINGLE: return (float)x;
    case HUGE_: return kv_f16_to_f32(kv_f32_to_f16((float)(9 * x)));
    case ZEROS: return x < 0 ? -0.0f : 0.0f;
    default: return kv_f16_to_f32(kv_f32_to_f16((float)x));
    }
}

/* Returns the largest norm of a row. Behind the document lies NaN. */
static double fill(float *x, const shape *s, uint32_t array, int32_t heads) {
    double top = 0;
    const size_t stride = (size_t)(s->n + s->pad), d = (size_t)s->d;
    for (size_t h = 0; h < (size_t)heads; h++)
        for (size_t t = 0; t < stride; t++) {
            double sum = 0;
            for (size_t c = 0; c < d; c++) {
                const float y = t < (size_t)s->n
                                    ? value(s->values, array, (uint32_t)h, (uint32_t)t, (uint32_t)c)
                                    : NAN;
                x[(h * stride + t) * d + c] = y;
                if (t < (size_t)s->n) sum += (double)y * (double)y;
            }
            top = fmax(top, sqrt(sum));
        }
    return top;
}

static kv_status problem_make(const shape *s, problem *p) {
    kv_status st = KV_OK;
    const size_t stride = (size_t)(s->n + s->pad), d = (size_t)s->d;
    KV_NEW(p->q, (size_t)s->n_q * stride * d);
    KV_NEW(p->k, (size_t)s->n_kv * stride * d);
    KV_NEW(p->want, (size_t)s->n_kv * stride);
    KV_NEW(p->got, (size_t)s->n_kv * stride);
    KV_NEW(p->given, (size_t)s->n_kv * (size_t)s->n);
    KV_NEW(p->gap, (size_t)s->n_kv * (size_t)s->n);
    const float scale = 1 / sqrtf((float)s->d);
    p->logit = (double)scale * fill(p->q, s, 0, s->n_q) * fill(p->k, s, 1, s->n_kv);
    p->span = (kv_span){.n_token = s->n,
                        .stride = s->n + s->pad,
                        .n_q_head = s->n_q,
                        .n_kv_head = s->n_kv,
                        .head_dim = s->d,
                        .q = p->q,
                        .k = p->k,
                        .v = p->k,
                        .scale = scale,
                        .softcap = s->softcap};
out:
    return st;
}

/* Follows the CPU's victims; *all_own: each was the least on the GPU too. */
static kv_status lockstep(kv_verify *v, const shape *s, const kv_attention_rule *rule, problem *p,
                          bool *all_own) {
    kv_status st = KV_OK;
    enum { GIVEN, GAP, EVICT, BUFFERS };
    kv_gpu *g = kv_verify_gpu(v);
    kv_gpu_buffer *b[BUFFERS] = {NULL};
    kv_gpu_span *span = NULL;
    const size_t n = (size_t)s->n, cells = (size_t)s->n_kv * n;
    const int32_t n_set = rule->per_layer ? 1 : s->n_kv;
    /* Logits and exponentials round as those of dense attention do; sums add nothing that counts. */
    const double tolerance = 6e-6 + 6e-7 * p->logit;
    int64_t near = 0, wrong = 0, steps = 0;
    for (size_t i = 0; i < cells; i++) p->given[i] = -1;
    for (int32_t i = 0; i < n_set; i++)
        for (int32_t t = 0; t < s->n; t++) {
            const int32_t gone = p->want[(size_t)i * (size_t)p->span.stride + (size_t)t];
            if (gone != KV_NEVER) p->given[(size_t)i * n + (size_t)gone - 1] = t;
        }
    KV_TRY(kv_gpu_span_upload(g, &p->span, false, &span));
    for (int i = 0; i < BUFFERS; i++) KV_TRY(kv_gpu_new(g, cells * 4, &b[i]));
    KV_TRY(kv_gpu_put(b[GIVEN], p->given, cells * 4));
    KV_TRY(kv_gpu_replay_attention(span, rule, s->n_kv, s->budget, b[GIVEN], b[GAP], b[EVICT]));
    KV_TRY(kv_gpu_get(b[GAP], p->gap, (size_t)n_set * n * 4));
    for (int32_t i = 0; i < n_set; i++)
        for (int32_t u = s->budget; u < s->n - 1; u++, steps++) {
            const double gap = (double)p->gap[(size_t)i * n + (size_t)u];
            if (gap == 0) continue;
            if (gap > 0 && gap <= tolerance)
                near++;
            else
                wrong++;
        }
    *all_own = near == 0 && wrong == 0;
    kv_verify_decisions(v, "victims in lockstep", steps, near, wrong);
out:
    for (int i = 0; i < BUFFERS; i++) (void)kv_gpu_free(b[i]);
    kv_gpu_span_free(span);
    return st;
}

/* blocks: as in kv_gpu_use_loop_blocks. */
static kv_status check(kv_verify *v, const shape *s, const named_rule *r, int32_t blocks,
                       problem *p) {
    kv_status st = KV_OK;
    kv_attention_rule rule = r->rule;
    bool all_own = false;
    rule.protect_recent = (int32_t)(r->recent * s->budget);
    kv_verify_case(v, "%s, %s, %d blocks", s->name, r->name, blocks);
    kv_gpu_use_loop_blocks(kv_verify_gpu(v), blocks);
    for (size_t i = 0; i < (size_t)s->n_kv * (size_t)p->span.stride; i++) p->got[i] = -7;
    KV_TRY(kv_replay_attention(&p->span, &rule, s->budget, p->want));
    KV_TRY(lockstep(v, s, &rule, p, &all_own));
    KV_TRY(kv_verify_ops(v)->replay_attention(&p->span, &rule, s->budget, p->got));
    if (all_own)
        kv_verify_i32(v, "evict_at", (kv_verify_shape){s->n_kv, s->n, p->span.stride}, p->got,
                      p->want);
out:
    kv_gpu_use_loop_blocks(kv_verify_gpu(v), 0);
    return st;
}

kv_status kv_verify_replay(kv_verify *v) {
    kv_status st = KV_OK;
    problem p = {0};
    const bool small = kv_verify_skips(v, INT32_MAX);
    for (int i = 0; i < SHAPES; i++) {
        shape s = shapes[i];
        if (kv_verify_skips(v, s.n)) continue;
        if (small && s.small_n) s.n = s.small_n, s.budget = s.small_budget;
        KV_TRY(problem_make(&s, &p));
        for (int j = 0; j < RULES; j++) {
            KV_TRY(check(v, &s, &rules[j], block_counts[(i + j) % BLOCKS], &p));
            KV_TRY(kv_interrupt_poll());
        }
        problem_free(&p);
    }
out:
    problem_free(&p);
    return st;
}
