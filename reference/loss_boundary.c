/* Boundary loss and its gradients (maths.md 4). */
#include "reference/loss_boundary.h"

#include <math.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/num.h"
#include "reference/core/rand.h"
#include "reference/select.h"

const kv_loss_options kv_loss_defaults = {.margin = 0.5, .temp = 1, .balance = true, .tail = 64};

int32_t kv_boundary_queries(int32_t n, const kv_run *run, const kv_loss_options *o, uint64_t seed,
                            int32_t step, int32_t document, int32_t *query) {
    int32_t first = run->budget, count = n - o->tail - first;
    if (count <= 0) return 0;
    if (o->sample == 0 || o->sample >= count) {
        for (int32_t i = 0; i < count; i++) query[i] = first + i;
        return count;
    }
    for (int32_t i = 0; i < o->sample; i++) {
        double at = i + kv_rand_uniform(seed, (uint32_t)step, (uint32_t)document, (uint32_t)i, 0);
        query[i] = first + (int32_t)(at * count / o->sample);
    }
    return o->sample;
}

kv_status kv_boundary_pairs(const float *r, int32_t n, const kv_run *run, double log_gamma,
                            const int32_t *query, int32_t n_query, int32_t offset, kv_pair *pair) {
    kv_status st = KV_OK;
    int32_t k = run->budget - run->sinks - run->window;
    float *priority = NULL;
    int32_t *rank = NULL, *at = NULL, *evict_at = NULL, *tau = NULL;
    KV_NEW(priority, n);
    KV_NEW(rank, n);
    KV_NEW(at, n);
    KV_NEW(evict_at, n);
    KV_NEW(tau, n);
    for (int32_t t = 0; t < n; t++) priority[t] = kv_static_priority(r[t], t, log_gamma);
    KV_TRY(kv_rank(priority, n, rank, at));
    KV_TRY(kv_cutoff_pointer(rank, at, n, run->sinks, run->window, k, evict_at, tau));
    for (int32_t i = 0; i < n_query; i++) {
        int32_t fresh = query[i] - run->window, bound = at[tau[query[i]]];
        pair[i] = (kv_pair){
            .fresh = fresh + offset,
            .bound = bound + offset,
            .keep = rank[fresh] <= tau[query[i]],
            .margin = fabs((double)r[fresh] - (double)r[bound] + (bound - fresh) * log_gamma),
        };
    }
out:
    free(priority);
    free(rank);
    free(at);
    free(evict_at);
    free(tau);
    return st;
}

static double weight_of(const kv_pair *p, const kv_loss_options *o) {
    if (p->fresh == p->bound) return 0;
    return o->margin > 0 ? fmin(1, p->margin / o->margin) : 1;
}

static double softplus(double x) { return fmax(x, 0) + log1p(exp(-fabs(x))); }

kv_loss kv_boundary_loss(const kv_pair *pair, int32_t n_pair, const kv_loss_options *o,
                         const double *rhat, int64_t n_token, double log_gamma, double *d_rhat) {
    kv_loss out = {0};
    double class_sum[2] = {0}, factor[2] = {1, 1}, z = 0;
    int64_t right = 0, keep = 0;
    memset(d_rhat, 0, (size_t)n_token * sizeof *d_rhat);
    for (int32_t i = 0; i < n_pair; i++) class_sum[pair[i].keep] += weight_of(&pair[i], o);
    if (o->balance && class_sum[0] > 0 && class_sum[1] > 0)
        for (int y = 0; y < 2; y++)
            factor[y] = fmin(10, (class_sum[0] + class_sum[1]) / (2 * class_sum[y]));
    for (int y = 0; y < 2; y++) z += factor[y] * class_sum[y];
    if (z == 0) return out;
    for (int32_t i = 0; i < n_pair; i++) {
        const kv_pair *p = &pair[i];
        double weight = weight_of(p, o) * factor[p->keep] / z, sign = p->keep ? 1 : -1;
        double age = p->bound - p->fresh;
        double delta = rhat[p->fresh] - rhat[p->bound] + age * log_gamma;
        if (weight == 0) continue;
        double c = -weight * sign / o->temp / (1 + exp(sign * delta / o->temp));
        out.loss += weight * softplus(-sign * delta / o->temp);
        out.log_gamma += c * age;
        d_rhat[p->fresh] += c;
        d_rhat[p->bound] -= c;
        out.n++;
        keep += p->keep;
        right += (delta > 0) == p->keep;
    }
    out.right = (double)right / (double)out.n;
    out.keep = (double)keep / (double)out.n;
    return out;
}
