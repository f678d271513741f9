/* Rank correlation with average ranks (Spearman 1904; ties as in Kendall, Rank Correlation Methods, ch. 3). */
#include "experiments/spearman.h"

#include <math.h>

#include "reference/core/mem.h"

typedef struct item {
    double value;
    size_t at;
} item;

static int by_value(const void *a, const void *b) {
    const double x = ((const item *)a)->value, y = ((const item *)b)->value;
    return (x > y) - (x < y);
}

/* rank[i] = mean 1-based rank of x[i], less the mean of all ranks. */
static kv_status centred_ranks(const double *x, size_t n, double *rank) {
    kv_status st = KV_OK;
    item *sorted = NULL;
    KV_NEW(sorted, n);
    for (size_t i = 0; i < n; i++) sorted[i] = (item){x[i], i};
    qsort(sorted, n, sizeof *sorted, by_value);
    for (size_t first = 0, end; first < n; first = end) {
        for (end = first + 1; end < n && sorted[end].value == sorted[first].value;) end++;
        for (size_t i = first; i < end; i++)
            rank[sorted[i].at] = (double)(first + 1 + end) / 2 - (double)(n + 1) / 2;
    }
out:
    free(sorted);
    return st;
}

kv_status kv_spearman(const double *x, const double *y, size_t n, double *rho) {
    kv_status st = KV_OK;
    double *rx = NULL, *ry = NULL, xy = 0, xx = 0, yy = 0;
    KV_NEW(rx, n);
    KV_NEW(ry, n);
    KV_TRY(centred_ranks(x, n, rx));
    KV_TRY(centred_ranks(y, n, ry));
    for (size_t i = 0; i < n; i++) {
        xy += rx[i] * ry[i];
        xx += rx[i] * rx[i];
        yy += ry[i] * ry[i];
    }
    *rho = xx > 0 && yy > 0 ? xy / sqrt(xx * yy) : NAN;
out:
    free(rx);
    free(ry);
    return st;
}
