/* summary.json (contract.md 4, "One run folder per command"). */
#include "experiments/results.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/files.h"

json_t *kv_json_text(const char *text) {
    json_t *value = json_string(text);
    char *ascii = value ? NULL : strdup(text);
    if (!ascii) return value;
    for (char *c = ascii; *c; c++)
        if (*c & 0x80) *c = '?';
    value = json_string(ascii);
    free(ascii);
    return value;
}

static json_t *real(double x) { return isfinite(x) ? json_real(x) : json_null(); }
static json_t *whole(double x) { return isfinite(x) ? json_integer((json_int_t)x) : json_null(); }

static json_t *list(const double *x, int32_t n) {
    json_t *a = json_array();
    for (int32_t i = 0; i < n; i++) json_array_append_new(a, real(x[i]));
    return a;
}

static json_t *matrix(const double *x, int32_t rows, int32_t columns) { /* [rows][columns] */
    json_t *a = json_array();
    for (int32_t i = 0; i < rows; i++) json_array_append_new(a, list(x + i * columns, columns));
    return a;
}

static json_t *params_of(const kv_params *p, const kv_weights *weights) {
    json_t *o = json_object();
    for (size_t i = 0; i < p->n; i++) {
        char text[PATH_MAX];
        kv_params_format(p, i, text, sizeof text);
        json_t *value = p->spec[i].type == KV_PARAM_INT ? json_integer((json_int_t)p->value[i])
                        : p->spec[i].type == KV_PARAM_REAL
                            ? isinf(p->value[i]) ? json_string("max") : json_real(p->value[i])
                            : kv_json_text(text);
        json_object_set_new(o, p->spec[i].name, value);
    }
    if (weights) json_object_set_new(o, "weights", kv_json_text(weights->name));
    return o;
}

static json_t *by_kind(const kv_trace_info *trace, const kv_metrics_result *m) {
    bool any = false, seen[KV_KINDS] = {false};
    for (int32_t kind = 0; kind < KV_KINDS; kind++) any |= isfinite(m->recall_by_kind[kind]);
    if (!trace->kind || !any) return json_null();
    for (int64_t t = 0; t < trace->n_token; t++) seen[trace->kind[t]] = true;
    json_t *o = json_object();
    for (int32_t kind = 0; kind < KV_KINDS; kind++) {
        char number[16];
        bool named = kind < trace->n_kind_name;
        if (!named && !seen[kind]) continue;
        snprintf(number, sizeof number, "%d", kind);
        /* a name that is no UTF-8, or not the only one of its kind, cannot be a key */
        if (!named || json_object_get(o, trace->kind_name[kind]) ||
            json_object_set_new(o, trace->kind_name[kind], real(m->recall_by_kind[kind])) != 0)
            json_object_set_new(o, number, real(m->recall_by_kind[kind]));
    }
    return o;
}

/* Fields in the order of the contract; `known` false gives null (a bound without a cache, an accuracy-only run). */
static void put_scalars(json_t *o, const kv_report *r, const kv_row_result *row, bool known,
                        bool mass_known) {
    const double undefined = NAN, allocated = row->cache_bytes_allocated;
    const kv_metrics_result *m = &row->metrics;
#define PUT(name, make, value) json_object_set_new(o, name, make(known ? (value) : undefined))
    PUT("recall_mean", real, m->recall_mean);
    PUT("recall_chance", real, m->recall_chance);
    PUT("recall_adjusted", real, m->recall_adjusted);
    PUT("long_kept_mean", real, m->long_kept_mean);
    PUT("recall_own", real, m->recall_own);
    json_object_set_new(o, "retained_mass", real(mass_known ? m->retained_mass : undefined));
    PUT("retained_mass_long", real, m->retained_mass_long);
    PUT("retrieval_hit", real, m->retrieval_hit);
    PUT("n_retrieval", whole, (double)m->n_retrieval);
    PUT("future_mass_ratio", real, m->future_mass_ratio);
    PUT("output_error", real, m->output_error);
    PUT("kept_mean", real, m->kept_mean);
    PUT("kept_max", whole, (double)m->kept_max);
    PUT("dense_bytes", whole, kv_dense_bytes(r->trace));
    PUT("cache_bytes", whole, m->cache_bytes);
    PUT("cache_bytes_allocated", whole, allocated > 0 ? allocated : undefined); /* else masked */
#undef PUT
}

static void put_arrays(json_t *o, const kv_report *r, const kv_metrics_result *m, bool known,
                       bool mass_known) {
    int32_t layers = r->trace->n_layer, heads = r->trace->n_kv_head;
#define PUT(name, value) json_object_set_new(o, name, known ? (value) : json_null())
    PUT("recall", matrix(m->recall, layers, heads));
    PUT("recall_chance_by_head", matrix(m->chance, layers, heads));
    PUT("recall_by_kind", by_kind(r->trace, m));
    json_object_set_new(o, "retained_mass_by_layer",
                        mass_known ? list(m->mass_by_layer, layers) : json_null());
    PUT("retrieval_hit_by_layer", list(m->hit_by_layer, layers));
    PUT("output_error_by_layer", list(m->error_by_layer, layers));
    PUT("kept_mean_by_layer", list(m->kept_by_layer, layers));
#undef PUT
}

static void put_accuracy(json_t *o, const kv_accuracy *a) { /* NULL: no model ran */
    json_t *token = json_object();
    json_object_set_new(token, "recall", real(a ? a->recall : NAN));
    json_object_set_new(token, "result", real(a ? a->result : NAN));
    json_object_set_new(token, "deterministic", real(a ? a->deterministic : NAN));
    json_object_set_new(o, "token_accuracy", token);
    json_object_set_new(o, "problem_accuracy", real(a ? a->problem : NAN));
    json_object_set_new(o, "agreement", real(a ? a->agreement : NAN));
    json_object_set_new(o, "kl", real(a ? a->kl : NAN));
}

static json_t *row_of(const kv_report *r, size_t i) {
    const kv_row *row = &r->plan->row[i];
    const kv_metrics_result *m = &r->result[i].metrics;
    bool mass_known = r->has_metrics, known = mass_known && !row->policy->no_evict_at;
    json_t *o = json_object();
    json_object_set_new(o, "policy", json_string(row->policy->name));
    json_object_set_new(o, "variant", kv_json_text(row->variant));
    json_object_set_new(o, "params", params_of(&row->params, row->weights));
    json_object_set_new(o, "budget", json_integer(row->run.budget));
    json_object_set_new(o, "budget_fraction",
                        json_real((double)row->run.budget / r->trace->longest));
    json_object_set_new(o, "n_counted", mass_known ? json_integer(m->n_counted) : json_null());
    put_scalars(o, r, &r->result[i], known, mass_known);
    json_object_set_new(
        o, "seconds", json_real(r->result[i].seconds + (r->accuracy ? r->accuracy[i].seconds : 0)));
    put_arrays(o, r, m, known, mass_known);
    put_accuracy(o, r->accuracy ? &r->accuracy[i] : NULL);
    return o;
}

json_t *kv_summary_make(const kv_report *r) {
    kv_run run;
    if (kv_config_run(r->config, &run) != KV_OK) return NULL;
    json_t *params = json_object(), *results = json_array(), *o = json_object();
    json_object_set_new(params, "sinks", json_integer(run.sinks));
    json_object_set_new(params, "window", json_integer(run.window));
    json_object_set_new(params, "eps", json_real(run.eps));
    json_object_set_new(params, "oracle_delta", json_real(run.oracle_delta));
    json_object_set_new(params, "target_reduce", json_string(run.target_mean ? "mean" : "max"));
    json_object_set_new(params, "seed", json_integer((json_int_t)run.seed));
    for (size_t i = 0; i < r->plan->n_row; i++) json_array_append_new(results, row_of(r, i));
    json_object_set_new(o, "schema", json_integer(1));
    json_object_set_new(o, "trace_id",
                        r->trace->trace_id ? kv_json_text(r->trace->trace_id) : json_null());
    json_object_set_new(o, "params", params);
    json_object_set_new(o, "n_layer", json_integer(r->trace->n_layer));
    json_object_set_new(o, "n_kv_head", json_integer(r->trace->n_kv_head));
    json_object_set_new(o, "n_token", json_integer(r->trace->n_token));
    if (json_object_set_new(o, "results", results) == 0) return o;
    json_decref(o);
    return NULL;
}

kv_status kv_json_write(const json_t *value, const char *folder, const char *name) {
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    if (!f) return KV_FAIL(KV_E_CANTCREATE, "cannot create %s: %s", path, strerror(errno));
    bool good = json_dumpf(value, f, JSON_INDENT(1) | JSON_REAL_PRECISION(17)) == 0 &&
                fputc('\n', f) != EOF;
    if (fclose(f) != 0) good = false;
    return good ? KV_OK : KV_FAIL(KV_E_IO, "writing %s failed: %s", path, strerror(errno));
}

kv_status kv_json_read(const char *folder, const char *name, json_t **out) {
    char path[PATH_MAX + 64];
    json_error_t error;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    *out = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (*out) return KV_OK;
    return KV_FAIL(KV_E_NOINPUT, "cannot read %s: line %d: %s", path, error.line, error.text);
}
