/* Literal transcription of the table of contract.md 3. */
#include "tests/naive/naive_metrics.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/naive/naive_replay.h"
#include "tests/naive/naive_select.h"

static const int32_t *head_row(const int32_t *x, const kv_span *s, int32_t h) {
    return x + h * s->stride;
}

/* Plain mean of sum/n over the heads, the undefined ones (NAN) left out. */
static double mean_of(const double *x, int32_t n) {
    double sum = 0, count = 0;
    for (int32_t i = 0; i < n; i++)
        if (!isnan(x[i])) {
            sum += x[i];
            count++;
        }
    return count > 0 ? sum / count : NAN;
}

/* One (layer, KV head) over all documents. */
static void one_head(const naive_document *doc, int32_t n_doc, const kv_run *run, int32_t l,
                     int32_t h, int32_t at, double *kind_common, double *kind_all,
                     kv_metrics_result *out) {
    const int32_t k = run->budget - run->sinks - run->window;
    double n = 0, recall = 0, own = 0, chance = 0, ratio = 0, kept_sum = 0, long_kept = 0, peak = 0;
    int has_own = 0;
    for (int32_t i = 0; i < n_doc; i++) {
        const kv_span *s = doc[i].span;
        if (s->layer_index != l) continue;
        const int32_t *ev = head_row(doc[i].evict_at, s, h),
                      *kt = head_row(doc[i].evict_oracle, s, h);
        double *m = calloc((size_t)(s->n_kv_head * s->stride), sizeof *m);
        naive_future_mass(s, run->window, 1, run->target_mean, m);
        for (int32_t u = 0; u < s->n_token; u++) {
            double kept = 0, eligible = 0, ks = 0, both = 0, both_own = 0, mass_ks = 0, mass_kt = 0;
            for (int32_t t = 0; t <= u; t++) {
                kept += u < ev[t];
                if (t < run->sinks || t > u - run->window) continue;
                const double x = m[h * s->stride + t];
                eligible++;
                if (u < ev[t]) ks++, mass_ks += x;
                if (u < kt[t]) mass_kt += x;
                if (u < ev[t] && u < kt[t]) both++;
                if (doc[i].evict_own && u < ev[t] && u < head_row(doc[i].evict_own, s, h)[t])
                    both_own++;
                if (!doc[i].kind || u < run->budget) continue;
                kind_common[doc[i].kind[t]] += u < ev[t] && u < kt[t];
                kind_all[doc[i].kind[t]] += u < kt[t];
            }
            peak = fmax(peak, kept);
            if (u < run->budget) continue;
            n++;
            kept_sum += kept;
            long_kept += ks;
            recall += both / k;
            own += both_own / k;
            chance += ks / eligible;
            ratio += mass_kt == 0 ? 1 : mass_ks / mass_kt;
        }
        has_own |= doc[i].evict_own != NULL;
        free(m);
    }
    out->recall[at] = n > 0 && k ? recall / n : NAN;
    out->own[at] = n > 0 && k && has_own ? own / n : NAN;
    out->chance[at] = n > 0 ? chance / n : NAN;
    out->adjusted[at] =
        out->chance[at] == 1 ? NAN : (out->recall[at] - out->chance[at]) / (1 - out->chance[at]);
    out->long_kept[at] = n > 0 ? long_kept / n : NAN;
    out->ratio[at] = n > 0 && k ? ratio / n : NAN;
    out->kept[at] = n > 0 ? kept_sum / n : NAN;
    out->kept_max = (int64_t)fmax((double)out->kept_max, peak);
    out->cache_bytes += peak;
}

/* One (layer, query head) over all documents. */
static void one_query_head(const naive_document *doc, int32_t n_doc, const kv_run *run, int32_t l,
                           int32_t i, int32_t at, kv_metrics_result *out) {
    double n = 0, mass = 0, part = 0, whole = 0, difference = 0, output = 0;
    for (int32_t x = 0; x < n_doc; x++) {
        const kv_span *s = doc[x].span;
        if (s->layer_index != l) continue;
        const int32_t d = s->head_dim, h = i / (s->n_q_head / s->n_kv_head);
        const int32_t *ev = head_row(doc[x].evict_at, s, h);
        uint8_t *all = malloc((size_t)s->n_token);
        int32_t *dense = malloc((size_t)(s->n_kv_head * s->stride) * sizeof *dense);
        double *p = calloc((size_t)s->n_token, sizeof *p), *o_d = calloc((size_t)d, sizeof *o_d),
               *o_s = calloc((size_t)d, sizeof *o_s);
        memset(all, 1, (size_t)s->n_token);
        for (int64_t t = 0; t < s->n_kv_head * s->stride; t++) dense[t] = KV_NEVER;
        for (int32_t u = run->budget; u < s->n_token; u++) {
            double best = 0;
            int32_t star = -1;
            naive_softmax(s, i, u, all, p);
            n++;
            for (int32_t t = 0; t <= u; t++) {
                if (u < ev[t]) mass += p[t];
                if (t < run->sinks || t > u - run->window) continue;
                whole += p[t];
                if (u < ev[t]) part += p[t];
                if (p[t] > best) best = p[t], star = t;
            }
            if (best >= .5) {
                out->retrievals[at]++;
                out->hits[at] += u < ev[star];
            }
            naive_masked_output(s, dense, i, u, o_d);
            naive_masked_output(s, doc[x].evict_at, i, u, o_s);
            for (int32_t c = 0; c < d; c++) {
                difference += (o_s[c] - o_d[c]) * (o_s[c] - o_d[c]);
                output += o_d[c] * o_d[c];
            }
        }
        free(all);
        free(dense);
        free(p);
        free(o_d);
        free(o_s);
    }
    out->mass[at] = n > 0 ? mass / n : NAN;
    out->mass_long[at] = whole > 0 ? part / whole : NAN;
    out->error[at] = n == 0 ? NAN : difference == 0 && output == 0 ? 0 : sqrt(difference / output);
}

void naive_metrics(const naive_document *doc, int32_t n_doc, const kv_metrics_shape *shape,
                   const kv_run *run, kv_metrics_result *out) {
    const int32_t layers = shape->n_layer, kv = shape->n_kv_head, q = shape->n_q_head;
    double common[KV_KINDS] = {0}, all[KV_KINDS] = {0};
    memset(out, 0, sizeof *out);
    double **const by_head[] = {&out->recall, &out->chance,   &out->own,      &out->ratio,
                                &out->kept,   &out->adjusted, &out->long_kept};
    double **const by_query[] = {&out->mass, &out->mass_long, &out->error};
    double **const by_layer[] = {&out->mass_by_layer, &out->hit_by_layer, &out->error_by_layer,
                                 &out->kept_by_layer};
    for (int i = 0; i < 7; i++) *by_head[i] = calloc((size_t)(layers * kv), sizeof(double));
    for (int i = 0; i < 3; i++) *by_query[i] = calloc((size_t)(layers * q), sizeof(double));
    for (int i = 0; i < 4; i++) *by_layer[i] = calloc((size_t)layers, sizeof(double));
    out->hits = calloc((size_t)(layers * q), sizeof(int64_t));
    out->retrievals = calloc((size_t)(layers * q), sizeof(int64_t));
    int64_t hits = 0;
    for (int32_t l = 0; l < layers; l++) {
        int64_t layer_hits = 0, layer_retrievals = 0;
        for (int32_t h = 0; h < kv; h++)
            one_head(doc, n_doc, run, l, h, l * kv + h, common, all, out);
        for (int32_t i = 0; i < q; i++) {
            one_query_head(doc, n_doc, run, l, i, l * q + i, out);
            layer_hits += out->hits[l * q + i];
            layer_retrievals += out->retrievals[l * q + i];
        }
        out->mass_by_layer[l] = mean_of(out->mass + l * q, q);
        out->error_by_layer[l] = mean_of(out->error + l * q, q);
        out->kept_by_layer[l] = mean_of(out->kept + l * kv, kv);
        out->hit_by_layer[l] =
            layer_retrievals ? (double)layer_hits / (double)layer_retrievals : NAN;
        hits += layer_hits;
        out->n_retrieval += layer_retrievals;
    }
    for (int32_t i = 0; i < n_doc; i++)
        if (doc[i].span->layer_index == 0 && doc[i].span->n_token > run->budget)
            out->n_counted += doc[i].span->n_token - run->budget;
    out->recall_mean = mean_of(out->recall, layers * kv);
    out->recall_chance = mean_of(out->chance, layers * kv);
    out->recall_adjusted = out->recall_chance == 1
                               ? NAN
                               : (out->recall_mean - out->recall_chance) / (1 - out->recall_chance);
    out->recall_own = mean_of(out->own, layers * kv);
    out->long_kept_mean = mean_of(out->long_kept, layers * kv);
    out->future_mass_ratio = mean_of(out->ratio, layers * kv);
    out->kept_mean = mean_of(out->kept, layers * kv);
    out->retained_mass = mean_of(out->mass, layers * q);
    out->retained_mass_long = mean_of(out->mass_long, layers * q);
    out->output_error = mean_of(out->error, layers * q);
    out->retrieval_hit = out->n_retrieval ? (double)hits / (double)out->n_retrieval : NAN;
    out->cache_bytes *= 2 * shape->head_dim * shape->element_size;
    for (int32_t i = 0; i < KV_KINDS; i++)
        out->recall_by_kind[i] = all[i] > 0 ? common[i] / all[i] : NAN;
}

static int descending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

void naive_step_mass(const kv_span *span, const kv_run *run, double *mass) {
    const int32_t n = span->n_token, group = span->n_q_head / span->n_kv_head,
                  k = run->budget - run->sinks - run->window;
    uint8_t *all = malloc((size_t)n);
    double *p = calloc((size_t)n, sizeof *p), *pm = calloc((size_t)n, sizeof *pm);
    memset(all, 1, (size_t)n);
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t u = 0; u < n; u++) {
            double *out = &mass[h * span->stride + u];
            *out = 1;
            if (u < run->budget) continue;
            memset(pm, 0, (size_t)n * sizeof *pm);
            for (int32_t g = 0; g < group; g++) {
                naive_softmax(span, h * group + g, u, all, p);
                for (int32_t t = 0; t <= u; t++) pm[t] += p[t] / group;
            }
            *out = 0;
            for (int32_t t = 0; t < run->sinks; t++) *out += pm[t];
            for (int32_t t = u - run->window + 1; t <= u; t++) *out += pm[t];
            const int32_t eligible = u - run->window - run->sinks + 1;
            qsort(pm + run->sinks, (size_t)eligible, sizeof *pm, descending);
            for (int32_t i = 0; i < k; i++) *out += pm[run->sinks + i];
        }
    free(all);
    free(p);
    free(pm);
}
