/* Time of the model's forward pass, attention and weight products apart. The work is counted, not measured: 4*head_dim per causal
 * pair and query head, 2 per weight and token. */
#include "experiments/bench_model.h"

#include <stdlib.h>

#include "experiments/ceiling.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "reference/ops.h"
#include "traces/model_load.h"

typedef struct timing { /* of one pass, seconds */
    double total, attention;
} timing;

static kv_status attend(void *context, const kv_span *span, float *o) {
    timing *t = context;
    double start = kv_now();
    kv_status st = kv_ops_cpu.attend(span, o, NULL);
    t->attention += kv_now() - start;
    return st;
}

static kv_status drop_logits(void *context, int32_t first, int32_t n, const float *logits) {
    (void)context, (void)first, (void)n, (void)logits;
    return KV_OK;
}

static double weight_flops(const kv_model_config *c, int32_t n_token) {
    double d = c->d_model, q = (double)c->n_q_head * c->head_dim,
           kv = (double)c->n_kv_head * c->head_dim;
    return 2.0 * n_token * (c->n_layer * d * (2 * q + 2 * kv + 3.0 * c->d_ff) + d * c->vocab);
}

static double attention_flops(const kv_model_config *c, int32_t n_token) {
    double pairs = 0.5 * n_token * (n_token + 1.0);
    return 4.0 * c->head_dim * c->n_q_head * c->n_layer * pairs;
}

static int by_total(const void *a, const void *b) {
    double x = ((const timing *)a)->total, y = ((const timing *)b)->total;
    return (x > y) - (x < y);
}

kv_status kv_bench_model(FILE *out, const char *model_dir, int32_t n_token, int32_t repeats) {
    kv_status st = KV_OK;
    kv_model *model = NULL;
    int32_t *token = NULL;
    timing *t = NULL;
    double top = kv_ceiling(NULL);
    KV_TRY(kv_model_load(model_dir, &model));
    KV_NEW(token, n_token);
    KV_NEW(t, repeats);
    kv_rng rng = kv_rng_make(1, 0);
    for (int32_t i = 0; i < n_token; i++)
        token[i] = (int32_t)kv_rng_below(&rng, (uint32_t)model->config.vocab);
    for (int32_t i = 0; i < repeats; i++) {
        const kv_model_hooks hooks = {.context = &t[i], .attend = attend, .logits = drop_logits};
        double start = kv_now();
        KV_TRY(kv_model_forward(model, token, NULL, n_token, &hooks));
        t[i].total = kv_now() - start;
        top = kv_ceiling(NULL);
    }
    qsort(t, (size_t)repeats, sizeof *t, by_total);
    timing m = t[repeats / 2];
    double weights = weight_flops(&model->config, n_token),
           attention = attention_flops(&model->config, n_token);
    const double seconds[] = {m.total, m.attention, m.total - m.attention},
                 work[] = {weights + attention, attention, weights};
    static const char *const part[] = {"model forward", "  its attention", "  the rest (weights)"};
    fprintf(out,
            "model forward, %d tokens, %d threads, BLAS core %s: median of %d, total %.3f..%.3f s; "
            "counted are 4 * head size per causal pair and query head, 2 per weight and token\n",
            n_token, kv_threads(), kv_blas_core(), repeats, t[0].total, t[repeats - 1].total);
    for (int i = 0; i < 3; i++)
        fprintf(out, "%-46s        %9.4f s %8.1f GFLOP/s  %.3f of ceiling\n", part[i], seconds[i],
                work[i] / seconds[i] * 1e-9, work[i] / seconds[i] * 1e-9 / top);
out:
    free(token);
    free(t);
    kv_model_free(model);
    return st;
}
