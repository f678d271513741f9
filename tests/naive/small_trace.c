/* A small trace with everything in it: values, and lse by the definition in double. */
#include "tests/naive/small_trace.h"

#include <math.h>
#include <string.h>

#include "reference/core/rand.h"

static void fill(kv_rng *r, float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = (float)((int)kv_rng_below(r, 129) - 64) / 32.0f;
}

void small_trace_make(small_trace *f) {
    kv_rng r = kv_rng_make(5, 1);
    memset(f, 0, sizeof *f);
    fill(&r, &f->q[0][0][0][0], sizeof f->q / sizeof(float));
    fill(&r, &f->k[0][0][0][0], sizeof f->k / sizeof(float));
    fill(&r, &f->v[0][0][0][0], sizeof f->v / sizeof(float));
    fill(&r, &f->hidden[0][0][0], sizeof f->hidden / sizeof(float));
    for (int i = 0; i < FX_LAYER; i++) f->layer_id[i] = 3 * i + 1;
    for (int i = 0; i < FX_DIM / 2; i++) f->inv_freq[i] = 1.0 / (1 + i);
    for (int i = 1; i < 3; i++) f->doc_start[i] = 100 * i + 7;
    for (int t = 0; t < FX_TOKEN; t++) {
        f->token[t] = (int32_t)kv_rng_below(&r, 1000);
        f->position[t] = 5 + t;
        f->kind[t] = (uint8_t)kv_rng_below(&r, 7);
        f->scored[t] = (uint8_t)kv_rng_below(&r, 4);
    }
    f->spec = (kv_trace_spec){.title = "a small trace",
                              .source = "fixture",
                              .history = "made by the tests",
                              .producer = "tests",
                              .task = "none",
                              .n_layer = FX_LAYER,
                              .n_q_head = FX_Q,
                              .n_kv_head = FX_KV,
                              .head_dim = FX_DIM,
                              .d_model = FX_WIDTH,
                              .n_model_layer = 8,
                              .layer_id = f->layer_id,
                              .rope_theta = 10000,
                              .softmax_scale = 0.25,
                              .logit_softcap = 0,
                              .inv_freq = f->inv_freq,
                              .type = KV_F16,
                              .hidden = true,
                              .lse = true,
                              .n_token = FX_TOKEN,
                              .n_document = 3,
                              .token = f->token,
                              .position = f->position,
                              .doc_start = f->doc_start,
                              .kind = f->kind,
                              .scored = f->scored,
                              .model_hash = "00112233445566778899aabbccddeeff",
                              .has_corpus = true,
                              .corpus_seed = 9000000000000000001u,
                              .corpus = "reasoning/2"};
    for (int l = 0; l < FX_LAYER; l++)
        for (int h = 0; h < FX_Q; h++)
            for (int u = 0; u < FX_TOKEN; u++) {
                int first = u >= f->doc_start[2]   ? f->doc_start[2]
                            : u >= f->doc_start[1] ? f->doc_start[1]
                                                   : 0;
                double sum = 0;
                for (int t = first; t <= u; t++) {
                    double logit = 0;
                    for (int c = 0; c < FX_DIM; c++)
                        logit += (double)f->q[l][h][u][c] * f->k[l][h / 2][t][c];
                    sum += exp(logit * f->spec.softmax_scale);
                }
                f->lse[l][h][u] = (float)log(sum);
            }
}

kv_status small_trace_write(const small_trace *f, const char *path) {
    kv_status st = KV_OK;
    kv_trace_writer *w = NULL;
    const kv_trace_spec *s = &f->spec;
    KV_TRY(kv_trace_writer_open(path, s, &w));
    for (int l = 0; l < s->n_layer; l++) {
        kv_span span = {.n_token = s->n_token,
                        .stride = FX_TOKEN,
                        .n_q_head = FX_Q,
                        .n_kv_head = FX_KV,
                        .head_dim = FX_DIM,
                        .q = f->q[l][0][0],
                        .k = f->k[l][0][0],
                        .v = f->v[l][0][0],
                        .hidden = s->hidden ? f->hidden[l][0] : NULL,
                        .d_model = FX_WIDTH};
        KV_TRY(kv_trace_writer_layer(w, &span, s->lse ? f->lse[l][0] : NULL));
    }
out:
    if (st != KV_OK) {
        kv_trace_writer_close(w, false);
        return st;
    }
    return kv_trace_writer_close(w, true);
}
