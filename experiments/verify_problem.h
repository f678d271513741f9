/* Problems that the verification of attention shares: a table of awkward shapes and values, and spans filled with them.
 *
 * Tolerances: logits are fp32 on both sides, so a logit of size L carries about L 2^-23, and that is the relative error of a
 * probability. L is bounded by scale max|q| max|k|. */
#ifndef KV_EXPERIMENTS_VERIFY_PROBLEM_H
#define KV_EXPERIMENTS_VERIFY_PROBLEM_H

#include "experiments/verify.h"

typedef enum kv_verify_values {
    KV_VALUES_GRID, /* small multiples of 1/8: every product and sum is exact, so integer results must be equal */
    KV_VALUES_HALF,    /* normal, rounded to half */
    KV_VALUES_BFLOAT,  /* normal, rounded to bfloat16 */
    KV_VALUES_SINGLE,  /* normal, fp32: the split path */
    KV_VALUES_HUGE,    /* logits of several hundred: most probabilities underflow */
    KV_VALUES_TIES,    /* four different keys only */
    KV_VALUES_ZEROS,   /* +0 and -0: every row uniform */
    KV_VALUES_DENORMAL /* half denormals beside ordinary values */
} kv_verify_values;

typedef struct kv_verify_attention_shape {
    const char *name;
    int32_t n, n_q, n_kv, d, sinks, window, pad; /* pad: tokens of the stride behind the document */
    kv_verify_values values;
    float softcap;
} kv_verify_attention_shape;

extern const kv_verify_attention_shape kv_verify_attention_shapes[];
extern const int kv_verify_attention_count;

typedef struct kv_verify_problem {
    kv_span span;
    float *q, *k, *v;
    double logit, v_max; /* bounds */
} kv_verify_problem;

/* The same bytes for the same shape. */
kv_status kv_verify_problem_make(const kv_verify_attention_shape *s, kv_verify_problem *p);
void kv_verify_problem_free(kv_verify_problem *p); /* *p zeroed */

/* Relative error of a probability whose logits are bounded by `logit`; the constant covers exp2, sums and the accumulators. */
double kv_verify_probability_error(double logit);

#endif
