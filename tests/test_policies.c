/* Policies as descriptors: soundness of every one, the parameters of contract.md 2, decisions read from a file. */
#include <criterion/criterion.h>
#include <ctype.h>
#include <hdf5.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "policies/registry.h"
#include "reference/replay.h"
#include "tests/naive/naive_case.h"

static void check_param(const char *policy, const kv_param *p) {
    cr_expect(p->help && p->help[0], "%s.%s has no help", policy, p->name);
    if (p->type == KV_PARAM_CHOICE)
        cr_expect(p->choices && strchr(p->choices, '|'), "%s.%s has no choice", policy, p->name);
    if (p->type == KV_PARAM_INT || p->type == KV_PARAM_REAL)
        cr_expect(p->default_value >= p->min && p->default_value <= p->max &&
                      !(p->min_open && p->default_value == p->min),
                  "%s.%s: the default %g lies outside its bounds", policy, p->name,
                  p->default_value);
}

Test(policies, descriptors_are_sound) {
    cr_assert_null(kv_policy_at(-1));
    cr_assert_null(kv_policy_find("no_such_policy"));
    int n = 0;
    for (const kv_policy *p; (p = kv_policy_at(n)); n++) {
        cr_expect_eq(kv_policy_find(p->name), p, "%s is not found by its name", p->name);
        for (const char *c = p->name; *c; c++)
            cr_expect(islower((unsigned char)*c) || isdigit((unsigned char)*c) || *c == '_',
                      "%s: '%c' cannot stand in a list of policies", p->name, *c);
        cr_expect(p->summary && p->summary[0] && !strchr(p->summary, '\n') &&
                      strlen(p->summary) <= 100,
                  "%s: the summary is not one short line", p->name);
        cr_expect(p->source && p->source[0], "%s names no source", p->name);
        int groups = !!p->priority + !!p->gate + !!p->rule + !!p->decide;
        cr_expect_eq(groups, !p->no_evict_at, "%s decides in %d ways", p->name, groups);
        const bool of_kind[] = {[KV_PRIORITY] = p->priority || p->decide || p->no_evict_at,
                                [KV_GATE] = p->gate,
                                [KV_ATTENTION] = p->rule};
        cr_expect(of_kind[p->kind], "%s lacks the hook of its kind", p->name);
        cr_expect_eq(!!p->stream, p->priority && !p->non_causal,
                     "%s: stream hooks belong to causal priorities", p->name);
        cr_expect(!p->stream || (p->stream->open && p->stream->push && p->stream->priority &&
                                 p->stream->close),
                  "%s: a stream hook is missing", p->name);
        for (const kv_param *q = p->params; q && q->name; q++) check_param(p->name, q);
    }
    cr_assert_gt(n, 10);
    cr_assert_null(kv_policy_at(n));
}

/* Value of `key` as results print it after setting it to `value`; "" when refused; NULL: the default. */
static void setting(const char *policy, const char *key, const char *value, char *out, size_t n) {
    kv_params p;
    cr_assert_eq(kv_params_init(&p, kv_policy_find(policy)->params), KV_OK);
    out[0] = '\0';
    if (!value || kv_params_set(&p, policy, key, value) == KV_OK)
        for (size_t i = 0; i < p.n; i++)
            if (strcmp(p.spec[i].name, key) == 0) kv_params_format(&p, i, out, n);
    kv_params_free(&p);
}

Test(policies, parameters_of_the_contract) {
    const struct {
        const char *policy, *key, *value, *reads;
    } cases[] = {
        {"streaming", "pos", NULL, "orig"},   {"streaming", "pos", "cache", "cache"},
        {"tova", "reduce", NULL, "layer"},    {"tova", "reduce", "head", "head"},
        {"h2o", "recent_share", NULL, "0.5"}, {"h2o", "recent_share", "0", "0"},
        {"h2o", "recent_share", "1", "1"},    {"h2o", "recent_share", "1.01", ""},
        {"h2o", "recent_share", "-0.1", ""},  {"h2o", "reduce", NULL, "sum"},
        {"h2o", "reduce", "mean", "mean"},    {"h2o", "reduce", "max", "max"},
        {"h2o", "reduce", "min", ""},         {"keydiff", "anchor", NULL, "window"},
        {"keydiff", "anchor", "all", "all"},  {"oracle", "power", NULL, "1"},
        {"oracle", "power", "16", "16"},      {"oracle", "power", "0.5", "0.5"},
        {"oracle", "power", "max", "max"},    {"oracle", "power", "0", ""},
        {"oracle", "power", "16.5", ""},      {"dms", "shift", NULL, "1"},
        {"dms", "shift", "0", "0"},           {"file", "path", NULL, ""},
        {"file", "item", NULL, "file"},
    };
    char got[64];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setting(cases[i].policy, cases[i].key, cases[i].value, got, sizeof got);
        cr_expect_str_eq(got, cases[i].reads, "%s:%s=%s reads '%s', not '%s'", cases[i].policy,
                         cases[i].key, cases[i].value ? cases[i].value : "(default)", got,
                         cases[i].reads);
    }
}

enum { LAYERS = 2, HEADS = 2, TOKENS = 30, FIRST = 12, BUDGET = 7 };

/* /evict_at/some:power=2/b7, i32[LAYERS][HEADS][TOKENS], without the suite's own writer. */
static void write_decisions(const char *path, const int32_t *value) {
    const hsize_t shape[3] = {LAYERS, HEADS, TOKENS};
    hid_t file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    hid_t group = H5Gcreate2(file, "/evict_at", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    hid_t item = H5Gcreate2(group, "some:power=2", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    hid_t space = H5Screate_simple(3, shape, NULL);
    hid_t set = H5Dcreate2(item, "b7", H5T_STD_I32LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    cr_assert(H5Dwrite(set, H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, value) >= 0);
    H5Dclose(set);
    H5Sclose(space);
    H5Gclose(item);
    H5Gclose(group);
    H5Fclose(file);
}

typedef struct reader {
    kv_params params;
    kv_run run;
    kv_span span;
    int32_t got[HEADS * TOKENS];
} reader;

static kv_status read_back(reader *r, const char *path, const char *item) {
    const kv_policy *file = kv_policy_find("file");
    const kv_policy_input input = {.span = &r->span, .run = &r->run, .params = &r->params};
    cr_assert_eq(kv_params_set(&r->params, "file", "path", path), KV_OK);
    cr_assert_eq(kv_params_set(&r->params, "file", "item", item), KV_OK);
    return kv_replay(file, &input, r->got + r->span.first);
}

Test(policies, file_replays_what_was_decided_elsewhere) {
    char path[] = "/tmp/kvlab-test-XXXXXX";
    close(mkstemp(path));
    int32_t value[LAYERS * HEADS * TOKENS];
    for (int i = 0; i < LAYERS * HEADS * TOKENS; i++) value[i] = i % TOKENS + 1 + i % 11;
    int32_t *lane = value + (1 * HEADS + 1) * TOKENS; /* layer index 1, KV head 1 */
    lane[FIRST] = KV_NEVER;
    lane[FIRST + 1] = TOKENS;     /* at the document's end */
    lane[FIRST + 2] = TOKENS - 1; /* the last query misses it */
    lane[FIRST - 1] = FIRST;      /* end of the document before */
    write_decisions(path, value);

    reader r = {.run = {.budget = BUDGET, .sinks = 1, .window = 2},
                .span = {.n_token = TOKENS - FIRST,
                         .stride = TOKENS,
                         .n_kv_head = HEADS,
                         .layer_index = 1,
                         .layer_id = 20,
                         .first = FIRST}};
    cr_assert_eq(kv_params_init(&r.params, kv_policy_find("file")->params), KV_OK);
    memset(r.got, 0x5a, sizeof r.got);
    cr_assert_eq(read_back(&r, path, "some:power=2"), KV_OK, "%s", kv_error_message());
    for (int32_t h = 0; h < HEADS; h++)
        for (int32_t t = 0; t < TOKENS; t++) {
            int32_t stored = value[(1 * HEADS + h) * TOKENS + t], got = r.got[h * TOKENS + t];
            int32_t want = t < FIRST ? 0x5a5a5a5a : stored >= TOKENS ? KV_NEVER : stored - FIRST;
            cr_assert_eq(got, want, "KV head %d token %d: stored %d, read %d, not %d", h, t, stored,
                         got, want);
        }
    r.span = (kv_span){
        .n_token = FIRST, .stride = TOKENS, .n_kv_head = HEADS, .layer_index = 1, .layer_id = 20};
    cr_assert_eq(read_back(&r, path, "some:power=2"), KV_OK, "%s", kv_error_message());
    cr_assert_eq(r.got[TOKENS + FIRST - 1], KV_NEVER);

    const struct {
        kv_status status;
        const char *path, *item, *says;
        int32_t budget, heads, layer, tokens;
    } refused[] = {
        {KV_E_NOINPUT, "/no/such.h5", "some:power=2", "/no/such.h5", 7, 2, 1, FIRST},
        {KV_E_NOINPUT, path, "file", "/evict_at/file", 7, 2, 1, FIRST},
        {KV_E_NOINPUT, path, "some:power=2", "b8", 8, 2, 1, FIRST},
        {KV_E_NOINPUT, path, "no/such", "no/such", 7, 2, 1, FIRST},
        {KV_E_DATA, path, "some:power=2", "another trace", 7, 3, 1, FIRST},
        {KV_E_DATA, path, "some:power=2", "another trace", 7, 2, 2, FIRST},
        {KV_E_DATA, path, "some:power=2", "another trace", 7, 2, 1, TOKENS + 1},
        {KV_E_USAGE, "", "some:power=2", "path", 7, 2, 1, FIRST},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        r.run.budget = refused[i].budget;
        r.span.n_kv_head = refused[i].heads;
        r.span.layer_index = refused[i].layer;
        r.span.n_token = refused[i].tokens;
        cr_assert_eq(read_back(&r, refused[i].path, refused[i].item), refused[i].status,
                     "case %zu: %s", i, kv_error_message());
        cr_assert(strstr(kv_error_message(), refused[i].says), "case %zu: %s", i,
                  kv_error_message());
    }

    lane[FIRST + 5] = FIRST + 5;
    write_decisions(path, value);
    r.run.budget = BUDGET;
    r.span = (kv_span){.n_token = TOKENS - FIRST,
                       .stride = TOKENS,
                       .n_kv_head = HEADS,
                       .layer_index = 1,
                       .first = FIRST};
    cr_assert_eq(read_back(&r, path, "some:power=2"), KV_E_DATA);
    cr_assert(strstr(kv_error_message(), "[1][1][17] is 17"), "%s", kv_error_message());
    kv_params_free(&r.params);
    unlink(path);
}
