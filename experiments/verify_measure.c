/* The sums behind the metrics on the device from arrays of the host, so that both sides add up the same numbers. */
#include <string.h>

#include "experiments/verify.h"
#include "reference/core/mem.h"
#include "reference/metrics.h"
#include "reference/target.h"

enum {
    DENSE_LSE,
    LONG_MASS,
    TOP_P,
    TOP_T,
    DENSE_O,
    LSE,
    LSE_LONG,
    O,
    EVICT,
    ORACLE,
    OWN,
    MASS,
    KIND,
    BUFFERS
};

/* Rows [heads][stride] of `width` bytes a token -> [heads][n_token] on the device. from NULL: nothing. */
static kv_status send(kv_gpu *g, const kv_span *span, int32_t heads, size_t width, const void *from,
                      kv_gpu_buffer **to) {
    kv_status st = KV_OK;
    const size_t row = (size_t)span->n_token * width, pitch = (size_t)span->stride * width;
    char *packed = NULL;
    if (!from) return KV_OK;
    KV_NEW(packed, (size_t)heads * row);
    for (int32_t h = 0; h < heads; h++)
        memcpy(packed + (size_t)h * row, (const char *)from + (size_t)h * pitch, row);
    KV_TRY(kv_gpu_new(g, (size_t)heads * row, to));
    KV_TRY(kv_gpu_put(*to, packed, (size_t)heads * row));
out:
    free(packed);
    return st;
}

kv_status kv_verify_measure(kv_gpu *g, const kv_run *run, const kv_metrics_item *item,
                            kv_layer_sums *sums) {
    kv_status st = KV_OK;
    const kv_span *s = item->span;
    const kv_dense *d = item->dense;
    const kv_masked *m = item->masked;
    const int32_t q = s->n_q_head, kv = s->n_kv_head;
    const size_t output = 4 * (size_t)s->head_dim;
    kv_gpu_buffer *b[BUFFERS] = {0};
    double *mass = NULL; /* [n_kv_head][stride] */
    KV_NEW(mass, kv * s->stride);
    KV_TRY(kv_target_mass(s, d, 1, run->target_mean, mass));
    const struct {
        int32_t heads;
        size_t width;
        const void *from;
    } list[BUFFERS] = {
        [DENSE_LSE] = {q, 4, d->lse},      [LONG_MASS] = {q, 4, d->long_mass},
        [TOP_P] = {q, 4, d->top_p},        [TOP_T] = {q, 4, d->top_t},
        [DENSE_O] = {q, output, d->o},     [LSE] = {q, 4, m->lse},
        [LSE_LONG] = {q, 4, m->lse_long},  [O] = {q, output, m->o},
        [EVICT] = {kv, 4, item->evict_at}, [ORACLE] = {kv, 4, item->evict_oracle},
        [OWN] = {kv, 4, item->evict_own},  [MASS] = {kv, 8, mass},
        [KIND] = {1, 1, item->kind},
    };
    for (int i = 0; i < BUFFERS; i++)
        KV_TRY(send(g, s, list[i].heads, list[i].width, list[i].from, &b[i]));
    const kv_gpu_measure_input in = {.n_q_head = q,
                                     .n_kv_head = kv,
                                     .n_token = s->n_token,
                                     .head_dim = s->head_dim,
                                     .dense_lse = b[DENSE_LSE],
                                     .long_mass = b[LONG_MASS],
                                     .top_p = b[TOP_P],
                                     .top_t = b[TOP_T],
                                     .dense_o = b[DENSE_O],
                                     .lse = b[LSE],
                                     .lse_long = b[LSE_LONG],
                                     .o = b[O],
                                     .evict_at = b[EVICT],
                                     .evict_oracle = b[ORACLE],
                                     .evict_own = b[OWN],
                                     .mass = b[MASS],
                                     .kind = b[KIND]};
    KV_TRY(kv_gpu_measure(g, run, &in, sums));
out:
    for (int i = 0; i < BUFFERS; i++) {
        const kv_status freed = kv_gpu_free(b[i]);
        if (st == KV_OK) st = freed;
    }
    free(mass);
    return st;
}
