/* Boundary loss, literal. */
#include "tests/naive/naive_loss.h"

#include <math.h>
#include <stdlib.h>

/* The k-th best of E(q): larger r - t*lg first, equal ones smaller t first. */
static int32_t worst_kept(const double *r, int32_t q, const kv_run *run, double lg) {
    int32_t k = run->budget - run->sinks - run->window;
    for (int32_t t = run->sinks; t <= q - run->window; t++) {
        int32_t better = 0;
        for (int32_t x = run->sinks; x <= q - run->window; x++) {
            double a = r[x] - x * lg, b = r[t] - t * lg;
            better += a > b || (a == b && x < t);
        }
        if (better == k - 1) return t;
    }
    return -1;
}

double naive_boundary_loss(const double *r, const double *rhat, int32_t n, const kv_run *run,
                           double teacher, double student, const kv_loss_options *o,
                           const int32_t *query, int32_t n_query, naive_loss_count *count) {
    double w_keep = 0, w_drop = 0, z = 0, sum = 0;
    double *om = calloc((size_t)n, sizeof *om);
    int32_t *bound = calloc((size_t)n, sizeof *bound), *y = calloc((size_t)n, sizeof *y);
    if (count) *count = (naive_loss_count){0};
    for (int32_t i = 0; i < n_query; i++) {
        int32_t q = query[i], t = q - run->window, b = worst_kept(r, q, run, teacher);
        double pt = r[t] - t * teacher, pb = r[b] - b * teacher;
        bound[i] = b;
        y[i] = t == b || pt > pb || (pt == pb && t < b) ? 1 : -1;
        double margin = fabs(r[t] - r[b] + (b - t) * teacher);
        om[i] = t == b ? 0 : o->margin > 0 ? fmin(1, margin / o->margin) : 1;
        *(y[i] > 0 ? &w_keep : &w_drop) += om[i];
        if (count) *(t == b ? &count->same : y[i] > 0 ? &count->keep : &count->drop) += 1;
    }
    for (int32_t i = 0; i < n_query; i++) {
        double own = y[i] > 0 ? w_keep : w_drop;
        if (o->balance && w_keep > 0 && w_drop > 0)
            om[i] *= fmin(10, (w_keep + w_drop) / (2 * own));
        z += om[i];
    }
    for (int32_t i = 0; i < n_query; i++) {
        int32_t t = query[i] - run->window, b = bound[i];
        double delta = rhat[t] - rhat[b] + (b - t) * student;
        sum += om[i] * log(1 + exp(-y[i] * delta / o->temp));
    }
    free(om);
    free(bound);
    free(y);
    return z > 0 ? sum / z : 0;
}
