/* metrics.csv: trace,layer,kv_head,policy,variant,budget,seed,metric,value,n (contract.md 4). `layer` is the model's layer number;
 * numbers of a whole layer or run have "all" in the place of the head or layer. Metrics that exist per query head stand under the KV
 * head as the mean of its group, retrieval_hit as hits / retrievals of the group. */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "experiments/csv.h"
#include "experiments/results.h"

typedef struct out {
    FILE *file;
    const kv_report *report;
    const kv_row *row;
    char trace[256];
} out;

static void put(out *o, const char *layer, const char *head, const char *metric, double value,
                int64_t n) {
    kv_csv_put(o->file, o->trace);
    fprintf(o->file, ",%s,%s,%s,", layer, head, o->row->policy->name);
    kv_csv_put(o->file, o->row->variant);
    fprintf(o->file, ",%d,%" PRIu64 ",%s,", o->row->run.budget, o->row->run.seed, metric);
    if (isfinite(value)) fprintf(o->file, "%.17g", value);
    fprintf(o->file, ",%" PRId64 "\n", n);
}

static double group_mean(const double *x, int32_t group) { /* over the defined ones */
    double sum = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < group; i++)
        if (isfinite(x[i])) {
            sum += x[i];
            n++;
        }
    return n ? sum / n : NAN;
}

static void put_head(out *o, const kv_metrics_result *m, int32_t l, int32_t h) {
    const kv_trace_info *t = o->report->trace;
    const int32_t group = t->n_q_head / t->n_kv_head;
    const int64_t i = (int64_t)l * t->n_kv_head + h, g = (int64_t)l * t->n_q_head + h * group;
    char layer[16], head[16];
    int64_t hits = 0, retrievals = 0;
    snprintf(layer, sizeof layer, "%d", t->layer_id[l]);
    snprintf(head, sizeof head, "%d", h);
    for (int32_t j = 0; j < group; j++) {
        hits += m->hits[g + j];
        retrievals += m->retrievals[g + j];
    }
    put(o, layer, head, "recall", m->recall[i], m->n_counted);
    put(o, layer, head, "recall_chance", m->chance[i], m->n_counted);
    put(o, layer, head, "recall_adjusted", m->adjusted[i], m->n_counted);
    put(o, layer, head, "recall_own", m->own[i], m->n_counted);
    put(o, layer, head, "long_kept_mean", m->long_kept[i], m->n_counted);
    put(o, layer, head, "future_mass_ratio", m->ratio[i], m->n_counted);
    put(o, layer, head, "kept_mean", m->kept[i], m->n_counted);
    put(o, layer, head, "retained_mass", group_mean(m->mass + g, group), m->n_counted);
    put(o, layer, head, "retained_mass_long", group_mean(m->mass_long + g, group), m->n_counted);
    put(o, layer, head, "output_error", group_mean(m->error + g, group), m->n_counted);
    put(o, layer, head, "retrieval_hit", retrievals ? (double)hits / (double)retrievals : NAN,
        retrievals);
}

static void put_run(out *o, const kv_row_result *r) {
    const kv_metrics_result *m = &r->metrics;
    const int64_t n = m->n_counted;
    put(o, "all", "all", "recall_mean", m->recall_mean, n);
    put(o, "all", "all", "recall_chance", m->recall_chance, n);
    put(o, "all", "all", "recall_adjusted", m->recall_adjusted, n);
    put(o, "all", "all", "recall_own", m->recall_own, n);
    put(o, "all", "all", "long_kept_mean", m->long_kept_mean, n);
    put(o, "all", "all", "retained_mass", m->retained_mass, n);
    put(o, "all", "all", "retained_mass_long", m->retained_mass_long, n);
    put(o, "all", "all", "retrieval_hit", m->retrieval_hit, m->n_retrieval);
    put(o, "all", "all", "n_retrieval", (double)m->n_retrieval, n);
    put(o, "all", "all", "future_mass_ratio", m->future_mass_ratio, n);
    put(o, "all", "all", "output_error", m->output_error, n);
    put(o, "all", "all", "kept_mean", m->kept_mean, n);
    put(o, "all", "all", "kept_max", (double)m->kept_max, n);
    put(o, "all", "all", "dense_bytes", kv_dense_bytes(o->report->trace), n);
    put(o, "all", "all", "cache_bytes", m->cache_bytes, n);
    put(o, "all", "all", "cache_bytes_allocated",
        r->cache_bytes_allocated > 0 ? r->cache_bytes_allocated : NAN, n);
}

static void put_step_bound(out *o, const kv_metrics_result *m) {
    char layer[16];
    for (int32_t l = 0; l < o->report->trace->n_layer; l++) {
        snprintf(layer, sizeof layer, "%d", o->report->trace->layer_id[l]);
        put(o, layer, "all", "retained_mass", m->mass_by_layer[l], m->n_counted);
    }
    put(o, "all", "all", "retained_mass", m->retained_mass, m->n_counted);
}

static void put_row(out *o, const kv_row_result *r) {
    const kv_metrics_result *m = &r->metrics;
    const kv_trace_info *t = o->report->trace;
    if (o->row->policy->no_evict_at) {
        put_step_bound(o, m);
        return;
    }
    for (int32_t l = 0; l < t->n_layer; l++)
        for (int32_t h = 0; h < t->n_kv_head; h++) put_head(o, m, l, h);
    put_run(o, r);
}

static void put_accuracy(out *o, const kv_accuracy *a) {
    put(o, "all", "all", "token_accuracy_recall", a->recall, a->n_recall);
    put(o, "all", "all", "token_accuracy_result", a->result, a->n_result);
    put(o, "all", "all", "token_accuracy_deterministic", a->deterministic, a->n_deterministic);
    put(o, "all", "all", "problem_accuracy", a->problem, a->n_problem);
    put(o, "all", "all", "agreement", a->agreement, a->n_scored);
    put(o, "all", "all", "kl", a->kl, a->n_scored);
}

kv_status kv_metrics_csv_write(const kv_report *report, const char *folder) {
    char path[PATH_MAX + 64];
    const char *name = strrchr(report->trace->path, '/');
    out o = {.report = report};
    snprintf(path, sizeof path, "%s/metrics.csv", folder);
    snprintf(o.trace, sizeof o.trace, "%s", name ? name + 1 : report->trace->path);
    o.file = fopen(path, "w");
    if (!o.file) return KV_FAIL(KV_E_CANTCREATE, "cannot create %s: %s", path, strerror(errno));
    fputs("trace,layer,kv_head,policy,variant,budget,seed,metric,value,n\n", o.file);
    for (size_t i = 0; i < report->plan->n_row; i++) {
        o.row = &report->plan->row[i];
        if (report->has_metrics) put_row(&o, &report->result[i]);
        if (report->accuracy) put_accuracy(&o, &report->accuracy[i]);
    }
    bool bad = ferror(o.file) != 0;
    if (fclose(o.file) != 0) bad = true;
    return bad ? KV_FAIL(KV_E_IO, "writing %s failed: %s", path, strerror(errno)) : KV_OK;
}
