/* Inner loops of CPU attention, built once per instruction set (attention_impl.h), and the layouts they work on.
 *
 * A panel is KV_PANEL_ROWS queries of one head, cut into register tiles of KV_TILE_ROWS; a chunk is up to KV_CHUNK_KEYS keys.
 * Blocks are small enough for any L2 (a chunk of K and V at head size 64 is 128 KiB) and the same on every machine, so results
 * depend on the instruction set alone.
 *
 *   queries  [tile][head_dim][KV_TILE_ROWS]             as they are
 *   keys     [group of tile_keys][head_dim][tile_keys]  zero beyond the last key
 *   values   [slice of tile_keys dims][KV_CHUNK_KEYS][tile_keys]
 *   logits   [KV_PANEL_ROWS][KV_CHUNK_KEYS]
 *   output   [KV_PANEL_ROWS][padded head_dim]
 *
 * n_key of a chunk may be any number; loops over keys run to the next multiple of tile_keys, so logits beyond n_key must be
 * -infinity (probability 0). Pointers are 64-byte aligned. */
#ifndef KV_ATTENTION_KERNEL_H
#define KV_ATTENTION_KERNEL_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__SSE2__)
#include <xmmintrin.h>
#define KV_HARDWARE_FLUSH 1
#else
#define KV_HARDWARE_FLUSH 0
#endif

enum { KV_TILE_ROWS = 6, KV_PANEL_ROWS = 24, KV_CHUNK_KEYS = 256 };

/* "A probability below 2^-126 counts as 0" (contract.md 3) is what the processor's flush-to-zero mode does, for free and without the
 * stalls of denormal numbers. The mode belongs to a thread; add_p, add_p2 and max_p rely on it where it exists. */
static inline unsigned kv_flush_begin(void) {
#if KV_HARDWARE_FLUSH
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040u); /* flush results, take denormal operands as 0 */
    return before;
#else
    return 0;
#endif
}
static inline void kv_flush_end(unsigned before) {
#if KV_HARDWARE_FLUSH
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

typedef struct kv_attention_kernel {
    int32_t tile_keys;

    /* l = factor * (queries . keys) for n_tile tiles and n_key keys; row_max [KV_PANEL_ROWS] over them. The factor (scale * log2(e):
     * logits are powers of two) meets the finished products: folded into the queries its rounding would part keys whose products
     * with the query are equal. */
    void (*logits)(const float *queries, const float *keys, int32_t head_dim, int32_t n_tile,
                   int32_t n_key, float factor, float *l, float *row_max);

    /* One row: l = factor * tanh(l); returns its maximum. */
    float (*cap)(float *l, int32_t n_key, float factor);

    /* One row of query u: l = -infinity unless birth <= u < death (death NULL: never); returns the maximum. */
    float (*hide)(float *l, const int32_t *birth, const int32_t *death, int32_t u, int32_t n_key);

    /* e = 2^(l - max[row]), 0 below 2^-126, and its sums [n_row]. e may be l; max must be finite. */
    void (*exponentials)(const float *l, const float *max, int32_t n_row, int32_t n_key, float *e,
                         float *sum);

    /* One row: sum of e over keys with lo <= birth <= hi. */
    float (*sum_range)(const float *e, const int32_t *birth, int32_t lo, int32_t hi, int32_t n_key);

    /* One row: if a key with lo <= birth <= hi has l > *top, raises *top to the largest and returns the birth of the first such
     * key, else -1. */
    int32_t (*find_top)(const float *l, const int32_t *birth, int32_t lo, int32_t hi, int32_t n_key,
                        float *top);

    /* o = o * rescale[row] + e . values over n_key keys, for n_tile tiles and n_slice slices. */
    void (*values)(const float *e, const float *values, int32_t n_tile, int32_t n_key,
                   int32_t n_slice, const float *rescale, float *o);

    /* column[key] += sum over n_row rows of p, p^2, or max over rows of p, where p = e * weight[row], 0 below 2^-126. */
    void (*add_p)(const float *e, const float *weight, int32_t n_row, int32_t n_key,
                  double *column);
    void (*add_p2)(const float *e, const float *weight, int32_t n_row, int32_t n_key,
                   double *column);
    void (*max_p)(const float *e, const float *weight, int32_t n_row, int32_t n_key,
                  double *column);

    /* Any power, any normaliser: p = 2^(l - high[row] - low[row]), 0 below 2^-126; column += p^power (power INFINITY: max of p).
     * Runs in double, so p > 1 (sparse normaliser) and p^16 keep their range; beyond 2^1024 the column becomes infinite. */
    void (*add_power)(const float *l, const float *high, const float *low, int32_t n_row,
                      int32_t n_key, double power, double *column);

    /* q . R(angle) k for rotate-half pairs (c, c + half): sum cos (q_c k_c + q_c' k_c') + sin (q_c' k_c - q_c k_c'). */
    float (*rotated_dot)(const float *q, const float *k, int32_t half, const float *cos,
                         const float *sin);

    /* n steps of as many independent fused multiply-adds as a register tile holds, nothing else: the ceiling that benchmarks divide by.
     * Returns a value that depends on them; *flop receives the number of operations. */
    float (*peak)(int64_t n, double *flop);
} kv_attention_kernel;

extern const kv_attention_kernel kv_attention_generic, kv_attention_avx2, kv_attention_avx512;

const kv_attention_kernel *kv_attention_kernel_get(void); /* the best one for this CPU */

/* x rounded up to a multiple of m. */
static inline int32_t kv_round_up(int32_t x, int32_t m) { return (x + m - 1) / m * m; }

/* Packing. index NULL: rows 0..n-1 of x [.][head_dim], else rows index[0..n-1]; n <= KV_CHUNK_KEYS for values. */
void kv_pack_queries(const float *x, int32_t n, int32_t head_dim, float *out);
void kv_pack_keys(const float *x, const int32_t *index, int32_t n, int32_t head_dim,
                  int32_t tile_keys, float *out);
void kv_pack_values(const float *x, const int32_t *index, int32_t n, int32_t head_dim,
                    int32_t tile_keys, float *out);

#endif
