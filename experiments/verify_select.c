/* Verification of ranks and running cutoffs: integer results from the same floats, so everything must be equal. */
#include "experiments/verify.h"

#include <math.h>

#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "reference/select.h"

typedef enum order {
    UNIFORM,
    FEW,      /* five values: ties everywhere */
    SAME,     /* one value */
    SIGNED_0, /* +0, -0 and a few others */
    DENORMAL,
    INFINITE, /* both infinities among numbers */
    RISING,   /* every arrival replaces a key */
    FALLING,  /* none does */
    NOISY,    /* rising with noise, as a decay gives */
    ORDERS
} order;
static const char *const order_name[ORDERS] = {"uniform",  "few values", "one value",
                                               "signed 0", "denormal",   "infinities",
                                               "rising",   "falling",    "noisy"};

typedef struct shape {
    int32_t n, heads, sinks, window, pad;
} shape;
/* 16384 is the longest document that one block sorts. */
static const shape shapes[] = {
    {1, 1, 4, 256, 0},     {2, 3, 0, 1, 1},       {3, 2, 1, 1, 0},        {31, 2, 0, 1, 2},
    {32, 5, 2, 3, 0},      {33, 8, 4, 8, 5},      {300, 3, 0, 299, 0},    {300, 3, 4, 300, 1},
    {1000, 7, 4, 64, 3},   {1023, 4, 0, 1, 0},    {1025, 2, 100, 256, 0}, {4097, 3, 4, 256, 1},
    {16383, 2, 4, 256, 0}, {16384, 5, 4, 256, 0}, {16385, 3, 4, 256, 2},  {70000, 2, 4, 256, 0},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static float priority_of(order kind, int32_t h, int32_t t) {
    const double x = kv_rand_uniform(31, (uint32_t)kind, (uint32_t)h, (uint32_t)t, 0);
    switch (kind) {
    case FEW: return (float)floor(5 * x);
    case SAME: return 1.5f;
    case SIGNED_0: return x < 0.4 ? 0.0f : x < 0.8 ? -0.0f : (float)(x - 0.9);
    case DENORMAL: return (float)((x - 0.5) * 0x1p-138);
    case INFINITE: return x < 0.1 ? INFINITY : x > 0.9 ? -INFINITY : (float)x;
    case RISING: return (float)t;
    case FALLING: return (float)-t;
    case NOISY: return (float)(t * 1e-4 + x);
    default: return (float)(x - 0.5);
    }
}

static kv_status check(kv_verify *v, const shape *s, order kind, int32_t k) {
    kv_status st = KV_OK;
    const int64_t stride = s->n + s->pad;
    const size_t cells = (size_t)s->heads * (size_t)stride;
    const kv_run run = {.budget = s->sinks + s->window + k, .sinks = s->sinks, .window = s->window};
    const kv_span span = {
        .n_token = s->n, .stride = stride, .n_q_head = s->heads, .n_kv_head = s->heads};
    float *priority = NULL;
    int32_t *got = NULL, *want = NULL;
    kv_verify_case(v, "n %d, %d heads, sinks %d, window %d, k %d, %s", s->n, s->heads, s->sinks,
                   s->window, k, order_name[kind]);
    KV_NEW(priority, cells);
    KV_NEW(got, cells);
    KV_NEW(want, cells);
    for (int32_t h = 0; h < s->heads; h++)
        for (int32_t t = 0; t < stride; t++) {
            const size_t at = (size_t)h * (size_t)stride + (size_t)t;
            priority[at] = t < s->n ? priority_of(kind, h, t) : NAN;
            got[at] = -7;
        }
    KV_TRY(kv_select(&span, &run, priority, want));
    KV_TRY(kv_verify_ops(v)->select(&span, &run, priority, got));
    kv_verify_i32(v, "evict_at", (kv_verify_shape){s->heads, s->n, stride}, got, want);
out:
    free(priority);
    free(got);
    free(want);
    return st;
}

kv_status kv_verify_select(kv_verify *v) {
    kv_status st = KV_OK;
    const bool small = kv_verify_skips(v, INT32_MAX);
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        if (kv_verify_skips(v, s->n)) continue;
        const int32_t rest = s->n - s->sinks - s->window, most = rest > 0 ? rest : 0;
        const int32_t k[] = {0, 1, 2, most / 8, most / 2, most - 1, most, most + 1};
        for (size_t j = 0; j < sizeof k / sizeof *k; j++)
            for (order kind = 0; kind < ORDERS; kind++) {
                /* The largest shapes, and all of a small run, take the orders in turn. */
                const bool in_turn = small || s->n > 5000;
                if (k[j] < 0 || (in_turn && (size_t)kind % 4 != j % 4)) continue;
                KV_TRY(check(v, s, kind, k[j]));
                KV_TRY(kv_interrupt_poll());
            }
    }
out:
    return st;
}
