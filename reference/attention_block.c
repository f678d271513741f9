/* Blocks of queries (attention_block.h) and dense causal attention. */
#include "reference/attention_block.h"

#include <omp.h>
#include <string.h>

#include "reference/attention.h"
#include "reference/core/cpu.h"
#include "reference/core/mem.h"

int32_t kv_block_queries(const kv_panel_shape *shape) {
    const int32_t panels = (192 << 10) / (int32_t)sizeof(float) / 2 /
                           (shape->group * shape->padded_dim * KV_PANEL_ROWS);
    return KV_PANEL_ROWS * (panels < 1 ? 1 : panels > KV_BLOCK_PANELS ? KV_BLOCK_PANELS : panels);
}

kv_status kv_block_make(const kv_panel_shape *shape, kv_block *b) {
    kv_status st = KV_OK;
    const int32_t n = shape->group * KV_BLOCK_PANELS;
    const size_t query_floats = (size_t)(KV_PANEL_ROWS * shape->head_dim);
    const size_t output_floats = (size_t)(KV_PANEL_ROWS * shape->padded_dim);
    *b = (kv_block){0};
    KV_NEW(b->panel, n);
    KV_NEW(b->cells, KV_PANEL_ROWS * KV_CHUNK_KEYS);
    KV_NEW(b->queries, (size_t)n * query_floats);
    KV_NEW(b->outputs, (size_t)n * output_floats);
    for (int32_t i = 0; i < n; i++) {
        b->panel[i].queries = b->queries + (size_t)i * query_floats;
        b->panel[i].output = b->outputs + (size_t)i * output_floats;
    }
out:
    return st;
}

void kv_block_free(kv_block *b) {
    free(b->panel);
    free(b->cells);
    free(b->queries);
    free(b->outputs);
}

void kv_block_begin(kv_block *b, const kv_panel_shape *shape, const kv_span *span, int32_t kv_head,
                    int32_t first) {
    const int32_t left = span->n_token - first, most = kv_block_queries(shape);
    b->first = first;
    b->n_query = left < most ? left : most;
    b->n_panel = 0;
    for (int32_t g = 0; g < shape->group; g++)
        for (int32_t done = 0; done < b->n_query; done += KV_PANEL_ROWS)
            kv_panel_begin(&b->panel[b->n_panel++], shape, span, kv_head * shape->group + g,
                           first + done, KV_PANEL_ROWS);
}

void kv_block_end(const kv_block *b, const kv_panel_shape *shape, float *o, float *lse) {
    for (int32_t i = 0; i < b->n_panel; i++) {
        const kv_panel *p = &b->panel[i];
        if (o) kv_panel_output(p, shape, o + p->row * (size_t)shape->head_dim);
        for (int32_t r = 0; lse && r < p->n_row; r++)
            lse[p->row + (size_t)r] = (float)kv_softmax_lse(p->softmax.max[r], p->softmax.sum[r]);
    }
}

static void attend_block(kv_block *b, const kv_panel_shape *shape, const kv_packed *packed,
                         int32_t kv_head) {
    const int32_t last = b->first + b->n_query - 1;
    float row_max[KV_PANEL_ROWS];
    for (int32_t c = 0; c * KV_CHUNK_KEYS <= last; c++)
        for (int32_t i = 0; i < b->n_panel; i++) {
            kv_panel *p = &b->panel[i];
            const int32_t end = p->first + p->n_row - 1;
            if (c * KV_CHUNK_KEYS > end) continue;
            const kv_chunk chunk = kv_packed_chunk(packed, shape, kv_head, c, end);
            kv_panel_logits(p, shape, &chunk, b->cells, row_max);
            kv_softmax_add(&p->softmax, shape, &chunk, p->first, p->n_row, row_max, b->cells,
                           b->cells);
            kv_panel_values(p, shape, &chunk, b->cells);
        }
}

kv_status kv_attend(const kv_span *span, float *o, float *lse) {
    kv_status st = KV_OK;
    const int32_t n_thread = kv_threads();
    kv_panel_shape shape;
    kv_packed packed = {0};
    kv_block *block = NULL;
    KV_TRY(kv_panel_shape_make(span, &shape));
    shape.want_output = true;
    const int32_t queries = kv_block_queries(&shape);
    const int32_t n_block = (span->n_token + queries - 1) / queries;
    KV_TRY(kv_packed_make(span, &shape, &packed));
    KV_NEW(block, n_thread);
    for (int32_t i = 0; i < n_thread; i++) KV_TRY(kv_block_make(&shape, &block[i]));
        /* the longest rows first, so that no thread ends late */
#pragma omp parallel for schedule(dynamic, 1) num_threads(n_thread)
    for (int32_t unit = 0; unit < n_block * span->n_kv_head; unit++) {
        if (kv_interrupt_poll() != KV_OK) continue;
        kv_block *b = &block[omp_get_thread_num()];
        const int32_t kv_head = unit % span->n_kv_head;
        kv_block_begin(b, &shape, span, kv_head, (n_block - 1 - unit / span->n_kv_head) * queries);
        attend_block(b, &shape, &packed, kv_head);
        kv_block_end(b, &shape, o, lse);
    }
    KV_TRY(kv_interrupt_poll());
out:
    for (int32_t i = 0; block && i < n_thread; i++) kv_block_free(&block[i]);
    free(block);
    kv_packed_free(&packed);
    return st;
}
