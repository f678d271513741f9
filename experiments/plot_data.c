/* summary.json -> curve.csv, points.csv, correlation.csv, power.csv. */
#include "experiments/plot_data.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <jansson.h>

#include "experiments/csv.h"
#include "experiments/results.h"
#include "experiments/spearman.h"
#include "reference/core/mem.h"
#include "reference/core/param.h"

/* Where a metric stands in a result: a key, or a key within an object. */
typedef struct metric {
    const char *name, *object, *key;
} metric;

static const metric curves[] = {
    {"recall_mean", NULL, "recall_mean"},     {"recall_chance", NULL, "recall_chance"},
    {"retained_mass", NULL, "retained_mass"}, {"retrieval_hit", NULL, "retrieval_hit"},
    {"output_error", NULL, "output_error"},   {"kept_mean", NULL, "kept_mean"},
    {"cache_bytes", NULL, "cache_bytes"},     {"accuracy_recall", "token_accuracy", "recall"},
};
/* Columns of points.csv; the last is what the others are correlated with. */
static const metric columns[] = {
    {"recall_mean", NULL, "recall_mean"},
    {"retrieval_hit", NULL, "retrieval_hit"},
    {"retained_mass", NULL, "retained_mass"},
    {"accuracy_recall", "token_accuracy", "recall"},
};
enum {
    CURVES = sizeof curves / sizeof *curves,
    COLUMNS = sizeof columns / sizeof *columns,
    ACCURACY = COLUMNS - 1
};

typedef struct point {
    double value[COLUMNS]; /* NAN where undefined */
} point;

typedef struct tables {
    const char *folder;
    FILE *curve, *points, *power;
    point *point; /* [n_point] */
    size_t n_point;
} tables;

static kv_status create(const char *folder, const char *name, const char *header, FILE **out) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    *out = fopen(path, "w");
    if (!*out) return KV_FAIL(KV_E_CANTCREATE, "cannot create %s: %s", path, strerror(errno));
    fputs(header, *out);
    return KV_OK;
}

/* Closes the table; st, or KV_E_IO when st is KV_OK and something was not written. */
static kv_status finish(kv_status st, FILE *f, const char *folder, const char *name) {
    if (!f) return st;
    const int failed = ferror(f);
    if ((fclose(f) != 0 || failed) && st == KV_OK)
        return KV_FAIL(KV_E_IO, "writing %s/%s failed: %s", folder, name, strerror(errno));
    return st;
}

static void put_value(FILE *f, double x) {
    char text[40] = "";
    if (!isnan(x)) kv_format_real(x, text, sizeof text);
    fputs(text, f);
}

/* Bytes of a variant that name it: all, but of the policy `file` those before its path. */
static int short_length(const char *policy, const char *variant) {
    const char *path = strstr(variant, ":path=");
    if (strcmp(policy, "file") != 0) return (int)strlen(variant);
    if (strncmp(variant, "path=", 5) == 0) return 0;
    return path ? (int)(path - variant) : (int)strlen(variant);
}

int kv_label_length(const json_t *results, const char *policy, const char *variant) {
    const int n = short_length(policy, variant);
    size_t i;
    json_t *row;
    if (n == (int)strlen(variant)) return n;
    json_array_foreach(results, i, row) {
        const char *name = json_string_value(json_object_get(row, "policy")),
                   *other = json_string_value(json_object_get(row, "variant"));
        if (name && other && strcmp(name, policy) == 0 && strcmp(other, variant) != 0 &&
            short_length(name, other) == n && strncmp(other, variant, (size_t)n) == 0)
            return (int)strlen(variant);
    }
    return n;
}

/* label,policy,variant,budget, with n bytes of the variant in the label */
static void put_key(FILE *f, const char *policy, const char *variant, int n, json_int_t budget) {
    char label[1024];
    snprintf(label, sizeof label, "%s%s%.*s", policy, n > 0 ? ":" : "", n, variant);
    for (char *c = label; *c; c++) /* gnuplot ends a text at a comma, quoted or not */
        if (strchr(",\"\n", *c)) *c = ';';
    fprintf(f, "%s,", label);
    kv_csv_put(f, policy);
    fputc(',', f);
    kv_csv_put(f, variant);
    fprintf(f, ",%" JSON_INTEGER_FORMAT ",", budget);
}

static double look_up(const json_t *result, const metric *m) {
    const json_t *object = m->object ? json_object_get(result, m->object) : result;
    const json_t *value = json_object_get(object, m->key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

/* A row of power.csv, when the policy has a power and an accuracy. */
static void add_power(tables *t, const char *policy, json_int_t budget, const json_t *result) {
    const json_t *power = json_object_get(json_object_get(result, "params"), "power");
    const double accuracy = look_up(result, &columns[ACCURACY]);
    if (isnan(accuracy) || !(json_is_number(power) || json_is_string(power))) return;
    kv_csv_put(t->power, policy);
    fputc(',', t->power);
    if (json_is_string(power))
        kv_csv_put(t->power, json_string_value(power));
    else
        put_value(t->power, json_number_value(power));
    fprintf(t->power, ",%" JSON_INTEGER_FORMAT ",", budget);
    put_value(t->power, accuracy);
    fputc('\n', t->power);
}

static kv_status add_result(tables *t, const json_t *results, size_t i) {
    const json_t *const result = json_array_get(results, i);
    const json_t *policy = json_object_get(result, "policy"),
                 *variant = json_object_get(result, "variant"),
                 *budget = json_object_get(result, "budget");
    if (!json_is_string(policy) || !json_is_string(variant) || !json_is_integer(budget))
        return KV_FAIL(KV_E_DATA, "results[%zu] lacks policy, variant (texts) or budget (integer)",
                       i);
    const char *const name = json_string_value(policy), *const form = json_string_value(variant);
    const int n = kv_label_length(results, name, form);
    for (size_t c = 0; c < CURVES; c++) {
        put_key(t->curve, name, form, n, json_integer_value(budget));
        fprintf(t->curve, "%s,", curves[c].name);
        put_value(t->curve, look_up(result, &curves[c]));
        fputc('\n', t->curve);
    }
    put_key(t->points, name, form, n, json_integer_value(budget));
    for (size_t c = 0; c < COLUMNS; c++) {
        t->point[t->n_point].value[c] = look_up(result, &columns[c]);
        put_value(t->points, t->point[t->n_point].value[c]);
        fputc(c + 1 < COLUMNS ? ',' : '\n', t->points);
    }
    t->n_point++;
    add_power(t, name, json_integer_value(budget), result);
    return KV_OK;
}

static kv_status add_run(tables *t, const char *run) {
    kv_status st = KV_OK;
    json_t *summary = NULL;
    KV_TRY(kv_json_read(run, "summary.json", &summary));
    const json_t *results = json_object_get(summary, "results");
    if (!json_is_array(results))
        KV_RAISE(KV_E_DATA, "%s/summary.json has no array \"results\"", run);
    const size_t n = json_array_size(results);
    point *grown = realloc(t->point, (t->n_point + n + 1) * sizeof *grown);
    if (!grown) KV_RAISE(KV_E_INTERNAL, "out of memory");
    t->point = grown;
    for (size_t i = 0; i < n; i++) {
        st = add_result(t, results, i);
        if (st != KV_OK) {
            st = kv_error_context(st, "%s/summary.json", run);
            goto out;
        }
    }
out:
    json_decref(summary);
    return st;
}

static kv_status correlate(const tables *t, FILE *f) {
    kv_status st = KV_OK;
    double *x = NULL, *y = NULL;
    KV_NEW(x, t->n_point);
    KV_NEW(y, t->n_point);
    for (size_t c = 0; c < ACCURACY; c++) {
        double rho = NAN;
        size_t n = 0;
        for (size_t i = 0; i < t->n_point; i++) {
            const double *v = t->point[i].value;
            if (isnan(v[c]) || isnan(v[ACCURACY])) continue;
            x[n] = v[c];
            y[n++] = v[ACCURACY];
        }
        if (n >= KV_CORRELATION_POINTS) KV_TRY(kv_spearman(x, y, n, &rho));
        fprintf(f, "%s,", columns[c].name);
        put_value(f, rho);
        fprintf(f, ",%zu\n", n);
    }
out:
    free(x);
    free(y);
    return st;
}

kv_status kv_plot_data(const char *const *run, size_t n_run, const char *folder) {
    kv_status st = KV_OK;
    tables t = {.folder = folder};
    FILE *correlation = NULL;
    KV_TRY(create(folder, "curve.csv", "label,policy,variant,budget,metric,value\n", &t.curve));
    KV_TRY(create(folder, "points.csv",
                  "label,policy,variant,budget,recall_mean,retrieval_hit,retained_mass,"
                  "accuracy_recall\n",
                  &t.points));
    KV_TRY(create(folder, "power.csv", "label,power,budget,accuracy\n", &t.power));
    KV_TRY(create(folder, "correlation.csv", "metric,rho,n\n", &correlation));
    for (size_t i = 0; i < n_run; i++) KV_TRY(add_run(&t, run[i]));
    KV_TRY(correlate(&t, correlation));
out:
    st = finish(st, t.curve, folder, "curve.csv");
    st = finish(st, t.points, folder, "points.csv");
    st = finish(st, t.power, folder, "power.csv");
    st = finish(st, correlation, folder, "correlation.csv");
    free(t.point);
    return st;
}
