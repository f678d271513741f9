/* One attention logit in double, for code that walks single pairs; sweeps have their own kernels. */
#ifndef KV_LOGIT_H
#define KV_LOGIT_H

#include <math.h>

#include "policies/policy.h"

/* q, k [head_dim] -> scale * q.k, capped as the span says. Eight partial sums: a single one would wait for every addition. */
static inline double kv_logit(const kv_span *span, const float *q, const float *k) {
    enum { PARTS = 8 };
    double part[PARTS] = {0};
    int32_t c = 0;
    for (; c + PARTS <= span->head_dim; c += PARTS)
        for (int32_t j = 0; j < PARTS; j++) part[j] += (double)q[c + j] * (double)k[c + j];
    for (; c < span->head_dim; c++) part[0] += (double)q[c] * (double)k[c];
    double dot =
        ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    dot *= (double)span->scale;
    double cap = (double)span->softcap;
    return cap > 0 ? cap * tanh(dot / cap) : dot;
}

#endif
