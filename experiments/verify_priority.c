/* Verification of the priorities that follow from the keys alone (knorm, keydiff): the same sums in the same order, so the same bits. */
#include <math.h>
#include <string.h>

#include "experiments/verify.h"
#include "reference/core/mem.h"
#include "reference/core/num.h"
#include "reference/core/rand.h"
#include "reference/priority.h"

typedef enum values {
    HALF,     /* normal, rounded to half */
    BFLOAT,   /* normal, rounded to bfloat16 */
    SINGLE,   /* normal, fp32 */
    MIXED,    /* fp32 of all sizes, channels of one key 2^40 apart */
    FEW,      /* four different keys: ties everywhere */
    ZEROS,    /* +0 and -0, a unit key now and then */
    DENORMAL, /* fp32 denormals alone: norms round to denormals */
    HUGE_,    /* near the largest fp32: norms overflow to infinity */
    OPPOSED,  /* each key minus the last: the mean direction cancels */
    VALUES
} values;
static const char *const value_name[VALUES] = {"half",  "bfloat16", "fp32", "mixed",  "four keys",
                                               "zeros", "denormal", "huge", "opposed"};

typedef struct shape {
    int32_t n, heads, group, d, pad; /* pad: tokens of the stride behind the document */
} shape;
/* 4096 tokens are summed at once; 32 tokens and 32 channels make a tile. */
static const shape shapes[] = {
    {1, 1, 1, 64, 0},    {2, 3, 2, 128, 1},   {31, 2, 8, 5, 3},    {32, 1, 4, 32, 0},
    {33, 4, 1, 33, 2},   {64, 2, 5, 1, 0},    {65, 8, 3, 80, 1},   {130, 3, 7, 127, 0},
    {257, 2, 6, 48, 5},  {1000, 2, 1, 64, 0}, {4095, 1, 1, 64, 0}, {4097, 2, 1, 128, 3},
    {9001, 2, 2, 64, 1},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static float value(values kind, uint32_t h, uint32_t t, uint32_t c) {
    if (kind == FEW) t %= 4;
    const double x = kv_rand_normal(81, (uint32_t)kind, h, kind == OPPOSED ? t / 2 : t, c);
    switch (kind) {
    case BFLOAT: return kv_bf16_to_f32(kv_f32_to_bf16((float)x));
    case SINGLE: return (float)x;
    case MIXED: return (float)(x * pow(2, (int)(c * 7 + t) % 41 - 20));
    case ZEROS: return t % 5 == 3 && c == t % 3 ? -1.0f : x < 0 ? -0.0f : 0.0f;
    case DENORMAL: return (float)(x * 0x1p-141);
    case HUGE_: return (float)(x < 0 ? fmax(x, -1) : fmin(x, 1)) * 0x1.fffffep127f;
    case OPPOSED: return (float)(t % 2 ? -x : x);
    default: return kv_f16_to_f32(kv_f32_to_f16((float)x));
    }
}

typedef struct problem {
    kv_span span;
    float *q, *k, *got, *want;
} problem;

static void problem_free(problem *p) {
    free(p->q);
    free(p->k);
    free(p->got);
    free(p->want);
    memset(p, 0, sizeof *p);
}

/* What lies behind the document is NaN. */
static kv_status problem_make(const shape *s, values kind, problem *p) {
    kv_status st = KV_OK;
    const int64_t stride = s->n + s->pad, q_heads = s->heads * s->group;
    KV_NEW(p->q, q_heads * stride * s->d);
    KV_NEW(p->k, s->heads * stride * s->d);
    KV_NEW(p->got, s->heads * stride);
    KV_NEW(p->want, s->heads * stride);
    for (int64_t i = 0; i < q_heads * stride * s->d; i++)
        p->q[i] = i / s->d % stride < s->n ? 0.25f : NAN;
    for (int64_t i = 0; i < s->heads * stride * s->d; i++) {
        const int64_t t = i / s->d % stride, h = i / s->d / stride;
        p->k[i] = t < s->n ? value(kind, (uint32_t)h, (uint32_t)t, (uint32_t)(i % s->d)) : NAN;
    }
    p->span = (kv_span){.n_token = s->n,
                        .stride = stride,
                        .n_q_head = (int32_t)q_heads,
                        .n_kv_head = s->heads,
                        .head_dim = s->d,
                        .q = p->q,
                        .k = p->k,
                        .v = p->k,
                        .scale = 1};
out:
    return st;
}

/* lead < 0: norms. */
static kv_status compute(const kv_ops *ops, const kv_span *span, int32_t lead, float *out) {
    return lead < 0 ? ops->norm_priorities(span, out) : ops->cosine_priorities(span, lead, out);
}

static kv_status check(kv_verify *v, problem *p, int32_t lead, bool hold) {
    kv_status st = KV_OK;
    const kv_ops *ops = kv_verify_ops(v);
    const kv_verify_shape rows = {p->span.n_kv_head, p->span.n_token, p->span.stride};
    const size_t cells = (size_t)p->span.n_kv_head * (size_t)p->span.stride;
    for (size_t i = 0; i < cells; i++) p->got[i] = p->want[i] = -7;
    KV_TRY(compute(&kv_ops_cpu, &p->span, lead, p->want));
    if (hold) KV_TRY(ops->hold(&p->span));
    KV_TRY(compute(ops, &p->span, lead, p->got));
    kv_verify_bits(v, "priority", rows, p->got, p->want);
out:
    ops->release(&p->span);
    return st;
}

static kv_status check_all(kv_verify *v, bool cosines) {
    kv_status st = KV_OK;
    problem p = {.q = NULL};
    const bool small = kv_verify_skips(v, INT32_MAX);
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        if (kv_verify_skips(v, s->n)) continue;
        const int32_t leads[] = {0, 1, s->n / 3, s->n - 1, s->n};
        for (values kind = 0; kind < VALUES; kind++) {
            /* The largest shapes, and all of a small run, take the leads in turn. */
            const bool in_turn = small || s->n > 2000;
            KV_TRY(problem_make(s, kind, &p));
            for (size_t j = 0; j < (cosines ? sizeof leads / sizeof *leads : 1); j++) {
                if (cosines && in_turn && j != ((size_t)i + kind) % 5) continue;
                kv_verify_case(v, "n %d, %d heads of %d, group %d, %s, lead %d", s->n, s->heads,
                               s->d, s->group, value_name[kind], cosines ? leads[j] : -1);
                KV_TRY(check(v, &p, cosines ? leads[j] : -1, kind % 2));
            }
            problem_free(&p);
            KV_TRY(kv_interrupt_poll());
        }
    }
out:
    problem_free(&p);
    return st;
}

kv_status kv_verify_norms(kv_verify *v) { return check_all(v, false); }

kv_status kv_verify_cosines(kv_verify *v) { return check_all(v, true); }
