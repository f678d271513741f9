/* Re-rotation of cached keys (contract.md 2, streaming pos=cache): key i of the kept list stands at angle i, the query at angle
 * (keys held - 1), whatever their positions in the text.
 *
 * Rotations compose, so only the difference matters: against the recorded logit, key i is turned by
 *     delta = (position of query - position of key) - (held - 1 - i)
 * more. Keys with delta 0 (for streaming: all but the sinks) keep their logit; the others are computed again, one by one. */
#ifndef KV_ATTENTION_ROTATE_H
#define KV_ATTENTION_ROTATE_H

#include "reference/attention_block.h"

/* cos and sin of delta * inv_freq for 0 <= delta < n, shared by all threads. */
typedef struct kv_angles {
    int32_t n, half;
    const double *inv_freq; /* [half] */
    float *cosine, *sine;   /* [n][half] */
} kv_angles;

kv_status kv_angles_make(const kv_span *span,
                         kv_angles *angles); /* KV_E_DATA without frequencies */
void kv_angles_free(kv_angles *angles);

/* Keys of one chunk that are turned, per query of a block; and how many kept keys each query has met so far. */
typedef struct kv_turns {
    int32_t held[KV_BLOCK_QUERIES], met[KV_BLOCK_QUERIES];
    int32_t start[KV_BLOCK_QUERIES + 1]; /* turns of query r: start[r] .. start[r + 1] - 1 */
    int32_t *key, *delta; /* [KV_BLOCK_QUERIES * KV_CHUNK_KEYS] index in the chunk, angle */
    float *cosine, *sine; /* [half] for a delta outside the table */
} kv_turns;

kv_status kv_turns_make(const kv_angles *angles, kv_turns *turns);
void kv_turns_free(kv_turns *turns);

/* Counts the keys that each query of the block holds. t [n], leaves [n]: the block's keys in order of time, and their evict_at. */
void kv_turns_begin(kv_turns *turns, const kv_block *block, const int32_t *t, const int32_t *leaves,
                    int32_t n);
/* The next chunk, keys in order of time. */
void kv_turns_chunk(kv_turns *turns, const kv_block *block, const kv_span *span,
                    const kv_chunk *chunk);
/* Replaces the logits of turned keys in l and corrects row_max. */
void kv_turns_apply(const kv_turns *turns, const kv_angles *angles, const kv_block *block,
                    const kv_panel *panel, const kv_panel_shape *shape, const kv_span *span,
                    const kv_chunk *chunk, float *l, float *row_max);

#endif
