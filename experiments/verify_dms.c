/* Verification of dms training: attention under the soft mask forward and backward, gates and their gradients, against the CPU's
 * double-precision functions. */
#include "experiments/verify.h"

#include <math.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/num.h"
#include "reference/core/rand.h"

typedef enum mask {
    RELAXED, /* as in training: most tokens stay, some are weak */
    NONE,    /* nothing is weakened */
    ALL,     /* behind the window nothing is left */
    HARD,    /* a token stays or is gone: log(1 - alpha) = 0 or minus infinity */
} mask;
static const char *const mask_name[] = {"relaxed", "none", "all", "hard"};

typedef struct shape {
    int32_t n_token, first, n, kv_heads, group, dim, window, from, every;
    kv_dtype type;
    mask mask;
    float softcap;
} shape;

static const shape shapes[] = {
    {1, 0, 1, 1, 1, 64, 1, 0, 1, KV_F16, RELAXED, 0},
    {63, 0, 63, 1, 2, 64, 8, 0, 1, KV_F16, RELAXED, 0},
    {64, 0, 64, 2, 1, 64, 1, 0, 1, KV_BF16, RELAXED, 0},
    {65, 0, 65, 1, 3, 128, 16, 0, 1, KV_BF16, RELAXED, 0},
    {300, 0, 300, 2, 4, 64, 32, 0, 1, KV_F16, RELAXED, 0},
    {300, 0, 300, 2, 4, 64, 32, 0, 1, KV_F16, NONE, 0},
    {300, 0, 300, 2, 4, 64, 32, 0, 1, KV_F16, ALL, 0},
    {300, 0, 300, 2, 4, 64, 1, 0, 1, KV_BF16, ALL, 0},
    {300, 0, 300, 2, 4, 64, 32, 0, 1, KV_BF16, HARD, 0},
    {500, 37, 401, 2, 2, 64, 64, 2, 3, KV_F16, RELAXED, 0},
    {500, 100, 400, 1, 8, 128, 65, 0, 4, KV_F16, HARD, 0},
    {700, 13, 640, 1, 1, 128, 256, 1, 2, KV_BF16, RELAXED, 0},
    {300, 10, 290, 2, 2, 64, 32, 1, 2, KV_F32, RELAXED, 0},
    {300, 10, 290, 1, 5, 128, 33, 0, 1, KV_F32, RELAXED, 0},
    {200, 0, 200, 1, 7, 40, 300, 0, 1, KV_F32, RELAXED, 0}, /* the window covers all */
    {200, 0, 200, 1, 6, 80, 16, 0, 1, KV_F16, RELAXED, 3},
    {2048, 0, 2048, 1, 2, 64, 256, 1, 4, KV_F16, RELAXED, 0},
};
enum { SHAPES = sizeof shapes / sizeof *shapes, BLOCK = 64 };

typedef struct problem {
    float *q, *k, *v;          /* [heads][n_token][dim] */
    float *log_keep, *d_o;     /* [kv_heads][n], [q_heads][n][dim] */
    float *o, *dense, *d_keep; /* the GPU's: [q_heads][n][dim], [q_heads][n] */
    float *error;              /* 2 (o - dense) as the GPU formed it */
    double *off;               /* [q_heads][2] */
} problem;

static void problem_free(problem *p) {
    void *owned[] = {p->q, p->k,     p->v,      p->log_keep, p->d_o,
                     p->o, p->dense, p->d_keep, p->error,    p->off};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    *p = (problem){.q = NULL};
}

/* Normal numbers that `type` holds exactly and half precision, for another type, does not. */
static void normal(kv_dtype type, float *x, size_t n, uint32_t stream) {
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)kv_rand_normal(11, (uint32_t)i, stream, 0, 0);
        if (type == KV_F16) x[i] = kv_f16_to_f32(kv_f32_to_f16(x[i]));
        if (type == KV_BF16) x[i] = kv_bf16_to_f32(kv_f32_to_bf16(x[i]));
    }
    if (type == KV_BF16) x[n / 2] = 0x1p-40f;
}

static float log_keep_of(mask kind, int32_t head, int32_t t) {
    const double x = kv_rand_uniform(12, (uint32_t)head, (uint32_t)t, 0, 0);
    double keep;
    switch (kind) {
    case NONE: return 0;
    case ALL: return -1e4f;
    case HARD: return x < .5 ? -INFINITY : 0;
    default: kv_dms_alpha(12 * x - 9, 0, .5, &keep); return (float)keep;
    }
}

static bool counts(const shape *s, int32_t row) {
    const int32_t block = row / BLOCK;
    return block >= s->from && (block - s->from) % s->every == 0;
}

static kv_status problem_make(const shape *s, problem *p) {
    kv_status st = KV_OK;
    const size_t heads = (size_t)(s->kv_heads * s->group), keys = (size_t)s->kv_heads,
                 all = (size_t)s->n_token * (size_t)s->dim, own = (size_t)s->n * (size_t)s->dim;
    KV_NEW(p->q, heads * all);
    KV_NEW(p->k, keys * all);
    KV_NEW(p->v, keys * all);
    KV_NEW(p->log_keep, keys * (size_t)s->n);
    KV_NEW(p->d_o, heads * own);
    KV_NEW(p->o, heads * own);
    KV_NEW(p->dense, heads * own);
    KV_NEW(p->error, heads * own);
    KV_NEW(p->d_keep, heads * (size_t)s->n);
    KV_NEW(p->off, 2 * heads);
    normal(s->type, p->q, heads * all, 1);
    normal(s->type, p->k, keys * all, 2);
    normal(s->type, p->v, keys * all, 3);
    for (int32_t h = 0; h < s->kv_heads; h++)
        for (int32_t t = 0; t < s->n; t++) p->log_keep[h * s->n + t] = log_keep_of(s->mask, h, t);
    for (size_t i = 0; i < heads * own;
         i++) /* of very different sizes; NaN where nobody may look */
        p->d_o[i] = counts(s, (int32_t)(i / (size_t)s->dim) % s->n)
                        ? (float)(exp(6 * sin((double)(i / (size_t)s->dim)) - 9) *
                                  kv_rand_normal(13, (uint32_t)i, 0, 0, 0))
                        : NAN;
out:
    return st;
}

static kv_status gpu_passes(kv_verify *v, const shape *s, problem *p) {
    kv_status st = KV_OK;
    enum { KEEP, D_O, O, DENSE, LSE, D_KEEP, OFF, BUFFERS };
    kv_gpu *g = kv_verify_gpu(v);
    kv_gpu_buffer *b[BUFFERS] = {NULL};
    kv_gpu_span *span = NULL;
    const size_t heads = (size_t)(s->kv_heads * s->group), rows = heads * (size_t)s->n,
                 cells = rows * (size_t)s->dim;
    const kv_span host = {.n_token = s->n_token,
                          .stride = s->n_token,
                          .n_q_head = s->kv_heads * s->group,
                          .n_kv_head = s->kv_heads,
                          .head_dim = s->dim,
                          .q = p->q,
                          .k = p->k,
                          .v = p->v,
                          .scale = (float)(1 / sqrt((double)s->dim)),
                          .softcap = s->softcap};
    const kv_gpu_window w = {
        .first = s->first, .n = s->n, .window = s->window, .from = s->from, .every = s->every};
    KV_TRY(kv_gpu_span_upload(g, &host, true, &span));
    if (kv_gpu_span_type(span) != s->type)
        KV_RAISE(KV_E_INTERNAL, "the span is %s on the GPU, meant to be %s",
                 kv_dtype_name(kv_gpu_span_type(span)), kv_dtype_name(s->type));
    KV_TRY(kv_verify_send(g, p->log_keep, (size_t)(s->kv_heads * s->n) * 4, &b[KEEP]));
    KV_TRY(kv_verify_send(g, p->d_o, cells * 4, &b[D_O]));
    KV_TRY(kv_verify_send(g, p->o, cells * 4, &b[O]));
    KV_TRY(kv_verify_send(g, p->dense, cells * 4, &b[DENSE]));
    KV_TRY(kv_verify_send(g, NULL, rows * 4, &b[LSE]));
    KV_TRY(kv_verify_send(g, NULL, rows * 4, &b[D_KEEP]));
    KV_TRY(kv_verify_send(g, NULL, 2 * heads * 8, &b[OFF]));
    KV_TRY(kv_gpu_soft_attend(span, &w, b[KEEP], b[O], b[DENSE], b[LSE]));
    KV_TRY(kv_gpu_soft_backward(span, &w, b[KEEP], b[O], b[LSE], b[D_O], b[D_KEEP]));
    KV_TRY(kv_gpu_get(b[O], p->o, cells * 4));
    KV_TRY(kv_gpu_get(b[DENSE], p->dense, cells * 4));
    KV_TRY(kv_gpu_get(b[D_KEEP], p->d_keep, rows * 4));
    KV_TRY(kv_gpu_soft_match(span, &w, b[O], b[DENSE], b[OFF]));
    KV_TRY(kv_gpu_get(b[DENSE], p->error, cells * 4));
    KV_TRY(kv_gpu_get(b[OFF], p->off, 2 * heads * 8));
out:
    kv_gpu_span_free(span);
    for (int i = 0; i < BUFFERS; i++) {
        const kv_status freed = kv_gpu_free(b[i]);
        if (st == KV_OK) st = freed;
    }
    return st;
}

static double *widen(const float *x, size_t n) {
    double *out = kv_mem_new(n, sizeof *out);
    for (size_t i = 0; out && i < n; i++) out[i] = (double)x[i];
    return out;
}

typedef struct wide { /* what the reference works on, one query head */
    double *q, *k, *v, *log_keep, *d_o, *o, *dense, *p, *scratch, *d_keep;
} wide;

static void wide_free(wide *w) {
    double *owned[] = {w->q, w->k,     w->v, w->log_keep, w->d_o,
                       w->o, w->dense, w->p, w->scratch,  w->d_keep};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
}

/* One row of outputs, forward; the errors formed from the GPU's own outputs, exactly. */
static void compare_block(kv_verify *v, const shape *s, const problem *p, const wide *w,
                          int32_t head, int32_t first, int32_t rows, double *off) {
    for (int32_t i = 0; i < rows * s->dim; i++) {
        const size_t at =
            ((size_t)head * (size_t)s->n + (size_t)first) * (size_t)s->dim + (size_t)i;
        const float o = (float)w->o[i], dense = (float)w->dense[i],
                    error = 2 * (p->o[at] - p->dense[at]);
        const kv_verify_shape one = {1, 1, 1};
        kv_verify_f32(v, "o", one, &p->o[at], &o, 1e-6, 1e-5);
        kv_verify_f32(v, "dense", one, &p->dense[at], &dense, 1e-6, 1e-5);
        kv_verify_f32(v, "error", one, &p->error[at], &error, 0, 0);
        off[0] += (double)error * (double)error / 4;
        off[1] += (double)p->dense[at] * (double)p->dense[at];
    }
}

static kv_status compare_head(kv_verify *v, const shape *s, const problem *p, int32_t head) {
    kv_status st = KV_OK;
    const int32_t kv = head / s->group;
    const size_t n = (size_t)s->n, dim = (size_t)s->dim, all = (size_t)s->n_token * dim,
                 skip = (size_t)s->first * dim;
    double off[2] = {0, 0}, top = 1e-12;
    float *want = NULL;
    wide w = {.q = widen(p->q + (size_t)head * all + skip, n * dim),
              .k = widen(p->k + (size_t)kv * all + skip, n * dim),
              .v = widen(p->v + (size_t)kv * all + skip, n * dim),
              .log_keep = widen(p->log_keep + (size_t)kv * n, n),
              .d_o = widen(p->d_o + (size_t)head * n * dim, n * dim)};
    if (!w.q || !w.k || !w.v || !w.log_keep || !w.d_o) KV_RAISE(KV_E_INTERNAL, "out of memory");
    KV_NEW(w.o, BLOCK * dim);
    KV_NEW(w.dense, BLOCK * dim);
    KV_NEW(w.p, BLOCK * n);
    KV_NEW(w.scratch, BLOCK * n);
    KV_NEW(w.d_keep, n);
    KV_NEW(want, n);
    const kv_dms_head_f64 h = {.n = s->n,
                               .dim = s->dim,
                               .window = s->window,
                               .q = w.q,
                               .k = w.k,
                               .v = w.v,
                               .q_stride = s->dim,
                               .kv_stride = s->dim,
                               .scale = (double)(float)(1 / sqrt((double)s->dim)),
                               .softcap = (double)s->softcap,
                               .log_keep = w.log_keep};
    for (int32_t first = 0; first < s->n; first += BLOCK) {
        const int32_t rows = s->n - first < BLOCK ? s->n - first : BLOCK;
        if (!counts(s, first)) continue;
        kv_dms_rows_f64(&h, first, rows, w.o, w.dense, w.p, w.scratch);
        kv_dms_rows_backward_f64(&h, first, rows, w.p, w.o, w.d_o + (size_t)first * dim, w.scratch,
                                 w.d_keep);
        compare_block(v, s, p, &w, head, first, rows, off);
    }
    for (size_t t = 0; t < n; t++) {
        want[t] = (float)w.d_keep[t];
        top = fmax(top, fabs(w.d_keep[t]));
    }
    kv_verify_f32(v, "d log keep", (kv_verify_shape){1, s->n, s->n}, p->d_keep + (size_t)head * n,
                  want, 1e-6, 4e-5 * top);
    kv_verify_f64(v, "squared error", (kv_verify_shape){1, 2, 2}, p->off + 2 * head, off, 1e-12, 0);
out:
    wide_free(&w);
    free(want);
    return st;
}

kv_status kv_verify_soft_mask(kv_verify *v) {
    kv_status st = KV_OK;
    problem p = {.q = NULL};
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        if (kv_verify_skips(v, s->n_token)) continue;
        kv_verify_case(v,
                       "[%d, %d) of %d tokens, %d heads of %d, d %d, window %d, blocks %d + %d, "
                       "%s, mask %s%s",
                       s->first, s->first + s->n, s->n_token, s->kv_heads, s->group, s->dim,
                       s->window, s->from, s->every, kv_dtype_name(s->type), mask_name[s->mask],
                       s->softcap > 0 ? ", capped" : "");
        KV_TRY(problem_make(s, &p));
        KV_TRY(gpu_passes(v, s, &p));
        for (int32_t head = 0; head < s->kv_heads * s->group; head++)
            KV_TRY(compare_head(v, s, &p, head));
        problem_free(&p);
        KV_TRY(kv_interrupt_poll());
    }
out:
    problem_free(&p);
    return st;
}
