/* Prefill of one document through a decoder-only transformer (Qwen3, Qwen2, Llama), layer by layer.
 *
 *     x += Wo attention(rope(norm(Wq n + bq)), rope(norm(Wk n + bk)), Wv n + bv),   n = rms(x)
 *     x += Wdown (silu(Wgate n) * Wup n),                                           n = rms(x)
 *     logits = W_head rms(x)
 *
 * Rows are worked on in chunks, so memory is one residual stream plus q, k, v and o of one layer. Arithmetic is fp32, the variance
 * of the norms is summed in double. Source: transformers' modeling_qwen3.py, modeling_qwen2.py, modeling_llama.py. */
#include "reference/model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/gemm.h"
#include "reference/ops.h"

enum { CHUNK = 2048, LOGIT_ROWS = 256 }; /* rows */

/* fp32 copies of one layer's vectors; absent ones are NULL. */
typedef struct vectors {
    float *backing;
    float *norm_attn, *norm_mlp; /* [d_model] */
    float *bq, *bk, *bv;         /* [n_q_head*head_dim], [n_kv_head*head_dim] twice */
    float *q_norm, *k_norm;      /* [head_dim] */
} vectors;

typedef struct work {
    const kv_model *model;
    const kv_ops *ops;
    const kv_model_hooks *hooks;
    int32_t n;          /* tokens */
    float *x;           /* [n][d_model] residual stream */
    float *q, *o;       /* [n_q_head][n][head_dim] */
    float *k, *v;       /* [n_kv_head][n][head_dim] */
    float *rope;        /* [n][head_dim] cosines, sines */
    float *narrow;      /* [CHUNK][d_model] */
    float *wide, *gate; /* [CHUNK][max(n_q_head*head_dim, d_ff)] */
    vectors vec;
} work;

static float *take(float **cursor, const kv_weight *w) {
    if (!w->data) return NULL;
    float *out = *cursor;
    kv_widen(w->type, w->data, out, (size_t)w->cols);
    *cursor += w->cols;
    return out;
}

static void load_vectors(vectors *v, const kv_layer_weights *l) {
    float *cursor = v->backing;
    v->norm_attn = take(&cursor, &l->norm_attn);
    v->norm_mlp = take(&cursor, &l->norm_mlp);
    v->bq = take(&cursor, &l->bq);
    v->bk = take(&cursor, &l->bk);
    v->bv = take(&cursor, &l->bv);
    v->q_norm = take(&cursor, &l->q_norm);
    v->k_norm = take(&cursor, &l->k_norm);
}

/* y = x / rms(x) * weight; y may be x. Four partial sums: the order is fixed, the chain short. */
static void rms_norm(const float *x, const float *weight, int32_t d, double eps, float *y) {
    double sum[4] = {0};
    int32_t c = 0;
    for (; c + 4 <= d; c += 4)
        for (int i = 0; i < 4; i++) sum[i] += (double)x[c + i] * (double)x[c + i];
    for (; c < d; c++) sum[0] += (double)x[c] * (double)x[c];
    double mean = ((sum[0] + sum[1]) + (sum[2] + sum[3])) / d;
    float scale = (float)(1.0 / sqrt(mean + eps));
    for (c = 0; c < d; c++) y[c] = weight[c] * (x[c] * scale);
}

static void norm_rows(const work *w, const float *x, const float *weight, int32_t rows, float *y) {
    int32_t d = w->model->config.d_model;
#pragma omp parallel for schedule(static)
    for (int32_t r = 0; r < rows; r++)
        rms_norm(x + (size_t)r * (size_t)d, weight, d, w->model->config.rms_eps,
                 y + (size_t)r * (size_t)d);
}

static kv_status linear(const work *w, int32_t rows, const kv_weight *m, const float *a, float *c) {
    return w->ops->linear(rows, m->rows, m->cols, a, m->type, m->data, c);
}

/* Rows of a projection [rows][n_head*head_dim] -> heads [n_head][n][head_dim] at `first`, with bias, head norm and rotation. */
static void to_heads(const work *w, const float *rows_in, int32_t first, int32_t rows,
                     int32_t n_head, const float *bias, const float *norm, bool rotate,
                     float *heads) {
    int32_t d = w->model->config.head_dim;
#pragma omp parallel for schedule(static)
    for (int32_t r = 0; r < rows; r++)
        for (int32_t h = 0; h < n_head; h++) {
            const float *from = rows_in + ((size_t)r * (size_t)n_head + (size_t)h) * (size_t)d;
            float *to = heads + ((size_t)h * (size_t)w->n + (size_t)(first + r)) * (size_t)d;
            memcpy(to, from, (size_t)d * sizeof *to);
            for (int32_t c = 0; bias && c < d; c++) to[c] += bias[h * d + c];
            if (norm) rms_norm(to, norm, d, w->model->config.rms_eps, to);
            if (rotate) kv_rope_apply(to, d, w->rope + (size_t)(first + r) * (size_t)d);
        }
}

static void from_heads(const work *w, int32_t first, int32_t rows, float *rows_out) {
    int32_t d = w->model->config.head_dim, n_head = w->model->config.n_q_head;
#pragma omp parallel for schedule(static)
    for (int32_t r = 0; r < rows; r++)
        for (int32_t h = 0; h < n_head; h++)
            memcpy(rows_out + ((size_t)r * (size_t)n_head + (size_t)h) * (size_t)d,
                   w->o + ((size_t)h * (size_t)w->n + (size_t)(first + r)) * (size_t)d,
                   (size_t)d * sizeof *rows_out);
}

/* x += y over `count` elements; false when a sum is not finite. */
static bool add(float *x, const float *y, int64_t count) {
    int64_t bad = 0;
#pragma omp parallel for schedule(static) reduction(+ : bad)
    for (int64_t i = 0; i < count; i++) {
        x[i] += y[i];
        bad += !(fabsf(x[i]) <= 3.402823466e38f);
    }
    return bad == 0;
}

/* gate = silu(gate) * up, both [rows][d_ff] */
static void swiglu(float *gate, const float *up, int32_t rows, int32_t d_ff) {
#pragma omp parallel for schedule(static)
    for (int32_t r = 0; r < rows; r++) {
        float *g = gate + (size_t)r * (size_t)d_ff;
        const float *u = up + (size_t)r * (size_t)d_ff;
        kv_silu_f32(d_ff, g, g, NULL);
        for (int32_t c = 0; c < d_ff; c++) g[c] *= u[c];
    }
}

static kv_status project(work *w, const kv_layer_weights *l, int32_t first, int32_t rows) {
    const kv_model_config *c = &w->model->config;
    kv_status st = KV_OK;
    norm_rows(w, w->x + (size_t)first * (size_t)c->d_model, w->vec.norm_attn, rows, w->narrow);
    KV_TRY(linear(w, rows, &l->wq, w->narrow, w->wide));
    to_heads(w, w->wide, first, rows, c->n_q_head, w->vec.bq, w->vec.q_norm, true, w->q);
    KV_TRY(linear(w, rows, &l->wk, w->narrow, w->wide));
    to_heads(w, w->wide, first, rows, c->n_kv_head, w->vec.bk, w->vec.k_norm, true, w->k);
    KV_TRY(linear(w, rows, &l->wv, w->narrow, w->wide));
    to_heads(w, w->wide, first, rows, c->n_kv_head, w->vec.bv, NULL, false, w->v);
out:
    return st;
}

static kv_status attend(work *w, int32_t layer, const int32_t *position) {
    const kv_model_config *c = &w->model->config;
    kv_span span = {.n_token = w->n,
                    .stride = w->n,
                    .n_q_head = c->n_q_head,
                    .n_kv_head = c->n_kv_head,
                    .head_dim = c->head_dim,
                    .q = w->q,
                    .k = w->k,
                    .v = w->v,
                    .hidden = w->x,
                    .d_model = c->d_model,
                    .position = position,
                    .inv_freq = w->model->inv_freq,
                    .scale = (float)(1.0 / sqrt((double)c->head_dim)),
                    .layer_id = layer,
                    .layer_index = layer,
                    .n_layer = c->n_layer};
    if (w->hooks && w->hooks->attend) return w->hooks->attend(w->hooks->context, &span, w->o);
    return w->ops->attend(&span, w->o, NULL);
}

static kv_status finish_layer(work *w, const kv_layer_weights *l, int32_t layer, int32_t first,
                              int32_t rows) {
    const kv_model_config *c = &w->model->config;
    kv_status st = KV_OK;
    float *x = w->x + (size_t)first * (size_t)c->d_model;
    int64_t n_narrow = (int64_t)rows * c->d_model;
    from_heads(w, first, rows, w->wide);
    KV_TRY(linear(w, rows, &l->wo, w->wide, w->narrow));
    bool finite = add(x, w->narrow, n_narrow);
    norm_rows(w, x, w->vec.norm_mlp, rows, w->narrow);
    KV_TRY(linear(w, rows, &l->w_gate, w->narrow, w->gate));
    KV_TRY(linear(w, rows, &l->w_up, w->narrow, w->wide));
    swiglu(w->gate, w->wide, rows, c->d_ff);
    KV_TRY(linear(w, rows, &l->w_down, w->gate, w->narrow));
    finite = add(x, w->narrow, n_narrow) && finite;
    if (!finite)
        KV_RAISE(KV_E_DATA,
                 "%s: layer %d gives values that are not finite at positions %d..%d: the weights "
                 "are damaged or do not belong to this config.json",
                 w->model->path, layer, first, first + rows - 1);
out:
    return st;
}

/* Logits of the rows listed in `row` (ascending), handed over in runs of consecutive rows. */
static kv_status emit_logits(work *w, const int32_t *row, int32_t count, const float *norm,
                             float *logits) {
    const kv_model_config *c = &w->model->config;
    kv_status st = KV_OK;
    size_t d = (size_t)c->d_model;
    for (int32_t i = 0; i < count; i++)
        rms_norm(w->x + (size_t)row[i] * d, norm, c->d_model, c->rms_eps,
                 w->narrow + (size_t)i * d);
    KV_TRY(linear(w, count, &w->model->lm_head, w->narrow, logits));
    for (int32_t i = 0, run; i < count; i += run) {
        for (run = 1; i + run < count && row[i + run] == row[i] + run;) run++;
        KV_TRY(w->hooks->logits(w->hooks->context, row[i], run,
                                logits + (size_t)i * (size_t)c->vocab));
    }
out:
    return st;
}

static kv_status head(work *w) {
    const kv_model_config *c = &w->model->config;
    const uint8_t *want = w->hooks->want_logits;
    kv_status st = KV_OK;
    float *norm = NULL, *logits = NULL;
    int32_t row[LOGIT_ROWS], count = 0;
    KV_NEW(norm, c->d_model);
    KV_NEW(logits, (size_t)LOGIT_ROWS * (size_t)c->vocab);
    kv_widen(w->model->norm_final.type, w->model->norm_final.data, norm, (size_t)c->d_model);
    for (int32_t t = 0; t < w->n; t++) {
        if (!want || want[t]) row[count++] = t;
        if (count == LOGIT_ROWS || (count > 0 && t == w->n - 1)) {
            KV_TRY(kv_interrupt_poll());
            KV_TRY(emit_logits(w, row, count, norm, logits));
            count = 0;
        }
    }
out:
    free(norm);
    free(logits);
    return st;
}

static kv_status embed(work *w, const int32_t *token) {
    const kv_model_config *c = &w->model->config;
    const kv_weight *e = &w->model->embedding;
    size_t d = (size_t)c->d_model, bytes = d * kv_dtype_size(e->type);
    for (int32_t t = 0; t < w->n; t++) {
        if (token[t] < 0 || token[t] >= c->vocab)
            return KV_FAIL(KV_E_DATA,
                           "token %d at position %d is outside the vocabulary 0..%d of %s: these "
                           "tokens belong to another model",
                           token[t], t, c->vocab - 1, w->model->path);
        kv_widen(e->type, (const char *)e->data + (size_t)token[t] * bytes, w->x + (size_t)t * d,
                 d);
    }
    return KV_OK;
}

static kv_status allocate(work *w) {
    const kv_model_config *c = &w->model->config;
    kv_status st = KV_OK;
    size_t n = (size_t)w->n, d = (size_t)c->head_dim, dm = (size_t)c->d_model;
    size_t nq = (size_t)c->n_q_head * d, nkv = (size_t)c->n_kv_head * d;
    size_t chunk = n < CHUNK ? n : CHUNK, narrow = chunk > LOGIT_ROWS ? chunk : LOGIT_ROWS;
    size_t wide = nq > (size_t)c->d_ff ? nq : (size_t)c->d_ff;
    KV_NEW(w->x, n * dm);
    KV_NEW(w->q, n * nq);
    KV_NEW(w->o, n * nq);
    KV_NEW(w->k, n * nkv);
    KV_NEW(w->v, n * nkv);
    KV_NEW(w->rope, n * d);
    KV_NEW(w->narrow, narrow * dm);
    KV_NEW(w->wide, chunk * wide);
    KV_NEW(w->gate, chunk * (size_t)c->d_ff);
    KV_NEW(w->vec.backing, 2 * dm + nq + 2 * nkv + 2 * d);
out:
    return st;
}

kv_status kv_model_forward(const kv_model *model, const int32_t *token, const int32_t *position,
                           int32_t n_token, const kv_model_hooks *hooks) {
    kv_status st = KV_OK;
    work w = {.model = model,
              .ops = hooks && hooks->ops ? hooks->ops : &kv_ops_cpu,
              .hooks = hooks,
              .n = n_token};
    if (n_token < 1)
        KV_RAISE(KV_E_USAGE, "a forward pass needs at least one token, got %d", n_token);
    if (n_token > model->config.max_position)
        kv_log(KV_LOG_WARN, "model", "%d tokens, but %s was made for %d positions", n_token,
               model->path, model->config.max_position);
    if (w.ops->forward) {
        st = w.ops->forward(model, token, position, n_token, hooks);
        goto out;
    }
    KV_TRY(allocate(&w));
    KV_TRY(embed(&w, token));
    kv_rope_table(n_token, model->config.head_dim, position, model->inv_freq, w.rope);
    for (int32_t layer = 0; layer < model->config.n_layer; layer++) {
        const kv_layer_weights *l = &model->layer[layer];
        load_vectors(&w.vec, l);
        for (int32_t first = 0; first < n_token; first += CHUNK) {
            KV_TRY(kv_interrupt_poll());
            KV_TRY(project(&w, l, first, n_token - first < CHUNK ? n_token - first : CHUNK));
        }
        KV_TRY(attend(&w, layer, position));
        for (int32_t first = 0; first < n_token; first += CHUNK) {
            KV_TRY(kv_interrupt_poll());
            KV_TRY(finish_layer(&w, l, layer, first,
                                n_token - first < CHUNK ? n_token - first : CHUNK));
        }
        if (model->tensors) kv_tensors_rest(model->tensors);
    }
    if (hooks && hooks->logits) KV_TRY(head(&w));
out:
    free(w.x);
    free(w.q);
    free(w.o);
    free(w.k);
    free(w.v);
    free(w.rope);
    free(w.narrow);
    free(w.wide);
    free(w.gate);
    free(w.vec.backing);
    return st;
}

void kv_model_free(kv_model *model) {
    if (!model) return;
    if (model->tensors) kv_tensors_free(model->tensors);
    free(model->tensors);
    free(model->layer);
    free(model->inv_freq);
    free(model->path);
    free(model);
}
