/* The files of a run: every field of the contract is there, and the three files tell the same numbers. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/naive/run_kvlab.h"
#include "tests/naive/small_trace.h"

static const char *place;

static void write_trace(const char *name, bool bare) {
    small_trace *f = malloc(sizeof *f);
    char path[128];
    snprintf(path, sizeof path, "%s/%s", place, name);
    small_trace_make(f);
    if (bare) f->spec.kind = f->spec.scored = NULL;
    cr_assert_eq(small_trace_write(f, path), KV_OK, "%s", kv_error_message());
    free(f);
}

static void open_place(void) {
    place = kv_playground_open();
    cr_assert_not_null(place);
}

static void close_place(void) { kv_playground_close(); }

TestSuite(results, .init = open_place, .fini = close_place);

#define RUN "experiment --sinks 2 --window 8 "

/* Fields of one result in the order of the contract; type: s text, i integer, r real, o object, a array, ? null as well. */
static const struct {
    const char *name, *type;
} fields[] = {
    {"policy", "s"},
    {"variant", "s"},
    {"params", "o"},
    {"budget", "i"},
    {"budget_fraction", "r"},
    {"n_counted", "i"},
    {"recall_mean", "r?"},
    {"recall_chance", "r?"},
    {"recall_adjusted", "r?"},
    {"long_kept_mean", "r?"},
    {"recall_own", "r?"},
    {"retained_mass", "r?"},
    {"retained_mass_long", "r?"},
    {"retrieval_hit", "r?"},
    {"n_retrieval", "i?"},
    {"future_mass_ratio", "r?"},
    {"output_error", "r?"},
    {"kept_mean", "r?"},
    {"kept_max", "i?"},
    {"dense_bytes", "i?"},
    {"cache_bytes", "i?"},
    {"cache_bytes_allocated", "i?"},
    {"seconds", "r"},
    {"recall", "a?"},
    {"recall_chance_by_head", "a?"},
    {"recall_by_kind", "o?"},
    {"retained_mass_by_layer", "a?"},
    {"retrieval_hit_by_layer", "a?"},
    {"output_error_by_layer", "a?"},
    {"kept_mean_by_layer", "a?"},
    {"token_accuracy", "o"},
    {"problem_accuracy", "r?"},
    {"agreement", "r?"},
    {"kl", "r?"},
};
enum { FIELDS = sizeof fields / sizeof *fields };

static bool has_type(const json_t *v, const char *type) {
    for (; *type; type++)
        if ((*type == 's' && json_is_string(v)) || (*type == 'i' && json_is_integer(v)) ||
            (*type == 'r' && json_is_real(v)) || (*type == 'o' && json_is_object(v)) ||
            (*type == 'a' && json_is_array(v)) || (*type == '?' && json_is_null(v)))
            return true;
    return false;
}

static void check_row(json_t *row) {
    const char *policy = json_string_value(json_object_get(row, "policy"));
    size_t i = 0;
    const char *key;
    json_t *value;
    json_object_foreach(row, key, value) {
        cr_assert(i < FIELDS, "%s: more fields than the contract has: %s", policy, key);
        cr_expect_str_eq(key, fields[i].name, "%s: field %zu is %s, expected %s", policy, i, key,
                         fields[i].name);
        cr_expect(has_type(value, fields[i].type), "%s: %s has the wrong type", policy, key);
        i++;
    }
    cr_expect_eq(i, FIELDS, "%s: %zu fields of %d", policy, i, (int)FIELDS);
    value = json_object_get(row, "token_accuracy");
    cr_expect(json_object_get(value, "recall") && json_object_get(value, "result") &&
              json_object_get(value, "deterministic"));
    if (strcmp(policy, "oracle_step") != 0) return;
    json_object_foreach(row, key, value) {
        bool kept = !strcmp(key, "retained_mass") || !strcmp(key, "retained_mass_by_layer");
        for (size_t j = 6; j < FIELDS; j++)
            if (!strcmp(fields[j].name, key) && strchr(fields[j].type, '?'))
                cr_expect_eq(kept, !json_is_null(value), "oracle_step: %s", key);
    }
}

/* Value of the CSV line that starts with `start`; NAN for an empty one. */
static double csv_value(const char *csv, const char *start) {
    const char *line = csv;
    size_t n = strlen(start);
    while (line && strncmp(line, start, n) != 0) {
        line = strchr(line, '\n');
        if (line) line++;
    }
    cr_assert_not_null(line, "metrics.csv has no line '%s'", start);
    return line[n] == ',' ? NAN : atof(line + n);
}

static char *read_text(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", place, name);
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f, "%s", path);
    char *text = calloc(1, 1 << 22);
    text[fread(text, 1, (1 << 22) - 1, f)] = '\0';
    fclose(f);
    return text;
}

static bool same(double a, const json_t *v) {
    if (json_is_null(v)) return isnan(a);
    return a == json_number_value(v);
}

/* Scalars and heads of metrics.csv against summary.json. */
static void check_csv(const json_t *row, const char *csv) {
    char start[256];
    const char *policy = json_string_value(json_object_get(row, "policy")),
               *variant = json_string_value(json_object_get(row, "variant"));
    json_int_t budget = json_integer_value(json_object_get(row, "budget"));
    for (size_t i = 6; i < FIELDS; i++) {
        if (fields[i].type[0] != 'r' && fields[i].type[0] != 'i') continue;
        const char *name = fields[i].name;
        bool model = !strcmp(name, "problem_accuracy") || !strcmp(name, "agreement") ||
                     !strcmp(name, "kl") || !strcmp(name, "seconds");
        if (model || (!strcmp(policy, "oracle_step") && strcmp(name, "retained_mass"))) continue;
        snprintf(start, sizeof start, "t.h5,all,all,%s,%s,%d,1,%s,", policy, variant, (int)budget,
                 name);
        cr_expect(same(csv_value(csv, start), json_object_get(row, name)), "%s differs", start);
    }
    const json_t *recall = json_object_get(row, "recall");
    for (size_t l = 0; l < json_array_size(recall); l++) {
        const json_t *heads = json_array_get(recall, l);
        cr_expect_eq(json_array_size(heads), (size_t)FX_KV);
        for (size_t h = 0; h < json_array_size(heads); h++) {
            snprintf(start, sizeof start, "t.h5,%d,%zu,%s,%s,%d,1,recall,", (int)(3 * l + 1), h,
                     policy, variant, (int)budget);
            cr_expect(same(csv_value(csv, start), json_array_get(heads, h)), "%s differs", start);
        }
    }
}

#define POLICIES \
    "full,random,streaming,streaming:pos=cache,tova,tova:reduce=head,h2o,cumulative,knorm," \
    "keydiff," \
    "keydiff:anchor=all,oracle,oracle:power=2,oracle:power=max,oracle_step,oracle_exact"

Test(results, every_field_is_there_and_the_files_agree) {
    write_trace("t.h5", false);
    kv_said said =
        kv_run_command(RUN "--trace t.h5 --policy " POLICIES " --budget 10,40 --output a");
    cr_assert_eq(said.code, 0, "%s", said.err);
    json_t *s = kv_load_json("a/summary.json"), *m = kv_load_json("a/manifest.json"), *row;
    char *csv = read_text("a/metrics.csv");
    size_t i;
    cr_assert(s && m);
    static const char *const top[] = {"schema",    "trace_id", "params", "n_layer",
                                      "n_kv_head", "n_token",  "results"};
    static const char *const settings[] = {"sinks",        "window",        "eps",
                                           "oracle_delta", "target_reduce", "seed"};
    for (i = 0; i < 7; i++) cr_expect(json_object_get(s, top[i]), "summary lacks %s", top[i]);
    for (i = 0; i < 6; i++)
        cr_expect(json_object_get(json_object_get(s, "params"), settings[i]), "params lack %s",
                  settings[i]);
    cr_expect_eq(json_integer_value(json_object_get(s, "schema")), 1);
    cr_expect_eq(json_integer_value(json_object_get(s, "n_token")), FX_TOKEN);
    cr_expect_eq(json_array_size(json_object_get(s, "results")), 32);
    json_array_foreach(json_object_get(s, "results"), i, row) {
        check_row(row);
        check_csv(row, csv);
    }
    static const char *const provenance[] = {"config_xxh3", "config",    "command_line",
                                             "build",       "libraries", "machine",
                                             "time",        "trace_file"};
    for (i = 0; i < 8; i++)
        cr_expect(json_object_get(m, provenance[i]), "manifest lacks %s", provenance[i]);
    free(csv);
    json_decref(s);
    json_decref(m);
}

/* --decode changes no number but cache_bytes_allocated, which is there for whatever can decode: whole slots, so at least cache_bytes. */
Test(results, decoding_reports_what_it_allocated) {
    write_trace("t.h5", false);
    kv_said said =
        kv_run_command(RUN "--trace t.h5 --policy " POLICIES " --budget 20,40 --output a");
    cr_assert_eq(said.code, 0, "%s", said.err);
    said =
        kv_run_command(RUN "--trace t.h5 --policy " POLICIES " --budget 20,40 --decode --output b");
    cr_assert_eq(said.code, 0, "%s", said.err);
    cr_expect(strstr(said.out, "\ndecode: ") &&
                  strstr(said.out, "rows decoded, every decision and output as replayed"),
              "%s", said.out);
    json_t *masked = kv_load_json("a/summary.json"), *decoded = kv_load_json("b/summary.json"),
           *row;
    char *csv = read_text("b/metrics.csv");
    size_t i;
    json_array_foreach(json_object_get(decoded, "results"), i, row) {
        json_t *other = json_array_get(json_object_get(masked, "results"), i);
        const char *policy = json_string_value(json_object_get(row, "policy"));
        const json_int_t budget = json_integer_value(json_object_get(row, "budget")),
                         allocated =
                             json_integer_value(json_object_get(row, "cache_bytes_allocated"));
        const bool future =
            !strncmp(policy, "oracle", 6) ||
            !strcmp(json_string_value(json_object_get(row, "variant")), "anchor=all");
        for (size_t j = 0; j < FIELDS; j++)
            if (strcmp(fields[j].name, "seconds") &&
                strcmp(fields[j].name, "cache_bytes_allocated"))
                cr_expect(json_equal(json_object_get(row, fields[j].name),
                                     json_object_get(other, fields[j].name)),
                          "%s: %s", policy, fields[j].name);
        check_csv(row, csv);
        cr_expect(json_is_null(json_object_get(other, "cache_bytes_allocated")), "%s", policy);
        cr_expect_eq(json_is_null(json_object_get(row, "cache_bytes_allocated")), future, "%s",
                     policy);
        if (!future)
            cr_expect_geq(allocated, json_integer_value(json_object_get(row, "cache_bytes")), "%s",
                          policy);
        if (!strcmp(policy, "streaming")) /* slots of K and V in f16 */
            cr_expect_eq(allocated, budget * FX_LAYER * FX_KV * 2 * FX_DIM * 2, "%d", (int)budget);
    }
    free(csv);
    json_decref(masked);
    json_decref(decoded);
}

/* What holds more than its budget is named below the table, by its short label; `full`, which has none, is not. */
Test(results, rows_above_their_budget_are_remarked) {
    write_trace("t.h5", false);
    kv_said said =
        kv_run_command(RUN "--trace t.h5 --policy full --budget 40 --save-evict --output a");
    cr_assert_eq(said.code, 0, "%s", said.err);
    cr_expect(!strstr(said.out, "holds up to"), "%s", said.out);
    json_t *full = kv_load_json("a/summary.json");
    const long long most = json_integer_value(
        json_object_get(json_array_get(json_object_get(full, "results"), 0), "kept_max"));
    char remark[128];
    snprintf(remark, sizeof remark,
             "\nfile:item=full: holds up to %lld entries, the budget is 40\n", most);
    said = kv_run_command(
        RUN "--trace t.h5 --policy h2o,file:path=a/evict.h5:item=full --budget 40 --output b");
    cr_assert_eq(said.code, 0, "%s", said.err);
    cr_expect(strstr(said.out, remark), "lacks %s: %s", remark, said.out);
    cr_expect(!strstr(said.out, "h2o: holds"), "%s", said.out);
    json_decref(full);
}

Test(results, a_trace_without_kinds_has_null_kinds) {
    write_trace("t.h5", true);
    kv_said said = kv_run_command(RUN "--trace t.h5 --policy h2o --budget 40 --output a");
    cr_assert_eq(said.code, 0, "%s", said.err);
    json_t *s = kv_load_json("a/summary.json");
    json_t *kinds =
        json_object_get(json_array_get(json_object_get(s, "results"), 0), "recall_by_kind");
    cr_assert(json_is_null(kinds));
    json_decref(s);
}

/* A budget is digits only, and the text of a `file` item may hold colons: oracle:power=2 is one name. */
Test(results, budgets_have_no_blanks_and_items_may_hold_colons) {
    static const char *const blank[] = {RUN "--trace t.h5 --policy h2o --output x --budget ' 40'",
                                        RUN "--trace t.h5 --policy h2o --output x --budget '40 '",
                                        RUN
                                        "--trace t.h5 --policy h2o --output x --budget '40, 5'"};
    write_trace("t.h5", false);
    for (size_t i = 0; i < 3; i++) {
        kv_said refused = kv_run_command(blank[i]);
        cr_expect_eq(refused.code, 64, "%s: %s", blank[i], refused.err);
    }
    kv_said said = kv_run_command(RUN "--trace t.h5 --policy tova:reduce=head --budget 40 "
                                      "--save-evict --output a");
    cr_assert_eq(said.code, 0, "%s", said.err);
    said = kv_run_command(RUN "--trace t.h5 --budget 40 --output b "
                              "--policy file:item=tova:reduce=head:path=a/evict.h5");
    cr_assert_eq(said.code, 0, "%s", said.err);
}

/* Saved decisions, replayed by the policy `file`, give the numbers of the policy that made them. */
Test(results, saved_decisions_replay_to_the_same_numbers) {
    static const char *const names[] = {"h2o", "keydiff", "oracle:power=2"};
    write_trace("t.h5", false);
    kv_said said = kv_run_command(RUN "--trace t.h5 --policy h2o,keydiff,oracle:power=2 "
                                      "--budget 20,40 --save-evict --output a");
    cr_assert_eq(said.code, 0, "%s", said.err);
    json_t *s = kv_load_json("a/summary.json");
    for (size_t i = 0; i < 3; i++) {
        char arguments[512], item[64];
        snprintf(item, sizeof item, "%s", names[i]);
        /* ':' separates parameters, so an item with a variant is set in another way */
        snprintf(arguments, sizeof arguments,
                 RUN "--trace t.h5 --policy file:path=a/evict.h5 --set file.item=%s --budget 20,40 "
                     "--force --output b",
                 item);
        said = kv_run_command(arguments);
        cr_assert_eq(said.code, 0, "%s: %s", names[i], said.err);
        json_t *f = kv_load_json("b/summary.json");
        for (size_t b = 0; b < 2; b++) {
            json_t *x = json_array_get(json_object_get(s, "results"), 2 * i + b),
                   *y = json_array_get(json_object_get(f, "results"), b);
            for (size_t j = 3; j < FIELDS; j++)
                if (strcmp(fields[j].name, "seconds") != 0)
                    cr_expect(json_equal(json_object_get(x, fields[j].name),
                                         json_object_get(y, fields[j].name)),
                              "%s, %s differs after replay from evict.h5", names[i],
                              fields[j].name);
        }
        json_decref(f);
    }
    json_decref(s);
}
