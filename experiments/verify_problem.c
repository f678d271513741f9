/* Shapes, values and spans of verify_problem.h. */
#include "experiments/verify_problem.h"

#include <math.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/rand.h"

const kv_verify_attention_shape kv_verify_attention_shapes[] = {
    {"one token", 1, 2, 1, 64, 4, 256, 0, KV_VALUES_HALF, 0},
    {"two tokens, window 1", 2, 2, 1, 128, 0, 1, 3, KV_VALUES_HALF, 0},
    {"63", 63, 4, 2, 64, 2, 8, 1, KV_VALUES_GRID, 0},
    {"64", 64, 4, 1, 128, 2, 8, 0, KV_VALUES_GRID, 0},
    {"65", 65, 3, 1, 64, 4, 16, 7, KV_VALUES_HALF, 0},
    {"127 d128", 127, 8, 1, 128, 1, 5, 1, KV_VALUES_HALF, 0},
    {"129 no sinks", 129, 8, 2, 64, 0, 3, 0, KV_VALUES_GRID, 0},
    {"255 group 1", 255, 3, 3, 128, 4, 32, 2, KV_VALUES_BFLOAT, 0},
    {"257 group 2", 257, 4, 2, 64, 130, 40, 0, KV_VALUES_HALF, 0},
    {"300 group 5", 300, 5, 1, 64, 4, 64, 4, KV_VALUES_BFLOAT, 0},
    {"513 group 4 d128", 513, 8, 2, 128, 4, 100, 0, KV_VALUES_HALF, 0},
    {"640 group 7", 640, 7, 1, 64, 4, 256, 0, KV_VALUES_GRID, 0},
    {"1000 window over all", 1000, 4, 1, 64, 4, 1000, 0, KV_VALUES_HALF, 0},
    {"1023 d128 grid", 1023, 4, 1, 128, 4, 256, 1, KV_VALUES_GRID, 0},
    {"400 d48", 400, 2, 1, 48, 4, 20, 3, KV_VALUES_HALF, 0},
    {"200 d80", 200, 4, 2, 80, 4, 20, 0, KV_VALUES_BFLOAT, 0},
    {"333 fp32", 333, 4, 2, 64, 4, 30, 0, KV_VALUES_SINGLE, 0},
    {"270 fp32 d128", 270, 2, 1, 128, 4, 30, 2, KV_VALUES_SINGLE, 0},
    {"350 softcap", 350, 4, 2, 64, 4, 30, 0, KV_VALUES_HALF, 5.0f},
    {"350 huge", 350, 4, 2, 64, 4, 30, 0, KV_VALUES_HUGE, 0},
    {"500 ties", 500, 4, 2, 64, 4, 30, 0, KV_VALUES_TIES, 0},
    {"500 ties d128", 500, 2, 1, 128, 0, 1, 0, KV_VALUES_TIES, 0},
    {"300 zeros", 300, 4, 2, 64, 4, 30, 0, KV_VALUES_ZEROS, 0},
    {"300 denormals", 300, 4, 2, 64, 4, 30, 0, KV_VALUES_DENORMAL, 0},
};
const int kv_verify_attention_count =
    sizeof kv_verify_attention_shapes / sizeof *kv_verify_attention_shapes;

void kv_verify_problem_free(kv_verify_problem *p) {
    free(p->q);
    free(p->k);
    free(p->v);
    memset(p, 0, sizeof *p);
}

static float value(kv_verify_values kind, uint32_t array, uint32_t head, uint32_t t, uint32_t c) {
    const double x = kv_rand_normal(11, array, head, t, c);
    switch (kind) {
    case KV_VALUES_GRID: return (float)(round(fmax(-15, fmin(15, 4 * x))) / 8);
    case KV_VALUES_BFLOAT: return kv_bf16_to_f32(kv_f32_to_bf16((float)x));
    case KV_VALUES_SINGLE: return (float)x;
    case KV_VALUES_HUGE: return kv_f16_to_f32(kv_f32_to_f16((float)(9 * x)));
    case KV_VALUES_TIES:
        return array == 1 ? value(KV_VALUES_GRID, 9, head, kv_rand(5, head, t, 0, 0).v[0] % 4, c)
                          : value(KV_VALUES_GRID, array + 10, head, t, c);
    case KV_VALUES_ZEROS: return array == 2 ? (float)round(4 * x) : x < 0 ? -0.0f : 0.0f;
    case KV_VALUES_DENORMAL: return kv_f16_to_f32(kv_f32_to_f16((float)(t % 3 ? x * 0x1p-20 : x)));
    default: return kv_f16_to_f32(kv_f32_to_f16((float)x));
    }
}

/* Fills valid tokens, returns the largest row norm, *v_max the largest element; what lies behind the document is NaN. */
static double fill(float *x, const kv_verify_attention_shape *s, uint32_t array, int32_t heads,
                   int64_t stride, double *v_max) {
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

kv_status kv_verify_problem_make(const kv_verify_attention_shape *s, kv_verify_problem *p) {
    kv_status st = KV_OK;
    const int64_t stride = s->n + s->pad;
    const size_t cell = (size_t)stride * (size_t)s->d;
    memset(p, 0, sizeof *p);
    KV_NEW(p->q, (size_t)s->n_q * cell);
    KV_NEW(p->k, (size_t)s->n_kv * cell);
    KV_NEW(p->v, (size_t)s->n_kv * cell);
    const float scale = s->values == KV_VALUES_GRID || s->values == KV_VALUES_TIES
                            ? 0.125f
                            : 1 / sqrtf((float)s->d);
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

double kv_verify_probability_error(double logit) { return 3e-6 + 3e-7 * logit; }
