/* Kernels of the closed-loop replay and of the step oracle, one table per instruction set (closed_loop_{generic,avx2,avx512}.c compile
 * closed_loop_kernel.h). A tile is KV_LOOP_STEP consecutive queries of one query head; key slots are stored in panels of `panel`
 * slots, [n_panel][head_dim][panel], so that one pass over a panel serves every tile from registers. */
#ifndef KV_CLOSED_LOOP_H
#define KV_CLOSED_LOOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KV_LOOP_STEP = 6 };

/* One update of the statistic A over n slots (n a multiple of `panel`). */
typedef struct kv_loop_update {
    const float *const *e; /* [n_row] rows of exponentials, [n] each, 0 where no key is held */
    const double *inverse; /* [n_row] 1 / sum of each row */
    const float *tiny;     /* [n_row] sum * 2^-126: less is a probability below 2^-126, which counts
                              as 0 (contract.md 3) */
    int32_t n_row, n;
    bool use_max;
    double factor, decay; /* A = decay * A + factor * (sum or max over rows of p) */
    const int32_t *time;  /* [n] position held by the slot */
    int32_t limit;        /* only slots with time <= limit may leave */
    double *a;            /* [n] */
} kv_loop_update;

typedef struct kv_loop_kernel {
    int32_t panel;
    /* out[tile][step][slot] = scale * q.k; q [n_tile][KV_LOOP_STEP][head_dim], rows of out are `ld` floats apart. The sum over
     * head_dim runs in order, so a logit never depends on where or with what it is computed. */
    void (*logits)(const float *q, const float *panels, int32_t n_tile, int32_t n_panel,
                   int32_t head_dim, float scale, float *out, size_t ld);
    void (*softcap)(float *x, int32_t n, float cap);
    float (*maximum)(const float *x, int32_t n);
    void (*exponential)(float *x, int32_t n, float shift); /* x = exp(x - shift) */
    double (*sum)(const float *x, int32_t n);
    double (*update)(const kv_loop_update *u); /* the least A among the slots that may leave */
} kv_loop_kernel;

extern const kv_loop_kernel kv_loop_kernel_generic, kv_loop_kernel_avx2, kv_loop_kernel_avx512;
const kv_loop_kernel *kv_loop_kernel_best(void); /* for this processor */

#endif
