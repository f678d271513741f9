/* Attention and future-attention targets in double, every sum written out (maths.md 2, 3.7; contract.md 2, 3). */
#ifndef KV_NAIVE_ATTENTION_H
#define KV_NAIVE_ATTENTION_H

#include "reference/attention.h"

/* Arrays as in kv_dense and kv_masked, in double; whatever the request. */
typedef struct naive_dense {
    double *lse, *long_mass, *top_p, *o, *column[KV_DENSE_POWERS];
    int32_t *top_t;
} naive_dense;
void naive_dense_compute(const kv_span *span, const kv_dense_request *request, naive_dense *out);
void naive_dense_free(naive_dense *d);

typedef struct naive_masked {
    double *o, *lse, *lse_long, *lse_orig;
} naive_masked;
void naive_masked_compute(const kv_span *span, const kv_masked_request *request, naive_masked *out);
void naive_masked_free(naive_masked *m);

/* m_t of KV head h, and r_t = log(eps_power + m_t) (maths.md 2.1, 2.6). */
double naive_target_mass(const kv_span *span, int32_t window, double power, bool mean, int32_t h,
                         int32_t t);
double naive_target_log(const kv_span *span, int32_t window, double power, bool mean, double eps,
                        int32_t h, int32_t t);

#endif
