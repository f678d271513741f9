/* Spans for tests. */
#include "tests/naive/naive_case.h"

#include <math.h>
#include <stdlib.h>

#include "reference/core/rand.h"

static float *poisoned(int64_t n) {
    float *x = malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = NAN;
    return x;
}

static naive_case shaped(int32_t n_token, int64_t stride, int32_t n_q_head, int32_t n_kv_head,
                         int32_t head_dim) {
    naive_case c = {.span = {.n_token = n_token,
                             .stride = stride,
                             .n_q_head = n_q_head,
                             .n_kv_head = n_kv_head,
                             .head_dim = head_dim,
                             .scale = (float)(1 / sqrt(head_dim)),
                             .n_layer = 1}};
    c.span.q = c.q = poisoned(n_q_head * stride * head_dim);
    c.span.k = c.k = poisoned(n_kv_head * stride * head_dim);
    c.span.v = c.v = poisoned(n_kv_head * stride * head_dim);
    return c;
}

static void fill_normal(float *x, int32_t n_head, const kv_span *s, double spread, uint64_t seed,
                        uint32_t which) {
    for (int32_t h = 0; h < n_head; h++)
        for (int32_t t = 0; t < s->n_token; t++)
            for (int32_t c = 0; c < s->head_dim; c++)
                x[(h * s->stride + t) * s->head_dim + c] =
                    (float)(spread *
                            kv_rand_normal(seed, (uint32_t)h, (uint32_t)t, (uint32_t)c, which));
}

naive_case naive_case_random(uint64_t seed, int32_t n_token, int64_t stride, int32_t n_q_head,
                             int32_t n_kv_head, int32_t head_dim, double spread) {
    naive_case c = shaped(n_token, stride, n_q_head, n_kv_head, head_dim);
    fill_normal(c.q, n_q_head, &c.span, spread, seed, 0);
    fill_normal(c.k, n_kv_head, &c.span, spread, seed, 1);
    fill_normal(c.v, n_kv_head, &c.span, 1, seed, 2);
    return c;
}

naive_case naive_case_golden(void) {
    naive_case c = shaped(24, 24, 4, 2, 4);
    for (int32_t t = 0; t < 24; t++)
        for (int32_t j = 0; j < 4; j++) {
            for (int32_t h = 0; h < 2; h++) {
                c.k[(h * 24 + t) * 4 + j] = (float)(1.5 * sin(.7 * t + 1.1 * j + .9 * h));
                c.v[(h * 24 + t) * 4 + j] = (float)cos(.4 * t - .9 * j + .5 * h);
            }
            for (int32_t i = 0; i < 4; i++)
                c.q[(i * 24 + t) * 4 + j] =
                    (float)(1.5 * cos(.5 * t + .8 * j + 1.7 * (i % 2) + .6 * (i / 2)));
        }
    return c;
}

void naive_case_free(naive_case *c) {
    free(c->q);
    free(c->k);
    free(c->v);
}

int32_t naive_case_row(const char *text, int32_t n, int32_t *out) {
    int32_t i = 0;
    for (; i < n; i++) {
        while (*text == ' ') text++;
        if (*text == '\0') break;
        char *end;
        out[i] = *text == '-' ? KV_NEVER : (int32_t)strtol(text, &end, 10);
        text = *text == '-' ? text + 1 : end;
    }
    return i;
}
