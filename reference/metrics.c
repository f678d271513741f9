/* Metrics of contract.md 3: from the sums of all documents and layers to means, shares and nulls. */
#include "reference/metrics.h"

#include <math.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/metrics_sums.h"

kv_status kv_metrics_check(const kv_metrics *m, const kv_span *span) {
    const kv_metrics_shape *s = &m->shape;
    if (span->layer_index < 0 || span->layer_index >= s->n_layer || span->n_q_head != s->n_q_head ||
        span->n_kv_head != s->n_kv_head || span->head_dim != s->head_dim)
        return KV_FAIL(KV_E_INTERNAL,
                       "metrics for %d layers, %d query and %d KV heads of size %d got layer %d "
                       "with %d, %d and %d",
                       s->n_layer, s->n_q_head, s->n_kv_head, s->head_dim, span->layer_index,
                       span->n_q_head, span->n_kv_head, span->head_dim);
    return KV_OK;
}

kv_status kv_metrics_open(const kv_metrics_shape *shape, const kv_run *run, kv_metrics **out) {
    kv_status st = KV_OK;
    kv_metrics *m = NULL;
    KV_NEW(m, 1);
    m->shape = *shape;
    m->run = *run;
    KV_NEW(m->layer, shape->n_layer);
    for (int32_t l = 0; l < shape->n_layer; l++) {
        KV_NEW(m->layer[l].head, shape->n_kv_head);
        KV_NEW(m->layer[l].query, shape->n_q_head);
    }
out:
    if (st != KV_OK) {
        kv_metrics_free(m);
        m = NULL;
    }
    *out = m;
    return st;
}

void kv_metrics_free(kv_metrics *m) {
    if (!m) return;
    for (int32_t l = 0; m->layer && l < m->shape.n_layer; l++) {
        free(m->layer[l].head);
        free(m->layer[l].query);
    }
    free(m->layer);
    free(m);
}

kv_status kv_metrics_add_step(kv_metrics *m, const kv_span *span, const double *step_mass) {
    kv_status st = kv_metrics_check(m, span);
    if (st != KV_OK) return st;
    kv_layer_sums *layer = &m->layer[span->layer_index];
    const int32_t group = span->n_q_head / span->n_kv_head, from = m->run.budget;
    for (int32_t i = 0; i < span->n_q_head; i++)
        for (int32_t u = from; u < span->n_token; u++)
            layer->query[i].mass += step_mass[(i / group) * span->stride + u];
    layer->counted += span->n_token > from ? span->n_token - from : 0;
    return KV_OK;
}

static double share(double part, double whole) { return whole > 0 ? part / whole : NAN; }

/* Mean over the defined values, NAN if there are none. */
static double mean(const double *x, int32_t n) {
    double sum = 0;
    int32_t defined = 0;
    for (int32_t i = 0; i < n; i++)
        if (!isnan(x[i])) {
            sum += x[i];
            defined++;
        }
    return share(sum, defined);
}

static double adjusted(double recall, double chance) {
    return chance == 1 ? NAN : (recall - chance) / (1 - chance);
}

static double output_error(const kv_query_sums *q, int64_t counted) {
    if (!counted) return NAN;
    if (q->output > 0) return sqrt(q->difference / q->output);
    return q->difference > 0 ? INFINITY : 0;
}

static void finish_head(const kv_metrics *m, int32_t l, int32_t h, kv_metrics_result *r) {
    const kv_layer_sums *layer = &m->layer[l];
    const kv_head_sums *s = &layer->head[h];
    const int32_t at = l * m->shape.n_kv_head + h;
    const double n = (double)layer->decided;
    const int32_t k = m->run.budget - m->run.sinks - m->run.window;
    r->recall[at] = share((double)s->common, n * k);
    r->own[at] = layer->has_own ? share((double)s->own, n * k) : NAN;
    r->chance[at] = share(s->chance, n);
    r->adjusted[at] = adjusted(r->recall[at], r->chance[at]);
    r->long_kept[at] = share((double)s->long_kept, n);
    r->ratio[at] = k ? share(s->ratio, n) : NAN;
    r->kept[at] = share((double)s->kept, n);
    if (s->kept_max > r->kept_max) r->kept_max = s->kept_max;
    r->cache_bytes += (double)(s->kept_max * 2 * m->shape.head_dim * m->shape.element_size);
}

static void finish_query_head(const kv_metrics *m, int32_t l, int32_t i, kv_metrics_result *r) {
    const kv_layer_sums *layer = &m->layer[l];
    const kv_query_sums *s = &layer->query[i];
    const int32_t at = l * m->shape.n_q_head + i;
    r->mass[at] = share(s->mass, (double)layer->counted);
    r->mass_long[at] = share(s->long_kept, s->long_all);
    r->error[at] = output_error(s, layer->decided);
    r->hits[at] = s->hits;
    r->retrievals[at] = s->retrievals;
}

static void finish_layer(const kv_metrics *m, int32_t l, kv_metrics_result *r) {
    const int32_t n_q = m->shape.n_q_head, n_kv = m->shape.n_kv_head;
    int64_t hits = 0, retrievals = 0;
    for (int32_t h = 0; h < n_kv; h++) finish_head(m, l, h, r);
    for (int32_t i = 0; i < n_q; i++) {
        finish_query_head(m, l, i, r);
        hits += m->layer[l].query[i].hits;
        retrievals += m->layer[l].query[i].retrievals;
    }
    r->mass_by_layer[l] = mean(r->mass + l * n_q, n_q);
    r->error_by_layer[l] = mean(r->error + l * n_q, n_q);
    r->kept_by_layer[l] = mean(r->kept + l * n_kv, n_kv);
    r->hit_by_layer[l] = share((double)hits, (double)retrievals);
}

static void finish_all(const kv_metrics *m, kv_metrics_result *r) {
    const int32_t n_layer = m->shape.n_layer, heads = n_layer * m->shape.n_kv_head,
                  queries = n_layer * m->shape.n_q_head;
    int64_t hits = 0;
    r->recall_mean = mean(r->recall, heads);
    r->recall_chance = mean(r->chance, heads);
    r->recall_adjusted = adjusted(r->recall_mean, r->recall_chance);
    r->recall_own = mean(r->own, heads);
    r->long_kept_mean = mean(r->long_kept, heads);
    r->future_mass_ratio = mean(r->ratio, heads);
    r->kept_mean = mean(r->kept, heads);
    r->retained_mass = mean(r->mass, queries);
    r->retained_mass_long = mean(r->mass_long, queries);
    r->output_error = mean(r->error, queries);
    for (int32_t i = 0; i < queries; i++) {
        hits += r->hits[i];
        r->n_retrieval += r->retrievals[i];
    }
    r->retrieval_hit = share((double)hits, (double)r->n_retrieval);
    for (int32_t i = 0; i < KV_KINDS; i++) {
        int64_t common = 0, all = 0;
        for (int32_t l = 0; l < n_layer; l++) {
            common += m->layer[l].kind_common[i];
            all += m->layer[l].kind_all[i];
        }
        r->recall_by_kind[i] = share((double)common, (double)all);
    }
}

kv_status kv_metrics_finish(kv_metrics *m, kv_metrics_result *out) {
    kv_status st = KV_OK;
    const int32_t n_layer = m->shape.n_layer, heads = n_layer * m->shape.n_kv_head,
                  queries = n_layer * m->shape.n_q_head;
    memset(out, 0, sizeof *out);
    for (int32_t l = 0; l < n_layer; l++)
        if (m->layer[l].counted != m->layer[0].counted)
            KV_RAISE(KV_E_INTERNAL, "layer %d has %lld counted queries, layer 0 has %lld", l,
                     (long long)m->layer[l].counted, (long long)m->layer[0].counted);
    out->n_counted = m->layer[0].counted;
    double **const by_head[] = {&out->recall, &out->chance,   &out->own,      &out->ratio,
                                &out->kept,   &out->adjusted, &out->long_kept};
    double **const by_query[] = {&out->mass, &out->mass_long, &out->error};
    double **const by_layer[] = {&out->mass_by_layer, &out->hit_by_layer, &out->error_by_layer,
                                 &out->kept_by_layer};
    for (size_t i = 0; i < sizeof by_head / sizeof *by_head; i++) KV_NEW(*by_head[i], heads);
    for (size_t i = 0; i < sizeof by_query / sizeof *by_query; i++) KV_NEW(*by_query[i], queries);
    for (size_t i = 0; i < sizeof by_layer / sizeof *by_layer; i++) KV_NEW(*by_layer[i], n_layer);
    KV_NEW(out->hits, queries);
    KV_NEW(out->retrievals, queries);
    for (int32_t l = 0; l < n_layer; l++) finish_layer(m, l, out);
    finish_all(m, out);
out:
    if (st != KV_OK) kv_metrics_result_free(out);
    return st;
}

void kv_metrics_result_free(kv_metrics_result *r) {
    if (!r) return;
    free(r->recall);
    free(r->chance);
    free(r->own);
    free(r->ratio);
    free(r->kept);
    free(r->adjusted);
    free(r->long_kept);
    free(r->mass);
    free(r->mass_long);
    free(r->error);
    free(r->hits);
    free(r->retrievals);
    free(r->mass_by_layer);
    free(r->hit_by_layer);
    free(r->error_by_layer);
    free(r->kept_by_layer);
    memset(r, 0, sizeof *r);
}
