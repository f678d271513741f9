/* One panel of queries meeting one chunk of keys after another: online softmax and its by-products. Shared by the dense sweep
 * (attention_dense.c) and by the gathered form (attention_block.c). Logits are in units of log 2. */
#ifndef KV_ATTENTION_PANEL_H
#define KV_ATTENTION_PANEL_H

#include "policies/policy.h"
#include "reference/attention_kernel.h"

/* What all panels of a call have in common. */
typedef struct kv_panel_shape {
    const kv_attention_kernel *kernel;
    int32_t head_dim, padded_dim, group;
    float logit_factor; /* of the products of queries and keys */
    float cap_factor;   /* 0: no soft cap, else l = cap_factor * tanh(l) */
    int32_t sinks, window;
    bool want_long, want_top, want_output;
} kv_panel_shape;

/* Up to KV_CHUNK_KEYS keys. Query u sees key j iff birth[j] <= u < death[j]; birth = position of the key. */
typedef struct kv_chunk {
    const float *keys, *values; /* packed */
    const int32_t *birth; /* [n_key rounded up to tile_keys]; padding is born after every query */
    const int32_t *death; /* same size; NULL: keys never leave */
    int32_t n_key;
    int32_t birth_min, birth_max; /* over the n_key keys */
    int32_t seen_from, seen_to;   /* queries in [seen_from, seen_to) see all, padding included */
} kv_chunk;

/* All keys and values of a span, packed once and shared by the query heads of each group. */
typedef struct kv_packed {
    int32_t n_token, n_chunk;
    float *keys;    /* [n_kv_head][n_chunk] chunks of [KV_CHUNK_KEYS][head_dim] */
    float *values;  /* the same of [KV_CHUNK_KEYS][padded_dim]; NULL without output */
    int32_t *birth; /* [n_chunk * KV_CHUNK_KEYS] 0, 1, … */
} kv_packed;

/* Running softmax of a panel's rows over the chunks so far. */
typedef struct kv_softmax {
    float max[KV_PANEL_ROWS];  /* largest logit, -INFINITY before the first visible key */
    double sum[KV_PANEL_ROWS]; /* sum of 2^(l - max) */
    double far[KV_PANEL_ROWS]; /* the same over E(u) (want_long) */
    float top[KV_PANEL_ROWS];  /* largest logit over E(u) and its key (want_top) */
    int32_t top_key[KV_PANEL_ROWS];
    float rescale[KV_PANEL_ROWS]; /* 2^(old max - new max) of the last chunk */
} kv_softmax;

typedef struct kv_panel {
    int32_t first, n_row, n_tile; /* queries first .. first + n_row - 1 */
    size_t row;                   /* index of the first one in arrays [n_q_head][stride] */
    float *queries;               /* packed [KV_PANEL_ROWS][head_dim] */
    float *output;                /* [KV_PANEL_ROWS][padded_dim], unnormalised */
    kv_softmax softmax;
} kv_panel;

kv_status kv_panel_shape_make(const kv_span *span, kv_panel_shape *shape);

kv_status kv_packed_make(const kv_span *span, const kv_panel_shape *shape, kv_packed *packed);
void kv_packed_free(kv_packed *packed);
/* Chunk c of a KV head, cut after key `last`. */
kv_chunk kv_packed_chunk(const kv_packed *packed, const kv_panel_shape *shape, int32_t kv_head,
                         int32_t c, int32_t last);

/* Packs up to n_row <= KV_PANEL_ROWS queries of a head from query `first` on and clears the state; the buffers are the caller's. */
void kv_panel_begin(kv_panel *p, const kv_panel_shape *shape, const kv_span *span, int32_t head,
                    int32_t first, int32_t n_row);

/* Logits of the chunk, capped and hidden: l [KV_PANEL_ROWS][KV_CHUNK_KEYS], row_max [KV_PANEL_ROWS]. */
void kv_panel_logits(const kv_panel *p, const kv_panel_shape *shape, const kv_chunk *chunk,
                     float *l, float *row_max);

/* Takes logits into the running softmax of queries first .. first + n_row - 1 and leaves e = 2^(l - max) (e may be l). */
void kv_softmax_begin(kv_softmax *s);
void kv_softmax_add(kv_softmax *s, const kv_panel_shape *shape, const kv_chunk *chunk,
                    int32_t first, int32_t n_row, const float *row_max, const float *l, float *e);

/* output = output * rescale + e . values of the chunk. */
void kv_panel_values(kv_panel *p, const kv_panel_shape *shape, const kv_chunk *chunk,
                     const float *e);

/* Natural log-sum-exp of a row from its parts; -INFINITY for an empty sum. */
double kv_softmax_lse(float max, double sum);

/* Output rows, normalised, to o [n_row][head_dim]; rows without a visible key give 0. */
void kv_panel_output(const kv_panel *p, const kv_panel_shape *shape, float *o);

#endif
