/* Verification of the model on the device: weight products, and the embedded model's forward pass. */
#include "experiments/verify.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "experiments/cli.h"
#include "reference/core/mem.h"
#include "reference/core/num.h"
#include "reference/core/rand.h"
#include "reference/model.h"
#include "traces/model_load.h"

typedef struct product {
    int32_t m, n, k;
    kv_dtype type;
} product;
static const product products[] = {
    {1, 1, 1, KV_F32},      {1, 5, 3, KV_F16},        {7, 1, 64, KV_BF16},
    {3, 5, 7, KV_F32},      {64, 64, 64, KV_BF16},    {65, 63, 130, KV_F16},
    {257, 130, 66, KV_F32}, {300, 768, 256, KV_BF16}, {2, 1000, 512, KV_F16},
    {129, 256, 1, KV_BF16},
};
enum { PRODUCTS = sizeof products / sizeof *products };

/* x [rows][cols] normal; returns the largest norm of a row. */
static double fill(float *x, int32_t rows, int32_t cols, uint32_t seed) {
    double top = 0;
    for (int32_t i = 0; i < rows; i++) {
        double sum = 0;
        for (int32_t j = 0; j < cols; j++) {
            const double y = kv_rand_normal(51, seed, (uint32_t)i, (uint32_t)j, 0);
            x[(size_t)i * (size_t)cols + (size_t)j] = (float)y;
            sum += y * y;
        }
        top = fmax(top, sqrt(sum));
    }
    return top;
}

static kv_status check_product(kv_verify *v, const product *p) {
    kv_status st = KV_OK;
    const size_t m = (size_t)p->m, n = (size_t)p->n, k = (size_t)p->k;
    float *a = NULL, *wide = NULL, *got = NULL, *want = NULL;
    char *w = NULL;
    KV_NEW(a, m * k);
    KV_NEW(wide, n * k);
    KV_NEW(w, n * k * 4);
    KV_NEW(got, m * n);
    KV_NEW(want, m * n);
    /* The same address with other contents: a stale copy on the device would show. */
    for (uint32_t round = 0; round < 2; round++) {
        kv_verify_case(v, "%d x %d x %d %s, weights %u", p->m, p->n, p->k, kv_dtype_name(p->type),
                       round);
        const double norm = fill(a, p->m, p->k, 2 * round) * fill(wide, p->n, p->k, 2 * round + 1);
        if (p->type == KV_F32)
            memcpy(w, wide, n * k * 4);
        else
            kv_narrow(p->type, wide, w, n * k);
        KV_TRY(kv_linear(p->m, p->n, p->k, a, p->type, w, want));
        KV_TRY(kv_verify_ops(v)->linear(p->m, p->n, p->k, a, p->type, w, got));
        kv_verify_f32(v, "c", (kv_verify_shape){p->m, p->n, p->n}, got, want, 0, 4e-7 * norm);
    }
out:
    free(a);
    free(wide);
    free(w);
    free(got);
    free(want);
    return st;
}

kv_status kv_verify_linear(kv_verify *v) {
    kv_status st = KV_OK;
    for (int i = 0; i < PRODUCTS; i++) KV_TRY(check_product(v, &products[i]));
out:
    return st;
}

/* What a forward pass showed: sampled outputs of each layer's inputs to attention, and all logits. */
typedef struct seen {
    const kv_ops *ops;
    float *logits;        /* [n][vocab] */
    float *q, *k, *v, *x; /* [n_layer] blocks of q, k, v, hidden of the last token */
    int32_t vocab;
} seen;

static void last_rows(const float *from, int32_t heads, const kv_span *s, float *to) {
    const size_t d = (size_t)s->head_dim, stride = (size_t)s->stride;
    for (size_t h = 0; h < (size_t)heads; h++)
        memcpy(to + h * d, from + (h * stride + (size_t)s->n_token - 1) * d, d * sizeof *to);
}

static kv_status attend(void *context, const kv_span *s, float *o) {
    seen *to = context;
    const size_t layer = (size_t)s->layer_id, d = (size_t)s->head_dim, nq = (size_t)s->n_q_head * d,
                 nkv = (size_t)s->n_kv_head * d, dm = (size_t)s->d_model;
    last_rows(s->q, s->n_q_head, s, to->q + layer * nq);
    last_rows(s->k, s->n_kv_head, s, to->k + layer * nkv);
    last_rows(s->v, s->n_kv_head, s, to->v + layer * nkv);
    memcpy(to->x + layer * dm, s->hidden + (size_t)(s->n_token - 1) * dm, dm * sizeof *to->x);
    return to->ops->attend(s, o, NULL);
}

static kv_status logits(void *context, int32_t first, int32_t n, const float *values) {
    seen *to = context;
    const size_t vocab = (size_t)to->vocab;
    memcpy(to->logits + (size_t)first * vocab, values, (size_t)n * vocab * sizeof *values);
    return KV_OK;
}

static kv_status seen_make(const kv_model_config *c, int32_t n, const kv_ops *ops, seen *s) {
    kv_status st = KV_OK;
    const size_t layers = (size_t)c->n_layer, d = (size_t)c->head_dim;
    s->ops = ops;
    s->vocab = c->vocab;
    KV_NEW(s->logits, (size_t)n * (size_t)c->vocab);
    KV_NEW(s->q, layers * (size_t)c->n_q_head * d);
    KV_NEW(s->k, layers * (size_t)c->n_kv_head * d);
    KV_NEW(s->v, layers * (size_t)c->n_kv_head * d);
    KV_NEW(s->x, layers * (size_t)c->d_model);
out:
    return st;
}

static void seen_free(seen *s) {
    free(s->logits);
    free(s->q);
    free(s->k);
    free(s->v);
    free(s->x);
    memset(s, 0, sizeof *s);
}

static int32_t best_of(const float *x, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* Predictions that differ: near ties when the two logits of the CPU are as close as the logits agree. */
static void compare_predictions(kv_verify *v, const seen *got, const seen *want, int32_t n,
                                double tolerance) {
    int64_t near = 0, wrong = 0;
    for (int32_t t = 0; t < n; t++) {
        const float *a = got->logits + (size_t)t * (size_t)got->vocab,
                    *b = want->logits + (size_t)t * (size_t)want->vocab;
        const int32_t x = best_of(a, got->vocab), y = best_of(b, want->vocab);
        if (x == y) continue;
        if ((double)b[y] - (double)b[x] <= 2 * tolerance)
            near++;
        else
            wrong++;
    }
    kv_verify_decisions(v, "predictions", n, near, wrong);
}

static kv_status check_forward(kv_verify *v, const kv_model *model, int32_t n, bool scattered) {
    kv_status st = KV_OK;
    const kv_model_config *c = &model->config;
    const kv_ops *ops[2] = {kv_verify_ops(v), &kv_ops_cpu};
    seen s[2] = {{0}, {0}};
    int32_t *token = NULL, *position = NULL;
    /* Six layers of fp32 sums in another order: an absolute part, and one that grows with the residual stream. */
    const double tolerance = 2e-3, relative = 1e-4;
    KV_NEW(token, n);
    KV_NEW(position, n);
    for (int32_t t = 0; t < n; t++) {
        token[t] = (int32_t)(kv_rand(61, (uint32_t)t, 0, 0, 0).v[0] % (uint32_t)c->vocab);
        position[t] = scattered ? 3 * t + 5 : t;
    }
    kv_verify_case(v, "%d tokens%s", n, scattered ? ", own positions" : "");
    for (int i = 0; i < 2; i++) {
        KV_TRY(seen_make(c, n, ops[i], &s[i]));
        const kv_model_hooks hooks = {
            .context = &s[i], .attend = attend, .logits = logits, .ops = ops[i]};
        KV_TRY(kv_model_forward(model, token, scattered ? position : NULL, n, &hooks));
    }
    const int32_t nq = c->n_q_head * c->head_dim, nkv = c->n_kv_head * c->head_dim;
    kv_verify_f32(v, "q", (kv_verify_shape){c->n_layer, nq, nq}, s[0].q, s[1].q, relative,
                  tolerance);
    kv_verify_f32(v, "k", (kv_verify_shape){c->n_layer, nkv, nkv}, s[0].k, s[1].k, relative,
                  tolerance);
    kv_verify_f32(v, "v", (kv_verify_shape){c->n_layer, nkv, nkv}, s[0].v, s[1].v, relative,
                  tolerance);
    kv_verify_f32(v, "hidden", (kv_verify_shape){c->n_layer, c->d_model, c->d_model}, s[0].x,
                  s[1].x, relative, tolerance);
    kv_verify_f32(v, "logits", (kv_verify_shape){n, c->vocab, c->vocab}, s[0].logits, s[1].logits,
                  relative, tolerance);
    compare_predictions(v, &s[0], &s[1], n, tolerance);
out:
    seen_free(&s[0]);
    seen_free(&s[1]);
    free(token);
    free(position);
    return st;
}

kv_status kv_verify_forward(kv_verify *v) {
    kv_status st = KV_OK;
    char folder[4200];
    kv_model *model = NULL;
    snprintf(folder, sizeof folder, "%.4096s/traces/model", kv_cli_home());
    KV_TRY(kv_model_load(folder, &model));
    KV_TRY(check_forward(v, model, 1, false));
    KV_TRY(check_forward(v, model, 200, true));
    if (!kv_verify_skips(v, 2500)) KV_TRY(check_forward(v, model, 2500, false));
out:
    kv_model_free(model);
    return st;
}
