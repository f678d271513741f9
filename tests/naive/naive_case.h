/* Spans for tests: random ones, and the one that the golden vectors of maths.md 12.8 are computed on. Rows past n_token (stride
 * larger than the document) hold NaN: nobody may read them. */
#ifndef KV_NAIVE_CASE_H
#define KV_NAIVE_CASE_H

#include "policies/policy.h"

typedef struct naive_case {
    kv_span span;
    float *q, *k, *v;
} naive_case;

/* Normal q, k (times `spread`: logits of size spread^2) and v. */
naive_case naive_case_random(uint64_t seed, int32_t n_token, int64_t stride, int32_t n_q_head,
                             int32_t n_kv_head, int32_t head_dim, double spread);
/* S = 24, H = 2, G = 2, d = 4. */
naive_case naive_case_golden(void);
void naive_case_free(naive_case *c);

/* "15 17 - 20": values of evict_at, - is never. Returns how many were read, at most n. */
int32_t naive_case_row(const char *text, int32_t n, int32_t *out);

#endif
