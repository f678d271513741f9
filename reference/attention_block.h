/* A block of consecutive queries, of all heads of one KV head, that meets one chunk of keys after another: the common part of dense
 * causal attention (kv_attend) and of attention under evict_at (kv_masked_compute). A chunk is read once for all rows. */
#ifndef KV_ATTENTION_BLOCK_H
#define KV_ATTENTION_BLOCK_H

#include "reference/attention_panel.h"

/* Largest block. A larger block shares its keys among more rows, but its queries and outputs must stay in L2 beside a chunk of keys
 * and values: 192 KiB of them, the same on every machine so that results do not depend on the cache. */
enum { KV_BLOCK_QUERIES = 96, KV_BLOCK_PANELS = KV_BLOCK_QUERIES / KV_PANEL_ROWS };
int32_t kv_block_queries(const kv_panel_shape *shape);

/* The block that a thread works on, with its buffers. */
typedef struct kv_block {
    int32_t first, n_query;   /* queries first .. first + n_query - 1 */
    int32_t n_panel;          /* of all heads of the group, heads in order */
    kv_panel *panel;          /* [group * KV_BLOCK_PANELS] */
    float *cells;             /* [KV_PANEL_ROWS][KV_CHUNK_KEYS] logits, then exponentials */
    float *queries, *outputs; /* of all panels */
} kv_block;

kv_status kv_block_make(const kv_panel_shape *shape, kv_block *b); /* free after failure too */
void kv_block_free(kv_block *b);

/* Packs the block's queries and clears its state. */
void kv_block_begin(kv_block *b, const kv_panel_shape *shape, const kv_span *span, int32_t kv_head,
                    int32_t first);

/* Writes o [n_q_head][stride][head_dim] and lse [n_q_head][stride] of the block; either may be NULL. */
void kv_block_end(const kv_block *b, const kv_panel_shape *shape, float *o, float *lse);

#endif
