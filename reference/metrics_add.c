/* Sums over one document of one layer (contract.md 3). A kept set is an interval in time per key, so every count over queries is
 * a sum of interval lengths or a running sum of interval ends: O(n) per KV head, whatever the budget. */
#include <math.h>

#include "reference/core/mem.h"
#include "reference/metrics_sums.h"
#include "reference/target.h"

/* Running sum of m over a set of keys that come and go. The rounding errors are carried along (Knuth's two-sum), so that a small
 * sum survives after large members have left; the count makes a sum over zeros exactly 0. */
typedef struct change {
    double high, low;
    int32_t n_positive;
} change;

static void change_add(change *c, double high, double low, int32_t n_positive) {
    const double sum = c->high + high, part = sum - c->high;
    c->low += (c->high - (sum - part)) + (high - part) + low;
    c->high = sum;
    c->n_positive += n_positive;
}

static double change_sum(const change *c) { return c->n_positive ? c->high + c->low : 0; }

/* Per KV head: what changes at each query, n_token + 1 entries each. */
typedef struct scratch {
    int32_t *kept, *long_kept;
    change *mass_kept, *mass_oracle;
} scratch;

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
static int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }
static int32_t length(int32_t from, int32_t to) { return to > from ? to - from : 0; }

static void mark(int32_t *at, int32_t from, int32_t to) {
    if (from >= to) return;
    at[from]++;
    at[to]--;
}

static void mark_mass(change *at, int32_t from, int32_t to, double m) {
    if (from >= to) return;
    change_add(&at[from], m, 0, m > 0);
    change_add(&at[to], -m, 0, -(m > 0));
}

/* Where the sets change; the sums that need no order. kind_common, kind_all [KV_KINDS] of this KV head. */
static void count_keys(const kv_run *run, const kv_metrics_item *item, int32_t h, const double *m,
                       kv_head_sums *sums, scratch *x, int64_t *kind_common, int64_t *kind_all) {
    const int32_t n = item->span->n_token, budget = run->budget;
    const size_t row = (size_t)h * (size_t)item->span->stride;
    for (int32_t t = 0; t < n; t++) {
        const int32_t end = least(item->evict_at[row + (size_t)t], n);
        mark(x->kept, t, end);
        sums->kept += length(most(t, budget), end);
        const int32_t joins = t + run->window; /* first query with t in E(u) */
        if (t < run->sinks || joins >= n) continue;
        const int32_t oracle = least(item->evict_oracle[row + (size_t)t], n),
                      both = least(end, oracle), from = most(joins, budget);
        mark(x->long_kept, joins, end);
        mark_mass(x->mass_kept, joins, end, m[row + (size_t)t]);
        mark_mass(x->mass_oracle, joins, oracle, m[row + (size_t)t]);
        sums->long_kept += length(from, end);
        sums->common += length(from, both);
        if (item->evict_own)
            sums->own += length(from, least(end, least(item->evict_own[row + (size_t)t], n)));
        if (item->kind) {
            kind_common[item->kind[t]] += length(from, both);
            kind_all[item->kind[t]] += length(from, oracle);
        }
    }
}

/* The sums that need the state at each query. Leaves the number of kept keys at u in x->kept[u]. */
static void count_queries(const kv_run *run, const kv_metrics_item *item, kv_head_sums *sums,
                          scratch *x) {
    int32_t kept = 0, long_kept = 0;
    change mass_kept = {0}, mass_oracle = {0};
    for (int32_t u = 0; u < item->span->n_token; u++) {
        kept += x->kept[u];
        long_kept += x->long_kept[u];
        change_add(&mass_kept, x->mass_kept[u].high, x->mass_kept[u].low,
                   x->mass_kept[u].n_positive);
        change_add(&mass_oracle, x->mass_oracle[u].high, x->mass_oracle[u].low,
                   x->mass_oracle[u].n_positive);
        x->kept[u] = kept;
        if (kept > sums->kept_max) sums->kept_max = kept;
        if (u < run->budget) continue;
        const double oracle = change_sum(&mass_oracle);
        sums->chance += (double)long_kept / (u - run->window - run->sinks + 1);
        sums->ratio += oracle > 0 ? change_sum(&mass_kept) / oracle : 1;
    }
}

static double squared(const float *a, const float *b, int32_t n) {
    double lane[8] = {0}, sum = 0;
    int32_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) {
            const double x = (double)a[i + j] - (b ? (double)b[i + j] : 0);
            lane[j] += x * x;
        }
    for (; i < n; i++) {
        const double x = (double)a[i] - (b ? (double)b[i] : 0);
        sum += x * x;
    }
    for (int j = 0; j < 8; j++) sum += lane[j];
    return sum;
}

/* One query head. kept [n_token]: keys visible to u. */
static void add_query_head(const kv_run *run, const kv_metrics_item *item, const kv_masked *masked,
                           int32_t i, const int32_t *kept, kv_query_sums *sums) {
    const kv_span *span = item->span;
    const kv_dense *dense = item->dense;
    const size_t stride = (size_t)span->stride, row = (size_t)i * stride,
                 d = (size_t)span->head_dim;
    const int32_t *evict_at =
        item->evict_at + (size_t)(i / (span->n_q_head / span->n_kv_head)) * stride;
    const float *lse = masked->lse_orig ? masked->lse_orig : masked->lse;
    for (int32_t u = run->budget; u < span->n_token; u++) {
        const size_t at = row + (size_t)u;
        const double norm = (double)dense->lse[at];
        /* The two fp32 normalisers come from different sums: their quotient may miss 1 by an ulp. */
        sums->mass += kept[u] == u + 1 ? 1 : fmin(1, exp((double)lse[at] - norm));
        sums->long_kept += exp((double)masked->lse_long[at] - norm);
        sums->long_all += (double)dense->long_mass[at];
        sums->difference += squared(masked->o + at * d, dense->o + at * d, span->head_dim);
        sums->output += squared(dense->o + at * d, NULL, span->head_dim);
        if (dense->top_p[at] < .5f) continue;
        sums->retrievals++;
        sums->hits += u < evict_at[dense->top_t[at]];
    }
}

static kv_status check_item(const kv_run *run, const kv_metrics_item *item) {
    const kv_dense *d = item->dense;
    if (!d->lse || !d->o || !d->long_mass || !d->top_p || !d->top_t)
        return KV_FAIL(KV_E_INTERNAL, "metrics need the dense output, long mass and events");
    if (d->request.sinks != run->sinks || d->request.window != run->window)
        return KV_FAIL(KV_E_INTERNAL, "the dense sweep has sinks %d, window %d; the run %d, %d",
                       d->request.sinks, d->request.window, run->sinks, run->window);
    if (item->masked && (!item->masked->lse || !item->masked->lse_long || !item->masked->o))
        return KV_FAIL(KV_E_INTERNAL, "metrics need the masked output and long log-sum-exp");
    return KV_OK;
}

/* What the heads see under evict_at, unless the item brings it. */
static kv_status mask(const kv_run *run, const kv_metrics_item *item, kv_masked *own,
                      const kv_masked **out) {
    *out = item->masked ? item->masked : own;
    if (item->masked) return KV_OK;
    const kv_masked_request request = {.evict_at = item->evict_at,
                                       .sinks = run->sinks,
                                       .window = run->window,
                                       .rerotate = item->rerotate,
                                       .want_output = true,
                                       .want_long = true};
    return kv_masked_compute(item->span, &request, own);
}

kv_status kv_metrics_measure(const kv_run *run, const kv_metrics_item *item, kv_layer_sums *sums) {
    kv_status st = KV_OK;
    const kv_span *span = item->span;
    const int32_t n_kv = span->n_kv_head, group = span->n_q_head / n_kv;
    const size_t n = (size_t)span->n_token + 1;
    const kv_masked *masked;
    kv_masked own = {0};
    double *m = NULL; /* [n_kv_head][stride] */
    int32_t *counts = NULL;
    change *changes = NULL;
    int64_t *kinds = NULL; /* [n_kv_head][2][KV_KINDS] */
    KV_TRY(check_item(run, item));
    KV_TRY(mask(run, item, &own, &masked));
    KV_NEW(m, n_kv * span->stride);
    KV_NEW(counts, (size_t)n_kv * 2 * n);
    KV_NEW(changes, (size_t)n_kv * 2 * n);
    KV_NEW(kinds, n_kv * 2 * KV_KINDS);
    KV_TRY(kv_target_mass(span, item->dense, 1, run->target_mean, m));
#pragma omp parallel for schedule(dynamic, 1)
    for (int32_t h = 0; h < n_kv; h++) {
        int32_t *c = counts + (size_t)h * 2 * n;
        change *d = changes + (size_t)h * 2 * n;
        int64_t *k = kinds + (ptrdiff_t)h * 2 * KV_KINDS;
        scratch x = {.kept = c, .long_kept = c + n, .mass_kept = d, .mass_oracle = d + n};
        count_keys(run, item, h, m, &sums->head[h], &x, k, k + KV_KINDS);
        count_queries(run, item, &sums->head[h], &x);
        for (int32_t i = h * group; i < (h + 1) * group; i++)
            add_query_head(run, item, masked, i, x.kept, &sums->query[i]);
    }
    for (int32_t h = 0; h < n_kv; h++)
        for (int32_t i = 0; i < KV_KINDS; i++) {
            sums->kind_common[i] += kinds[h * 2 * KV_KINDS + i];
            sums->kind_all[i] += kinds[h * 2 * KV_KINDS + KV_KINDS + i];
        }
out:
    kv_masked_free(&own);
    free(m);
    free(counts);
    free(changes);
    free(kinds);
    return st;
}

kv_status kv_metrics_add(kv_metrics *metrics, const kv_metrics_item *item) {
    kv_status st = KV_OK;
    const kv_ops *ops = item->ops ? item->ops : &kv_ops_cpu;
    KV_TRY(kv_metrics_check(metrics, item->span));
    kv_layer_sums *layer = &metrics->layer[item->span->layer_index];
    KV_TRY(ops->measure(&metrics->run, item, layer));
    const int32_t counted = length(metrics->run.budget, item->span->n_token);
    layer->counted += counted;
    layer->decided += counted;
    layer->has_own |= item->evict_own != NULL;
out:
    return st;
}
