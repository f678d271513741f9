/* Re-rotation of cached keys (attention_rotate.h). */
#include "reference/attention_rotate.h"

#include <math.h>

#include "reference/core/mem.h"

static void fill(const kv_angles *angles, int32_t delta, float *cosine, float *sine) {
    for (int32_t c = 0; c < angles->half; c++) {
        cosine[c] = (float)cos(delta * angles->inv_freq[c]);
        sine[c] = (float)sin(delta * angles->inv_freq[c]);
    }
}

kv_status kv_angles_make(const kv_span *span, kv_angles *angles) {
    kv_status st = KV_OK;
    if (!span->inv_freq || span->head_dim % 2)
        KV_RAISE(KV_E_DATA,
                 "layer %d, head size %d: re-rotating keys (pos=cache) needs an even head size and "
                 "the RoPE frequencies of the trace (/model/inv_freq or rope_theta)",
                 span->layer_id, span->head_dim);
    *angles =
        (kv_angles){.n = span->n_token, .half = span->head_dim / 2, .inv_freq = span->inv_freq};
    KV_NEW(angles->cosine, (size_t)angles->n * (size_t)angles->half);
    KV_NEW(angles->sine, (size_t)angles->n * (size_t)angles->half);
#pragma omp parallel for schedule(static)
    for (int32_t i = 0; i < angles->n; i++)
        fill(angles, i, angles->cosine + (ptrdiff_t)i * angles->half,
             angles->sine + (ptrdiff_t)i * angles->half);
out:
    return st;
}

void kv_angles_free(kv_angles *angles) {
    free(angles->cosine);
    free(angles->sine);
}

kv_status kv_turns_make(const kv_angles *angles, kv_turns *turns) {
    kv_status st = KV_OK;
    KV_NEW(turns->key, KV_BLOCK_QUERIES * KV_CHUNK_KEYS);
    KV_NEW(turns->delta, KV_BLOCK_QUERIES * KV_CHUNK_KEYS);
    KV_NEW(turns->cosine, angles->half);
    KV_NEW(turns->sine, angles->half);
out:
    return st;
}

void kv_turns_free(kv_turns *turns) {
    free(turns->key);
    free(turns->delta);
    free(turns->cosine);
    free(turns->sine);
}

void kv_turns_begin(kv_turns *turns, const kv_block *block, const int32_t *t, const int32_t *leaves,
                    int32_t n) {
    for (int32_t r = 0; r < block->n_query; r++) {
        const int32_t u = block->first + r;
        int32_t held = 0;
        for (int32_t j = 0; j < n; j++) held += (t[j] <= u) & (u < leaves[j]);
        turns->held[r] = held;
        turns->met[r] = 0;
    }
}

static int32_t place_of(const kv_span *span, int32_t t) {
    return span->position ? span->position[t] : t;
}

/* Whether the chunk's keys stand at consecutive places, so that one delta holds for all of them. */
static bool is_run(const kv_span *span, const kv_chunk *chunk) {
    for (int32_t j = 1; j < chunk->n_key; j++)
        if (place_of(span, chunk->birth[j]) != place_of(span, chunk->birth[0]) + j) return false;
    return true;
}

void kv_turns_chunk(kv_turns *turns, const kv_block *block, const kv_span *span,
                    const kv_chunk *chunk) {
    const bool run = is_run(span, chunk);
    int32_t n = 0;
    for (int32_t r = 0; r < block->n_query; r++) {
        const int32_t u = block->first + r;
        /* delta of the next kept key, were it at place 0 */
        int32_t base = place_of(span, u) - (turns->held[r] - 1 - turns->met[r]);
        turns->start[r] = n;
        if (run && u >= chunk->birth_max && u < chunk->seen_to &&
            base == place_of(span, chunk->birth[0])) {
            turns->met[r] += chunk->n_key;
            continue;
        }
        for (int32_t j = 0; j < chunk->n_key; j++) {
            const int32_t t = chunk->birth[j];
            if (t > u || u >= chunk->death[j]) continue;
            turns->key[n] = j;
            turns->delta[n] = base - place_of(span, t);
            n += turns->delta[n] != 0;
            turns->met[r]++;
            base++;
        }
    }
    turns->start[block->n_query] = n;
}

void kv_turns_apply(const kv_turns *turns, const kv_angles *angles, const kv_block *block,
                    const kv_panel *panel, const kv_panel_shape *shape, const kv_span *span,
                    const kv_chunk *chunk, float *l, float *row_max) {
    const size_t width = (size_t)shape->head_dim,
                 kv_head = panel->row / (size_t)span->stride / (size_t)shape->group;
    for (int32_t r = 0; r < panel->n_row; r++) {
        const int32_t at = panel->first + r - block->first;
        const float *q = span->q + (panel->row + (size_t)r) * width;
        float *row = l + r * KV_CHUNK_KEYS;
        int32_t known = -1;
        bool top_lost = false;
        for (int32_t i = turns->start[at]; i < turns->start[at + 1]; i++) {
            const int32_t delta = turns->delta[i], j = turns->key[i];
            const bool in_table = delta >= 0 && delta < angles->n;
            if (!in_table && (known < 0 || turns->delta[known] != delta))
                fill(angles, delta, turns->cosine, turns->sine), known = i;
            const size_t base = in_table ? (size_t)delta * (size_t)angles->half : 0;
            const float *k =
                span->k + (kv_head * (size_t)span->stride + (size_t)chunk->birth[j]) * width;
            const float x =
                shape->logit_factor *
                shape->kernel->rotated_dot(q, k, angles->half,
                                           in_table ? angles->cosine + base : turns->cosine,
                                           in_table ? angles->sine + base : turns->sine);
            top_lost |= row[j] == row_max[r];
            row[j] = shape->cap_factor > 0 ? shape->cap_factor * tanhf(x) : x;
            if (row[j] >= row_max[r]) row_max[r] = row[j], top_lost = false;
        }
        if (!top_lost) continue;
        row_max[r] = -INFINITY;
        for (int32_t j = 0; j < chunk->n_key; j++)
            if (row[j] > row_max[r]) row_max[r] = row[j];
    }
}
