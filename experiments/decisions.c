/* Counting right decisions at the target's boundary. */
#include "experiments/decisions.h"

#include <math.h>
#include <stdlib.h>

#include "reference/core/mem.h"
#include "reference/loss_boundary.h"

kv_status kv_decisions_add(kv_decisions *d, const kv_span *span, const kv_run *run,
                           const float *target, const double *log_gamma, const float *priority) {
    static const kv_loss_options every_query = {0};
    kv_status st = KV_OK;
    int32_t *query = NULL; /* [n_token] */
    kv_pair *pair = NULL;  /* [n_query] */
    if (run->budget <= run->sinks + run->window) return KV_OK;
    KV_NEW(query, span->n_token);
    const int32_t n = kv_boundary_queries(span->n_token, run, &every_query, 0, 0, 0, query);
    if (n == 0) goto out;
    KV_NEW(pair, n);
    for (int32_t h = 0; h < span->n_kv_head; h++) {
        const float *x = priority + h * span->stride;
        KV_TRY(kv_boundary_pairs(target + h * span->stride, span->n_token, run, log_gamma[h], query,
                                 n, 0, pair));
        for (int32_t i = 0; i < n; i++) {
            if (pair[i].fresh == pair[i].bound) continue;
            d->n[pair[i].keep]++;
            d->right[pair[i].keep] += (x[pair[i].fresh] > x[pair[i].bound]) == pair[i].keep;
        }
    }
out:
    free(query);
    free(pair);
    return st;
}

double kv_decisions_plain(const kv_decisions *d) {
    const int64_t n = d->n[0] + d->n[1];
    return n ? (double)(d->right[0] + d->right[1]) / (double)n : NAN;
}

double kv_decisions_balanced(const kv_decisions *d) {
    if (d->n[0] == 0 || d->n[1] == 0) return NAN;
    return ((double)d->right[0] / (double)d->n[0] + (double)d->right[1] / (double)d->n[1]) / 2;
}
