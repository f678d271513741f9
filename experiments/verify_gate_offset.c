/* Verification of the fit of dms' offset: how many keys the queries see under an offset, and the gap between logits around it. Whole
 * numbers and comparisons, so everything must be equal. */
#include <math.h>
#include <string.h>

#include "experiments/verify.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"

enum { DOCUMENTS = 3 };

typedef enum order {
    NORMAL,
    FEW,      /* five values, 0 among them: ties */
    SIGNED_0, /* +0, -0 and a few others */
    DENORMAL,
    HUGE_,
    LOW, /* nothing is marked without an offset */
    ORDERS
} order;
static const char *const order_name[ORDERS] = {"normal",   "few values", "signed 0",
                                               "denormal", "huge",       "low"};

typedef struct shape {
    int32_t lanes, n_doc, n[DOCUMENTS], budget, window, shift;
} shape;
static const shape shapes[] = {
    {1, 1, {1}, 1, 1, 1},
    {1, 1, {1}, 0, 1, 0},
    {3, 1, {2}, 1, 1, 1},
    {8, 1, {257}, 40, 1, 1},
    {2, 1, {257}, 300, 16, 1},
    {5, 2, {130, 100}, 60, 32, 0},
    {3, 3, {1, 200, 31}, 8, 4, 1},
    {12, 1, {4000}, 512, 256, 1},
    {2, 3, {5000, 3, 20000}, 100, 64, 1},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static float logit_of(order kind, uint32_t at) {
    const double x = kv_rand_normal(91, (uint32_t)kind, at, 0, 0);
    switch (kind) {
    case FEW: return (float)fmax(-2, fmin(2, round(x)));
    case SIGNED_0: return x < -0.5 ? -0.0f : x < 0.5 ? 0.0f : (float)(x - 1);
    case DENORMAL: return (float)(x * 0x1p-140);
    case HUGE_: return (float)(x * 1e37);
    case LOW: return (float)(-5 - fabs(x));
    default: return (float)x;
    }
}

static kv_status check(kv_verify *v, const shape *s, const kv_dms_cache *cache, const float *logit,
                       const kv_gpu_buffer *there, double offset) {
    kv_status st = KV_OK;
    const int64_t cells = s->lanes * cache->doc_first[s->n_doc];
    int64_t kept = 0;
    float got[2] = {-INFINITY, INFINITY}, want[2] = {-INFINITY, INFINITY};
    KV_TRY(kv_gpu_gate_kept(kv_verify_gpu(v), cache, s->lanes, there, offset, &kept));
    const int64_t off = kept - kv_dms_kept(cache, s->lanes, logit, offset);
    const int32_t clipped = off > 0 ? 1 : off < 0 ? -1 : 0, zero = 0;
    kv_verify_i32(v, "kept, direction of the difference", (kv_verify_shape){1, 1, 1}, &clipped,
                  &zero);
    KV_TRY(kv_gpu_gate_gap(kv_verify_gpu(v), cells, there, offset, &got[0], &got[1]));
    kv_dms_gap(cells, logit, offset, &want[0], &want[1]);
    kv_verify_f32(v, "gap", (kv_verify_shape){1, 2, 2}, got, want, 0, 0);
out:
    return st;
}

kv_status kv_verify_gate_offset(kv_verify *v) {
    kv_status st = KV_OK;
    kv_gpu_buffer *there = NULL;
    float *logit = NULL;
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        int64_t doc_first[DOCUMENTS + 1] = {0};
        for (int32_t j = 0; j < s->n_doc; j++) doc_first[j + 1] = doc_first[j] + s->n[j];
        const kv_dms_cache cache = {.n_doc = s->n_doc,
                                    .budget = s->budget,
                                    .window = s->window,
                                    .shift = s->shift,
                                    .doc_first = doc_first};
        const size_t cells = (size_t)(s->lanes * doc_first[s->n_doc]);
        if (kv_verify_skips(v, (int32_t)doc_first[s->n_doc])) continue;
        for (order kind = 0; kind < ORDERS; kind++) {
            const double offsets[] = {0, -0.3, 1, 5.5, 1e4, -1e4, 0x1p-141};
            KV_NEW(logit, cells);
            for (size_t c = 0; c < cells; c++) logit[c] = logit_of(kind, (uint32_t)c);
            KV_TRY(kv_verify_send(kv_verify_gpu(v), logit, cells * sizeof *logit, &there));
            for (size_t j = 0; j < sizeof offsets / sizeof *offsets; j++) {
                kv_verify_case(v, "%d lanes, %d documents, %d tokens, %s, offset %g", s->lanes,
                               s->n_doc, (int)doc_first[s->n_doc], order_name[kind], offsets[j]);
                KV_TRY(check(v, s, &cache, logit, there, offsets[j]));
            }
            KV_TRY(kv_gpu_free(there));
            there = NULL;
            free(logit);
            logit = NULL;
            KV_TRY(kv_interrupt_poll());
        }
    }
out:
    (void)kv_gpu_free(there);
    free(logit);
    return st;
}
