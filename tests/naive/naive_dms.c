/* Soft-masked attention, literal. */
#include "tests/naive/naive_dms.h"

#include <math.h>

void naive_dms_attention(const kv_dms_head_f64 *h, double *o) {
    for (int32_t u = 0; u < h->n; u++) {
        double sum = 0;
        for (int32_t c = 0; c < h->dim; c++) o[u * h->dim + c] = 0;
        for (int32_t t = 0; t <= u; t++) {
            double l = 0;
            for (int32_t c = 0; c < h->dim; c++)
                l += h->q[u * h->q_stride + c] * h->k[t * h->kv_stride + c];
            l *= h->scale;
            if (h->softcap > 0) l = h->softcap * tanh(l / h->softcap);
            if (u - t > h->window - 1) l += h->log_keep[t];
            sum += exp(l);
            for (int32_t c = 0; c < h->dim; c++)
                o[u * h->dim + c] += exp(l) * h->v[t * h->kv_stride + c];
        }
        for (int32_t c = 0; c < h->dim; c++) o[u * h->dim + c] /= sum;
    }
}
