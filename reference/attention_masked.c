/* Attention under evict_at: query u sees key t iff t <= u < evict_at[t] (maths.md 3.7, 8.3).
 *
 * The kept sets of neighbouring queries differ by few tokens, so a block of queries gathers the keys that any of them sees and
 * attends them in chunks; all query heads of the group share the gathered chunk. Keys that every query of the block sees come
 * first: their chunks need no mask. Work follows the kept set, not S^2. */
#include "reference/attention.h"

#include <math.h>
#include <omp.h>
#include <string.h>

#include "reference/attention_rotate.h"
#include "reference/core/cpu.h"
#include "reference/core/mem.h"

/* Consecutive blocks that one thread walks, so that the list of live keys is carried along instead of searched for. */
enum { WALK_BLOCKS = 8 };

/* Per thread. */
typedef struct gather {
    kv_block block;
    int32_t n_live, *live; /* [n_token] keys that some query of the block sees, in order of time */
    /* [n_token] the same, those that all queries see first; their evict_at */
    int32_t *order, *leaves;
    int32_t *birth, *death; /* [KV_CHUNK_KEYS] of the chunk */
    float *keys, *values;   /* packed chunk */
    kv_turns turns;         /* rerotate only, as the next two */
    kv_softmax *recorded;   /* [panels] softmax of the recorded logits */
    float *spare;           /* [KV_PANEL_ROWS][KV_CHUNK_KEYS] its exponentials */
} gather;

typedef struct masked {
    const kv_span *span;
    const kv_masked_request *request;
    kv_masked *out;
    kv_panel_shape shape;    /* of the attention proper */
    kv_panel_shape recorded; /* rerotate: of the recorded logits */
    kv_angles angles;
    int32_t n_gather;
    gather *gather; /* [threads] */
} masked;

static const int32_t *evict_row(const masked *m, int32_t kv_head) {
    return m->request->evict_at + (ptrdiff_t)kv_head * m->span->stride;
}

/* Live keys of the block that starts at `first`: survivors of the last block's list, then the block's own keys. */
static void update_live(const masked *m, gather *g, int32_t kv_head, int32_t from, int32_t first) {
    const int32_t *evict_at = evict_row(m, kv_head), n = g->n_live;
    const int32_t next = first + kv_block_queries(&m->shape);
    const int32_t end = next < m->span->n_token ? next : m->span->n_token;
    g->n_live = 0;
    for (int32_t j = 0; j < n; j++)
        if (evict_at[g->live[j]] > first) g->live[g->n_live++] = g->live[j];
    for (int32_t t = from; t < end; t++)
        if (evict_at[t] > first) g->live[g->n_live++] = t;
}

/* The order in which the block meets its keys: of time if they are re-rotated, else fully visible ones first. */
static void order_keys(const masked *m, gather *g, int32_t kv_head) {
    const int32_t *evict_at = evict_row(m, kv_head);
    const int32_t first = g->block.first, last = first + g->block.n_query - 1;
    int32_t n = 0;
    for (int32_t late = 0; late < 2; late++)
        for (int32_t j = 0; j < g->n_live; j++) {
            const int32_t t = g->live[j];
            const int32_t partly = m->request->rerotate ? 0 : t > first || evict_at[t] <= last;
            g->order[n] = t;
            g->leaves[n] = evict_at[t];
            n += partly == late;
        }
}

static kv_chunk gather_chunk(const masked *m, const gather *g, int32_t kv_head, int32_t start) {
    const kv_panel_shape *shape = &m->shape;
    const int32_t left = g->n_live - start, tile_keys = shape->kernel->tile_keys;
    const ptrdiff_t base = (ptrdiff_t)kv_head * m->span->stride * shape->head_dim;
    kv_chunk chunk = {.keys = g->keys,
                      .values = g->values,
                      .birth = g->birth,
                      .death = g->death,
                      .n_key = left < KV_CHUNK_KEYS ? left : KV_CHUNK_KEYS,
                      .birth_min = INT32_MAX,
                      .birth_max = -1,
                      .seen_to = INT32_MAX};
    const int32_t padded = kv_round_up(chunk.n_key, tile_keys);
    for (int32_t j = 0; j < padded; j++) {
        const bool real = j < chunk.n_key;
        const int32_t t = real ? g->order[start + j] : INT32_MAX;
        g->birth[j] = t;
        g->death[j] = real ? g->leaves[start + j] : INT32_MAX;
        if (g->death[j] < chunk.seen_to) chunk.seen_to = g->death[j];
        if (!real) continue;
        if (t < chunk.birth_min) chunk.birth_min = t;
        if (t > chunk.birth_max) chunk.birth_max = t;
    }
    chunk.seen_from = padded > chunk.n_key ? INT32_MAX : chunk.birth_max;
    kv_pack_keys(m->span->k + base, g->order + start, chunk.n_key, shape->head_dim, tile_keys,
                 g->keys);
    if (shape->want_output)
        kv_pack_values(m->span->v + base, g->order + start, chunk.n_key, shape->head_dim, tile_keys,
                       g->values);
    return chunk;
}

static void attend_chunk(const masked *m, gather *g, const kv_chunk *chunk) {
    float row_max[KV_PANEL_ROWS];
    for (int32_t i = 0; i < g->block.n_panel; i++) {
        kv_panel *p = &g->block.panel[i];
        float *l = g->block.cells;
        kv_panel_logits(p, &m->shape, chunk, l, row_max);
        if (m->request->rerotate) {
            kv_softmax_add(&g->recorded[i], &m->recorded, chunk, p->first, p->n_row, row_max, l,
                           g->spare);
            kv_turns_apply(&g->turns, &m->angles, &g->block, p, &m->shape, m->span, chunk, l,
                           row_max);
        }
        kv_softmax_add(&p->softmax, &m->shape, chunk, p->first, p->n_row, row_max, l, l);
        if (m->shape.want_output) kv_panel_values(p, &m->shape, chunk, l);
    }
}

static void store_block(const masked *m, const gather *g) {
    kv_block_end(&g->block, &m->shape, m->request->o ? m->request->o : m->out->o, m->out->lse);
    for (int32_t i = 0; i < g->block.n_panel; i++) {
        const kv_panel *p = &g->block.panel[i];
        const kv_softmax *s = m->request->rerotate ? &g->recorded[i] : &p->softmax;
        for (int32_t r = 0; r < p->n_row; r++) {
            if (m->out->lse_long)
                m->out->lse_long[p->row + (size_t)r] = (float)kv_softmax_lse(s->max[r], s->far[r]);
            if (m->out->lse_orig)
                m->out->lse_orig[p->row + (size_t)r] = (float)kv_softmax_lse(s->max[r], s->sum[r]);
        }
    }
}

static void attend_block(const masked *m, gather *g, int32_t kv_head, int32_t first) {
    kv_block_begin(&g->block, &m->shape, m->span, kv_head, first);
    order_keys(m, g, kv_head);
    if (m->request->rerotate) {
        kv_turns_begin(&g->turns, &g->block, g->order, g->leaves, g->n_live);
        for (int32_t i = 0; i < g->block.n_panel; i++) kv_softmax_begin(&g->recorded[i]);
    }
    for (int32_t start = 0; start < g->n_live; start += KV_CHUNK_KEYS) {
        const kv_chunk chunk = gather_chunk(m, g, kv_head, start);
        if (m->request->rerotate) kv_turns_chunk(&g->turns, &g->block, m->span, &chunk);
        attend_chunk(m, g, &chunk);
    }
    store_block(m, g);
}

static void walk(const masked *m, gather *g, int32_t kv_head, int32_t walk_start) {
    g->n_live = 0;
    for (int32_t b = 0; b < WALK_BLOCKS; b++) {
        const int32_t first = walk_start + b * kv_block_queries(&m->shape);
        if (first >= m->span->n_token || kv_interrupt_poll() != KV_OK) return;
        update_live(m, g, kv_head, b == 0 ? 0 : first, first);
        attend_block(m, g, kv_head, first);
    }
}

static kv_status allocate(masked *m) {
    kv_status st = KV_OK;
    const size_t cells = (size_t)m->span->n_q_head * (size_t)m->span->stride;
    const kv_panel_shape *shape = &m->shape;
    KV_NEW(m->out->lse, cells);
    if (m->request->rerotate) KV_NEW(m->out->lse_orig, cells);
    if (m->request->want_long) KV_NEW(m->out->lse_long, cells);
    if (m->request->want_output && !m->request->o)
        KV_NEW(m->out->o, cells * (size_t)shape->head_dim);
    KV_NEW(m->gather, m->n_gather);
    for (int32_t i = 0; i < m->n_gather; i++) {
        gather *g = &m->gather[i];
        KV_TRY(kv_block_make(shape, &g->block));
        KV_NEW(g->live, m->span->n_token);
        KV_NEW(g->order, m->span->n_token + 1);
        KV_NEW(g->leaves, m->span->n_token + 1);
        KV_NEW(g->birth, KV_CHUNK_KEYS);
        KV_NEW(g->death, KV_CHUNK_KEYS);
        KV_NEW(g->keys, KV_CHUNK_KEYS * shape->head_dim);
        KV_NEW(g->values, KV_CHUNK_KEYS * shape->padded_dim);
        if (!m->request->rerotate) continue;
        KV_TRY(kv_turns_make(&m->angles, &g->turns));
        KV_NEW(g->recorded, shape->group * KV_BLOCK_PANELS);
        KV_NEW(g->spare, KV_PANEL_ROWS * KV_CHUNK_KEYS);
    }
out:
    return st;
}

static void release(masked *m) {
    kv_angles_free(&m->angles);
    for (int32_t i = 0; m->gather && i < m->n_gather; i++) {
        gather *g = &m->gather[i];
        kv_block_free(&g->block);
        kv_turns_free(&g->turns);
        free(g->live);
        free(g->order);
        free(g->leaves);
        free(g->birth);
        free(g->death);
        free(g->keys);
        free(g->values);
        free(g->recorded);
        free(g->spare);
    }
    free(m->gather);
}

kv_status kv_masked_compute(const kv_span *span, const kv_masked_request *request, kv_masked *out) {
    kv_status st = KV_OK;
    masked m = {.span = span, .request = request, .out = out, .n_gather = kv_threads()};
    *out = (kv_masked){0};
    KV_TRY(kv_panel_shape_make(span, &m.shape));
    const int32_t walk_queries = WALK_BLOCKS * kv_block_queries(&m.shape);
    const int32_t n_walk = (span->n_token + walk_queries - 1) / walk_queries;
    m.shape.sinks = request->sinks;
    m.shape.window = request->window;
    m.recorded = m.shape;
    m.recorded.want_long = request->want_long;
    m.shape.want_long = request->want_long && !request->rerotate;
    m.shape.want_output = request->want_output;
    if (request->rerotate) KV_TRY(kv_angles_make(span, &m.angles));
    KV_TRY(allocate(&m));
#pragma omp parallel for schedule(dynamic, 1) num_threads(m.n_gather)
    for (int32_t unit = 0; unit < n_walk * span->n_kv_head; unit++)
        walk(&m, &m.gather[omp_get_thread_num()], unit % span->n_kv_head,
             unit / span->n_kv_head * walk_queries);
    KV_TRY(kv_interrupt_poll());
out:
    release(&m);
    if (st != KV_OK) kv_masked_free(out);
    return st;
}

void kv_masked_free(kv_masked *m) {
    if (!m) return;
    free(m->o);
    free(m->lse);
    free(m->lse_long);
    free(m->lse_orig);
    *m = (kv_masked){0};
}
