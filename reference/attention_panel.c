/* Online softmax of a panel of queries (attention_panel.h). */
#include "reference/attention_panel.h"

#include <math.h>
#include <string.h>

static const double log_2 = 0.69314718055994530942, log2_e = 1.44269504088896340736;

kv_status kv_panel_shape_make(const kv_span *span, kv_panel_shape *shape) {
    if (span->n_q_head < 1 || span->n_kv_head < 1 || span->n_q_head % span->n_kv_head ||
        span->head_dim < 1 || span->n_token < 0 || span->stride < span->n_token)
        return KV_FAIL(KV_E_INTERNAL,
                       "attention over %d tokens (stride %lld), %d query heads, %d KV heads, head "
                       "size %d: query heads must be a multiple of KV heads, stride >= tokens",
                       span->n_token, (long long)span->stride, span->n_q_head, span->n_kv_head,
                       span->head_dim);
    const kv_attention_kernel *kernel = kv_attention_kernel_get();
    const bool capped = span->softcap > 0;
    *shape = (kv_panel_shape){
        .kernel = kernel,
        .head_dim = span->head_dim,
        .padded_dim = kv_round_up(span->head_dim, kernel->tile_keys),
        .group = span->n_q_head / span->n_kv_head,
        .logit_factor =
            (float)((double)span->scale * (capped ? 1 / (double)span->softcap : log2_e)),
        .cap_factor = capped ? (float)((double)span->softcap * log2_e) : 0.0f,
    };
    return KV_OK;
}

void kv_softmax_begin(kv_softmax *s) {
    memset(s, 0, sizeof *s);
    for (int32_t r = 0; r < KV_PANEL_ROWS; r++) {
        s->max[r] = s->top[r] = -INFINITY;
        s->top_key[r] = -1;
    }
}

void kv_panel_begin(kv_panel *p, const kv_panel_shape *shape, const kv_span *span, int32_t head,
                    int32_t first, int32_t n_row) {
    const int32_t left = span->n_token - first;
    p->first = first;
    p->row = (size_t)head * (size_t)span->stride + (size_t)first;
    p->n_row = left < n_row ? left : n_row;
    p->n_tile = (p->n_row + KV_TILE_ROWS - 1) / KV_TILE_ROWS;
    kv_pack_queries(span->q + p->row * (size_t)shape->head_dim, p->n_row, shape->head_dim,
                    p->queries);
    if (shape->want_output)
        memset(p->output, 0, sizeof *p->output * (size_t)(KV_PANEL_ROWS * shape->padded_dim));
    kv_softmax_begin(&p->softmax);
}

void kv_panel_logits(const kv_panel *p, const kv_panel_shape *shape, const kv_chunk *chunk,
                     float *l, float *row_max) {
    const kv_attention_kernel *kernel = shape->kernel;
    kernel->logits(p->queries, chunk->keys, shape->head_dim, p->n_tile, chunk->n_key,
                   shape->logit_factor, l, row_max);
    for (int32_t r = 0; r < p->n_row; r++) {
        float *row = l + r * KV_CHUNK_KEYS;
        const int32_t u = p->first + r;
        if (shape->cap_factor > 0)
            row_max[r] =
                kernel->cap(row, kv_round_up(chunk->n_key, kernel->tile_keys), shape->cap_factor);
        if (u < chunk->seen_from || u >= chunk->seen_to)
            row_max[r] = kernel->hide(row, chunk->birth, chunk->death, u, chunk->n_key);
    }
}

void kv_softmax_add(kv_softmax *s, const kv_panel_shape *shape, const kv_chunk *chunk,
                    int32_t first, int32_t n_row, const float *row_max, const float *l, float *e) {
    const kv_attention_kernel *kernel = shape->kernel;
    float anchor[KV_PANEL_ROWS] = {0}, sum[KV_PANEL_ROWS];
    for (int32_t r = 0; r < n_row; r++) {
        const float *row = l + r * KV_CHUNK_KEYS;
        if (shape->want_top && row_max[r] > s->top[r]) {
            const int32_t key =
                kernel->find_top(row, chunk->birth, shape->sinks, first + r - shape->window,
                                 chunk->n_key, &s->top[r]);
            if (key >= 0) s->top_key[r] = key;
        }
        s->rescale[r] = 1.0f;
        if (row_max[r] > s->max[r]) {
            const double shrink = exp2((double)s->max[r] - (double)row_max[r]);
            s->rescale[r] = (float)shrink;
            s->sum[r] *= shrink;
            s->far[r] *= shrink;
            s->max[r] = row_max[r];
        }
        /* before the first visible key any finite anchor gives probabilities 0 */
        if (s->max[r] > -INFINITY) anchor[r] = s->max[r];
    }
    kernel->exponentials(l, anchor, n_row, chunk->n_key, e, sum);
    for (int32_t r = 0; r < n_row; r++) {
        const int32_t lo = shape->sinks, hi = first + r - shape->window;
        s->sum[r] += (double)sum[r];
        if (!shape->want_long || chunk->birth_max < lo || chunk->birth_min > hi) continue;
        if (chunk->birth_min < lo || chunk->birth_max > hi)
            sum[r] = kernel->sum_range(e + r * KV_CHUNK_KEYS, chunk->birth, lo, hi, chunk->n_key);
        s->far[r] += (double)sum[r];
    }
}

void kv_panel_values(kv_panel *p, const kv_panel_shape *shape, const kv_chunk *chunk,
                     const float *e) {
    shape->kernel->values(e, chunk->values, p->n_tile, chunk->n_key,
                          shape->padded_dim / shape->kernel->tile_keys, p->softmax.rescale,
                          p->output);
}

double kv_softmax_lse(float max, double sum) {
    return sum > 0 ? (double)max * log_2 + log(sum) : -INFINITY;
}

void kv_panel_output(const kv_panel *p, const kv_panel_shape *shape, float *o) {
    for (int32_t r = 0; r < p->n_row; r++) {
        const double sum = p->softmax.sum[r];
        const float factor = sum > 0 ? (float)(1 / sum) : 0.0f;
        const float *from = p->output + (ptrdiff_t)r * shape->padded_dim;
        for (int32_t c = 0; c < shape->head_dim; c++)
            o[(ptrdiff_t)r * shape->head_dim + c] = factor * from[c];
    }
}
