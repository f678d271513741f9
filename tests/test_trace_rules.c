/* Every rule of the trace format, broken one at a time: the status and what the message must name. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/naive/mutate_hdf5.h"
#include "tests/naive/small_folder.h"

#define R "/requests/r00000/"
#define M "/model"

typedef struct broken {
    mutation m;
    const char *named[3]; /* all must stand in the message */
} broken;

static const int64_t T = FX_TOKEN;

static const broken rule[] = {
    /* versions */
    {{.kind = DROP_ATTRIBUTE, .object = "/", .name = "Conventions"},
     {"Conventions", "KVTRACE-1.0"}},
    {{.kind = SET_TEXT, .object = "/", .name = "Conventions", .text = "CF-1.8"},
     {"CF-1.8", "KVTRACE-1.0"}},
    {{.kind = SET_TEXT, .object = "/", .name = "Conventions", .text = "KVTRACE-2.0"},
     {"KVTRACE-2.0", "1.x"}},
    {{.kind = SET_INT, .object = "/", .name = "Conventions"}, {"Conventions", "string"}},
    {{.kind = DROP_ATTRIBUTE, .object = "/", .name = "schema_version"}, {"schema_version"}},
    {{.kind = SET_VERSION, .number = 2}, {"version 2", "1.x"}},
    /* attributes of the model */
    {{.kind = DROP_ATTRIBUTE, .object = M, .name = "n_layer"}, {M, "n_layer", "required"}},
    {{.kind = DROP_ATTRIBUTE, .object = M, .name = "softmax_scale"}, {M, "softmax_scale"}},
    {{.kind = DROP_ATTRIBUTE, .object = M, .name = "rope_kind"}, {M, "rope_kind", "rotate_half"}},
    {{.kind = DROP_ATTRIBUTE, .object = M, .name = "keys_are_rotated"}, {M, "keys_are_rotated"}},
    {{.kind = SET_TEXT, .object = M, .name = "n_layer", .text = "two"}, {M, "n_layer", "number"}},
    {{.kind = SET_REAL, .object = M, .name = "head_dim", .number = 8.5},
     {"head_dim", "8.5", "whole"}},
    {{.kind = SET_INT, .object = M, .name = "n_kv_head", .number = 0}, {"n_kv_head", "0"}},
    {{.kind = SET_INT, .object = M, .name = "n_kv_head", .number = 3},
     {"n_q_head 4", "multiple", "3"}},
    {{.kind = SET_INT, .object = M, .name = "head_dim", .number = 7}, {"head_dim", "7", "even"}},
    {{.kind = SET_INT, .object = M, .name = "n_layer", .number = 1e9}, {"n_layer", "1e+09"}},
    {{.kind = SET_REAL, .object = M, .name = "rope_theta", .number = INFINITY},
     {"rope_theta", "inf"}},
    {{.kind = SET_REAL, .object = M, .name = "softmax_scale", .number = NAN},
     {"softmax_scale", "nan"}},
    {{.kind = SET_REAL, .object = M, .name = "softmax_scale", .number = 0}, {"softmax_scale", "0"}},
    {{.kind = SET_INT, .object = M, .name = "keys_are_rotated", .number = 0},
     {"keys_are_rotated", "rotated keys"}},
    {{.kind = SET_TEXT, .object = M, .name = "rope_kind", .text = "interleaved"},
     {"interleaved", "rotate_half"}},
    /* model data */
    {{.kind = WRITE, .object = "/model/window", .index = 1, .number = 128},
     {"/model/window", "128", "sliding"}},
    {{.kind = WRITE, .object = "/model/window", .number = 0}, {"/model/window", "0"}},
    {{.kind = REPLACE, .object = "/model/window", .type = I32, .dim = {3}},
     {"/model/window", "[3]", "[2]"}},
    {{.kind = REPLACE, .object = "/model/inv_freq", .type = F64, .dim = {8}},
     {"/model/inv_freq", "[8]", "[4]"}},
    {{.kind = REPLACE, .object = "/model/inv_freq", .type = I32, .dim = {4}},
     {"/model/inv_freq", "integers"}},
    {{.kind = WRITE, .object = "/model/inv_freq", .index = 2, .number = NAN},
     {"/model/inv_freq", "nan", "2"}},
    {{.kind = WRITE, .object = "/layer", .index = 1, .number = 1},
     {"/layer", "ascending", "index 1"}},
    {{.kind = WRITE, .object = "/layer", .index = 0, .number = -1}, {"/layer", "-1"}},
    {{.kind = DROP, .object = "/layer"}, {"/layer", "n_layer is 8", "2 layers"}},
    {{.kind = REPLACE, .object = "/q_head", .type = I32, .dim = {5}}, {"/q_head", "[5]", "[4]"}},
    {{.kind = DROP, .object = M}, {"/model", "missing"}},
    {{.kind = DROP, .object = "/requests"}, {"/requests", "missing"}},
    {{.kind = MAKE_GROUP, .object = "/requests"}, {"/requests", "0 groups"}},
    {{.kind = MAKE_GROUP, .object = "/requests/a"}, {"/requests/a/", "missing"}},
    /* tensors */
    {{.kind = DROP, .object = R "token"}, {R "token", "missing"}},
    {{.kind = DROP, .object = R "q"}, {R "q", "missing"}},
    {{.kind = DROP, .object = R "v"}, {R "v", "missing"}},
    {{.kind = MAKE_GROUP, .object = R "k"}, {R "k", "not a data set"}},
    {{.kind = REPLACE, .object = R "q", .type = F64, .dim = {2, 4, T, 8}},
     {R "q", "f64", "f16, bf16 or f32"}},
    {{.kind = REPLACE, .object = R "k", .type = I32, .dim = {2, 2, T, 8}}, {R "k", "integers"}},
    {{.kind = REPLACE, .object = R "k", .type = F32, .dim = {2, 2, T, 8}},
     {R "k", "f32", "one type"}},
    {{.kind = REPLACE, .object = R "q", .type = F16, .dim = {2, 2, T, 8}},
     {R "q", "[2][2][300][8]", "[2][4][300][8]"}},
    {{.kind = REPLACE, .object = R "q", .type = F16, .dim = {2, 4, T, 6}}, {R "q", "[6]", "[8]"}},
    {{.kind = REPLACE, .object = R "q", .type = F16, .dim = {2, 4, 100, 8}},
     {R "q", "100 queries", "300 tokens"}},
    {{.kind = REPLACE, .object = R "q", .type = F16, .dim = {2, 4, T}},
     {R "q", "3 dimensions", "expected 4"}},
    {{.kind = REPLACE, .object = R "k", .type = F16, .dim = {2, 2, T, 8, 1}},
     {R "k", "5 dimensions"}},
    {{.kind = REPLACE, .object = R "k", .type = F16, .dim = {1, 2, T, 8}},
     {R "k", "[1][2]", "[2][2]"}},
    {{.kind = REPLACE, .object = R "hidden", .type = BF16, .dim = {2, T, 13}},
     {R "hidden", "[13]", "[12]"}},
    {{.kind = REPLACE, .object = R "lse", .type = F32, .dim = {2, 2, T}},
     {R "lse", "[2][2]", "[2][4]"}},
    {{.kind = REPLACE, .object = R "gate", .type = F32, .dim = {2, 4, T}},
     {R "gate", "[2][4]", "[2][2]"}},
    {{.kind = REPLACE, .object = R "token", .type = F32, .dim = {T}},
     {R "token", "f32", "integers"}},
    {{.kind = REPLACE, .object = R "kind", .type = U8, .dim = {299}}, {R "kind", "[299]", "[300]"}},
    /* storage */
    {{.kind = CONVERT, .object = R "kind", .type = U8, .store = COMPACT}, {R "kind", "compact"}},
    {{.kind = REPLACE, .object = R "kind", .type = U8, .store = EXTERNAL_FILE, .dim = {T}},
     {R "kind", "external"}},
    {{.kind = REPLACE, .object = R "kind", .type = U8, .store = VIRTUAL, .dim = {T}},
     {R "kind", "virtual"}},
    {{.kind = REPLACE, .object = R "k", .type = F16, .store = UNWRITTEN, .dim = {2, 2, T, 8}},
     {R "k", "0 of", "completely"}},
    {{.kind = REPLACE, .object = R "k", .type = F16, .store = HALF_WRITTEN, .dim = {2, 2, T, 8}},
     {R "k", "of", "completely"}},
    {{.kind = REPLACE, .object = R "kind", .type = U8, .store = UNKNOWN_FILTER, .dim = {T}},
     {R "kind", "31999", "filter"}},
    {{.kind = REPLACE, .object = R "token", .type = I32, .store = HUGE_CHUNK, .dim = {T}},
     {R "token", "chunks", "4"}},
    {{.kind = SOFT_LINK, .object = R "q"}, {R "q", "soft or external"}},
    {{.kind = EXTERNAL_LINK, .object = R "q"}, {R "q", "soft or external"}},
    /* values */
    {{.kind = WRITE, .object = R "token", .index = 17, .number = -5},
     {R "token", "-5", "token 17"}},
    {{.kind = WRITE, .object = R "position", .index = 4, .number = 2147483647},
     {R "position", "2147483647", "token 4"}},
    {{.kind = WRITE, .object = R "scored", .index = 9, .number = 4}, {R "scored", "4", "0..3"}},
    {{.kind = WRITE, .object = R "doc_start", .number = 1}, {R "doc_start", "1", "starts at 0"}},
    {{.kind = WRITE, .object = R "doc_start", .index = 2, .number = 107},
     {R "doc_start", "107", "108"}},
    {{.kind = WRITE, .object = R "doc_start", .index = 2, .number = 300},
     {R "doc_start", "300", "299"}},
    {{.kind = WRITE, .object = R "query_pos", .index = 5, .number = 6},
     {R "query_pos", "6", "0..T-1"}},
    {{.kind = SET_INT, .object = "/", .name = "trace_id"}, {"trace_id", "string"}},
    {{.kind = SET_INT, .object = M, .name = "weights_xxh3"}, {M, "weights_xxh3", "string"}},
    {{.kind = SET_REAL, .object = R "kind", .name = "flag_values"}, {R "kind", "flag_values"}},
    {{.kind = REPLACE, .object = R "query_pos", .type = I32, .dim = {100}},
     {R "query_pos", "[100]", "[300]"}},
};

static const broken value[] = {
    /* found when the layer is read */
    {{.kind = WRITE, .object = R "q", .index = ((1 * 4 + 2) * 300 + 33) * 8 + 5, .number = NAN},
     {R "q", "layer 4, head 2, token 33", "nan"}},
    {{.kind = WRITE, .object = R "k", .index = ((1 * 2 + 1) * 300 + 299) * 8, .number = INFINITY},
     {R "k", "layer 4, head 1, token 299", "inf"}},
    {{.kind = WRITE, .object = R "v", .index = ((1 * 2 + 0) * 300 + 0) * 8, .number = -INFINITY},
     {R "v", "layer 4, head 0, token 0", "-inf"}},
    {{.kind = WRITE, .object = R "hidden", .index = (1 * 300 + 7) * 12 + 11, .number = NAN},
     {R "hidden", "layer 4", "token 7"}},
};

TestSuite(trace_rules, .init = small_folder_enter, .fini = small_folder_leave);

static void describe(const mutation *m, size_t i, char *out, size_t size) {
    snprintf(out, size, "case %zu: kind %d, %s %s %g", i, m->kind, m->object ? m->object : "/",
             m->name ? m->name : "", m->number);
}

static void break_it(const mutation *m, const char *what) {
    cr_assert_eq(small_trace_write(small, "a.h5"), KV_OK, "%s", kv_error_message());
    cr_assert_eq(mutate("a.h5", m), 0, "%s", what);
}

static void expect_message(const broken *b, kv_status st, const char *what) {
    const char *message = kv_error_message();
    cr_expect_eq(st, KV_E_DATA, "%s: status %d", what, st);
    cr_expect(strncmp(message, "a.h5: ", 6) == 0, "%s: the file is named first: %s", what, message);
    for (int j = 0; j < 3 && b->named[j]; j++)
        cr_expect(strstr(message, b->named[j]), "%s: '%s' is not in: %s", what, b->named[j],
                  message);
}

Test(trace_rules, each_broken_rule_is_named) {
    char what[160];
    for (size_t i = 0; i < sizeof rule / sizeof *rule; i++) {
        kv_trace *t = NULL;
        describe(&rule[i].m, i, what, sizeof what);
        break_it(&rule[i].m, what);
        kv_status st = kv_trace_open("a.h5", &t);
        expect_message(&rule[i], st, what);
        cr_expect_null(t, "%s", what);
        kv_trace_close(t);
    }
}

Test(trace_rules, values_that_are_not_finite_are_located) {
    char what[160];
    for (size_t i = 0; i < sizeof value / sizeof *value; i++) {
        kv_trace *t = NULL;
        kv_trace_layer x;
        describe(&value[i].m, i, what, sizeof what);
        break_it(&value[i].m, what);
        cr_assert_eq(kv_trace_open("a.h5", &t), KV_OK, "%s: %s", what, kv_error_message());
        cr_expect_eq(kv_trace_read_layer(t, 0, true, &x), KV_OK, "%s", what);
        kv_trace_layer_free(&x);
        expect_message(&value[i], kv_trace_read_layer(t, 1, true, &x), what);
        kv_trace_close(t);
    }
}

Test(trace_rules, missing_files_and_other_files) {
    kv_trace *t = NULL;
    cr_expect_eq(kv_trace_open("none.h5", &t), KV_E_NOINPUT);
    cr_expect(strstr(kv_error_message(), "none.h5"), "%s", kv_error_message());
    cr_expect_eq(kv_trace_open(".", &t), KV_E_DATA);
    FILE *f = fopen("text.h5", "w");
    fputs("not HDF5\n", f);
    fclose(f);
    cr_expect_eq(kv_trace_open("text.h5", &t), KV_E_DATA);
    cr_expect(strstr(kv_error_message(), "HDF5"), "%s", kv_error_message());
    cr_expect_null(t);
}

Test(trace_rules, files_of_decisions) {
    enum { N = 300 };
    static int32_t e[2 * 2 * N], back[2 * 2 * N];
    kv_evict_writer *w;
    for (int i = 0; i < 4 * N; i++) e[i] = i % 5 ? i % N + 1 + i % 7 : KV_NEVER;
    cr_assert_eq(kv_evict_writer_open("e.h5", &w), KV_OK);
    cr_expect_eq(kv_evict_writer_add(w, "tova", 64, 2, 2, N, e), KV_OK, "%s", kv_error_message());
    cr_expect_eq(kv_evict_writer_add(w, "tova", 128, 2, 2, N, e), KV_OK);
    cr_expect_eq(kv_evict_writer_add(w, "oracle:power=2", 64, 2, 2, N, e), KV_OK);
    cr_expect_eq(kv_evict_writer_close(w), KV_OK, "%s", kv_error_message());
    cr_expect_eq(kv_evict_read("e.h5", "oracle:power=2", 64, 2, 2, N, back), KV_OK, "%s",
                 kv_error_message());
    cr_expect_eq(memcmp(e, back, sizeof e), 0);
    memset(back, 0, sizeof back);
    const kv_span span = {
        .layer_index = 1, .n_kv_head = 2, .n_token = 50, .stride = 60, .first = 200};
    cr_expect_eq(kv_evict_read_span("e.h5", "tova", 128, &span, back), KV_OK, "%s",
                 kv_error_message());
    for (int h = 0; h < 2; h++)
        for (int t = 0; t < 60; t++)
            cr_expect_eq(back[h * 60 + t], t < 50 ? e[(2 + h) * N + 200 + t] : 0, "%d %d", h, t);
    const struct {
        const char *path, *item;
        int32_t budget, n_layer, n_token;
        kv_status st;
        const char *named;
    } bad[] = {{"none.h5", "tova", 64, 2, N, KV_E_NOINPUT, "none.h5"},
               {"e.h5", "h2o", 64, 2, N, KV_E_NOINPUT, "/evict_at/h2o/b64"},
               {"e.h5", "tova", 65, 2, N, KV_E_NOINPUT, "/evict_at/tova/b65"},
               {"e.h5", "tova", 64, 3, N, KV_E_DATA, "[2][2][300]"},
               {"e.h5", "tova", 64, 2, 299, KV_E_DATA, "[2][2][299]"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kv_status st = kv_evict_read(bad[i].path, bad[i].item, bad[i].budget, bad[i].n_layer, 2,
                                     bad[i].n_token, back);
        cr_expect_eq(st, bad[i].st, "case %zu: %d", i, st);
        cr_expect(strstr(kv_error_message(), bad[i].named), "case %zu: %s", i, kv_error_message());
    }
    mutate("e.h5", &(mutation){.kind = CONVERT, .object = "/evict_at/tova/b64", .type = F32});
    cr_expect_eq(kv_evict_read("e.h5", "tova", 64, 2, 2, N, back), KV_E_DATA);
    cr_assert_eq(kv_evict_writer_open("e.h5", &w), KV_OK);
    cr_expect_eq(kv_evict_writer_add(w, "tova", 64, 2, 2, N, e), KV_OK);
    cr_expect_eq(kv_evict_writer_add(w, "tova", 64, 2, 2, N, e), KV_E_IO, "the same item twice");
    cr_expect_eq(kv_evict_writer_close(w), KV_E_IO);
    cr_expect_eq(kv_evict_read("e.h5", "oracle:power=2", 64, 2, 2, N, back), KV_OK,
                 "the old file stays");
}
