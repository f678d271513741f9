/* Priorities that follow from the keys alone (priority.h). */
#include "reference/priority.h"

#include <math.h>
#include <stdlib.h>

#include "reference/core/mem.h"

enum { FORK_VALUES = 1 << 16 }; /* below, waking threads costs more than the work */

static double norm(const float *k, int32_t d) {
    double sum = 0;
    for (int32_t c = 0; c < d; c++) sum += (double)k[c] * (double)k[c];
    return sqrt(sum);
}

float kv_norm_priority(const float *k, int32_t d) { return (float)-norm(k, d); }

void kv_direction_add(double *sum, const float *k, int32_t d) {
    double length = norm(k, d);
    for (int32_t c = 0; c < d && length > 0; c++) sum[c] += (double)k[c] / length;
}

float kv_cosine_priority(const float *k, const double *sum, int32_t n, int32_t d) {
    double dot = 0, square = 0, length = norm(k, d);
    for (int32_t c = 0; c < d; c++) {
        double a = sum[c] / n;
        dot += (double)k[c] * a;
        square += a * a;
    }
    double scale = length * sqrt(square);
    return scale > 0 ? (float)(-dot / scale) : 0.0f;
}

kv_status kv_norm_priorities(const kv_span *span, float *priority) {
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) {
            int64_t i = h * span->stride + t;
            priority[i] = kv_norm_priority(span->k + i * span->head_dim, span->head_dim);
        }
    return KV_OK;
}

kv_status kv_cosine_priorities(const kv_span *span, int32_t lead, float *priority) {
    kv_status st = KV_OK;
    int32_t d = span->head_dim, n = span->n_token;
    double *sum = NULL; /* [n_kv_head][head_dim] */
    KV_NEW(sum, span->n_kv_head * d);
#pragma omp parallel for if (span->n_kv_head * (int64_t)n * d >= FORK_VALUES)
    for (int32_t h = 0; h < span->n_kv_head; h++) {
        const float *k = span->k + h * span->stride * d;
        double *a = sum + h * d;
        int32_t used = 0;
        for (int32_t t = 0; t < n; t++) {
            int32_t until = lead < n - t ? t + lead + 1 : n;
            for (; used < until; used++) kv_direction_add(a, k + (int64_t)used * d, d);
            priority[h * span->stride + t] = kv_cosine_priority(k + (int64_t)t * d, a, used, d);
        }
    }
out:
    free(sum);
    return st;
}
