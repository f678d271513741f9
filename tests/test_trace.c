/* Traces written and read back: every type and option, the content hash by an independent walk, byte identity, foreign spellings of the
 * schema. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "reference/core/log.h"
#include "tests/naive/mutate_hdf5.h"
#include "tests/naive/small_folder.h"

TestSuite(trace, .init = small_folder_enter, .fini = small_folder_leave);

static kv_trace *open_trace(const char *path) {
    kv_trace *t = NULL;
    kv_status st = kv_trace_open(path, &t);
    cr_assert_eq(st, KV_OK, "%s: %d %s", path, st, kv_error_message());
    return t;
}

static bool equal(const void *a, const void *b, size_t n) { return memcmp(a, b, n) == 0; }

static void expect_layer(const kv_trace_layer *l, int i, const char *what) {
    cr_expect(equal(l->q, small->q[i], sizeof small->q[i]), "%s: q of layer %d", what, i);
    cr_expect(equal(l->k, small->k[i], sizeof small->k[i]), "%s: k of layer %d", what, i);
    cr_expect(equal(l->v, small->v[i], sizeof small->v[i]), "%s: v of layer %d", what, i);
}

Test(trace, everything_comes_back_in_every_type) {
    const kv_dtype type[] = {KV_F16, KV_BF16, KV_F32};
    for (int j = 0; j < 3; j++) {
        const char *what = kv_dtype_name(type[j]);
        small->spec.type = type[j];
        small_folder_write("a.h5");
        kv_trace *t = open_trace("a.h5");
        const kv_trace_info *i = kv_trace_get(t);
        cr_expect_eq(i->type, type[j], "%s", what);
        cr_expect(i->n_layer == 2 && i->n_q_head == 4 && i->n_kv_head == 2 && i->head_dim == 8 &&
                  i->d_model == 12 && i->n_model_layer == 8 && i->n_request == 1);
        cr_expect(i->rope_theta == 10000 && i->softmax_scale == 0.25 && i->logit_softcap == 0);
        cr_expect(equal(i->inv_freq, small->inv_freq, sizeof small->inv_freq));
        cr_expect(i->layer_id[0] == 1 && i->layer_id[1] == 4);
        cr_expect(i->n_token == FX_TOKEN && i->n_document == 3 && i->longest == 107, "%d",
                  i->longest);
        for (int d = 0; d < 3; d++)
            cr_expect(i->doc_first[d] == small->doc_start[d] && i->doc_request[d] == 0 &&
                          i->doc_in_request[d] == d,
                      "document %d", d);
        cr_expect_eq(i->doc_first[3], FX_TOKEN);
        cr_expect(equal(i->token, small->token, sizeof small->token));
        cr_expect(equal(i->position, small->position, sizeof small->position));
        cr_expect(equal(i->kind, small->kind, sizeof small->kind));
        cr_expect(equal(i->scored, small->scored, sizeof small->scored));
        cr_expect(i->n_kind_name == 7 && !strcmp(i->kind_name[6], "equation"));
        cr_expect(i->has_hidden && i->has_lse && !i->has_gate && i->gate_shift == -1);
        cr_expect(i->has_corpus && i->corpus_seed == 9000000000000000001u);
        cr_expect_str_eq(i->model_hash, "00112233445566778899aabbccddeeff");
        cr_expect_str_eq(i->title, "a small trace");
        cr_expect(i->trace_id && strlen(i->trace_id) == 36 && i->trace_id[14] == '8');
        for (int l = 0; l < FX_LAYER; l++) {
            kv_trace_layer x;
            cr_assert_eq(kv_trace_read_layer(t, l, true, &x), KV_OK, "%s", kv_error_message());
            expect_layer(&x, l, what);
            cr_expect(equal(x.hidden, small->hidden[l], sizeof small->hidden[l]));
            cr_expect(equal(x.lse, small->lse[l], sizeof small->lse[l]));
            cr_expect_null(x.gate);
            kv_span s;
            kv_trace_span(t, &x, l, 1, &s);
            cr_expect(s.n_token == 100 && s.stride == FX_TOKEN && s.first == 107 &&
                      s.layer_id == 3 * l + 1 && s.layer_index == l && s.n_layer == 8 &&
                      s.document == 1 && s.request == 0 && s.scale == 0.25f);
            cr_expect(s.position[3] == 115 && s.q[8 * FX_TOKEN * 2 + 8] == small->q[l][2][108][0] &&
                      s.hidden[12] == small->hidden[l][108][0]);
            kv_trace_layer_free(&x);
            cr_assert_eq(kv_trace_read_layer(t, l, false, &x), KV_OK);
            cr_expect_null(x.hidden);
            kv_trace_layer_free(&x);
        }
        cr_expect_eq(kv_trace_read_layer(t, 2, false, &(kv_trace_layer){0}), KV_E_USAGE);
        kv_trace_close(t);
    }
}

/* The order of contract.md 4, written out. */
Test(trace, the_hash_covers_what_the_contract_lists) {
    const int32_t window[] = {-1, -1}, head[] = {0, 1, 2, 3}, dim[] = {0, 1, 2, 3, 4, 5, 6, 7};
    static int32_t count[FX_TOKEN];
    static uint16_t hidden[FX_LAYER * FX_TOKEN * FX_WIDTH];
    char expected[33], found[33];
    for (int i = 0; i < FX_TOKEN; i++) count[i] = i;
    for (int i = 0; i < FX_LAYER * FX_TOKEN * FX_WIDTH; i++)
        hidden[i] = kv_f32_to_bf16((&small->hidden[0][0][0])[i]);
    XXH3_state_t *x = XXH3_createState();
    XXH3_128bits_reset(x);
    XXH3_128bits_update(x, window, sizeof window);
    XXH3_128bits_update(x, small->inv_freq, sizeof small->inv_freq);
    XXH3_128bits_update(x, small->layer_id, sizeof small->layer_id);
    XXH3_128bits_update(x, head, 2 * sizeof *head);
    XXH3_128bits_update(x, head, 4 * sizeof *head);
    XXH3_128bits_update(x, dim, sizeof dim);
    XXH3_128bits_update(x, small->token, sizeof small->token);
    XXH3_128bits_update(x, small->doc_start, sizeof small->doc_start);
    XXH3_128bits_update(x, small->position, sizeof small->position);
    XXH3_128bits_update(x, small->kind, sizeof small->kind);
    XXH3_128bits_update(x, small->scored, sizeof small->scored);
    XXH3_128bits_update(x, count, sizeof count);
    XXH3_128bits_update(x, small->q, sizeof small->q);
    XXH3_128bits_update(x, small->k, sizeof small->k);
    XXH3_128bits_update(x, small->v, sizeof small->v);
    XXH3_128bits_update(x, hidden, sizeof hidden);
    XXH3_128bits_update(x, small->lse, sizeof small->lse);
    XXH128_hash_t h = XXH3_128bits_digest(x);
    XXH3_freeState(x);
    snprintf(expected, 33, "%016llx%016llx", (unsigned long long)h.high64,
             (unsigned long long)h.low64);
    small->spec.type = KV_F32;
    small_folder_write("a.h5");
    kv_trace *t = open_trace("a.h5");
    cr_assert_eq(kv_trace_content_hash(t, found), KV_OK);
    cr_expect_str_eq(found, expected);
    cr_expect_str_eq(kv_trace_get(t)->content_hash, expected);
    kv_trace_close(t);
}

static char *slurp(const char *path, long *n) {
    FILE *f = fopen(path, "rb");
    cr_assert_not_null(f, "%s", path);
    fseek(f, 0, SEEK_END);
    *n = ftell(f);
    rewind(f);
    char *x = malloc((size_t)*n);
    cr_assert_eq(fread(x, 1, (size_t)*n, f), (size_t)*n);
    fclose(f);
    return x;
}

Test(trace, the_same_input_gives_the_same_bytes) {
    long n, m;
    small_folder_write("a.h5");
    sleep(1); /* HDF5 times have seconds */
    small_folder_write("b.h5");
    char *a = slurp("a.h5", &n), *b = slurp("b.h5", &m);
    cr_expect(n == m && equal(a, b, (size_t)n));
    free(a);
    free(b);
}

Test(trace, optional_data_may_be_missing) {
    const char *optional[] = {"doc_start", "position", "kind", "scored",
                              "query_pos", "hidden",   "lse"};
    char object[64];
    small_folder_write("a.h5");
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++) {
        snprintf(object, sizeof object, "/requests/r00000/%s", optional[i]);
        cr_assert_eq(mutate("a.h5", &(mutation){.kind = DROP, .object = object}), 0, "%s", object);
    }
    const char *model[] = {"/model/window", "/model/inv_freq", "/kv_head", "/q_head", "/dim"};
    for (size_t i = 0; i < sizeof model / sizeof *model; i++)
        cr_assert_eq(mutate("a.h5", &(mutation){.kind = DROP, .object = model[i]}), 0);
    const char *attribute[] = {"title",   "source",   "history",     "producer",
                               "profile", "trace_id", "content_xxh3"};
    for (size_t i = 0; i < sizeof attribute / sizeof *attribute; i++)
        cr_assert_eq(
            mutate("a.h5",
                   &(mutation){.kind = DROP_ATTRIBUTE, .object = "/", .name = attribute[i]}),
            0);
    kv_trace *t = open_trace("a.h5");
    const kv_trace_info *i = kv_trace_get(t);
    cr_expect(i->n_document == 1 && i->longest == FX_TOKEN && i->doc_first[1] == FX_TOKEN);
    cr_expect(i->position[0] == 0 && i->position[FX_TOKEN - 1] == FX_TOKEN - 1);
    cr_expect(!i->kind && !i->scored && !i->has_hidden && !i->has_lse);
    cr_expect_null(i->trace_id);
    cr_expect_str_empty(i->content_hash);
    for (int c = 0; c < FX_DIM / 2; c++)
        cr_expect_float_eq(i->inv_freq[c], pow(10000, -2.0 * c / FX_DIM), 1e-15, "%d", c);
    kv_trace_layer x;
    cr_assert_eq(kv_trace_read_layer(t, 1, true, &x), KV_OK);
    expect_layer(&x, 1, "bare");
    cr_expect(!x.hidden && !x.lse);
    kv_trace_layer_free(&x);
    kv_trace_close(t);
}

#define R "/requests/r00000/"

/* Other people's ways to write the same thing. */
Test(trace, foreign_spellings_are_read) {
    const mutation m[] = {
        {.kind = SET_INT, .object = "/model", .name = "n_layer", .number = 8},
        {.kind = SET_REAL, .object = "/model", .name = "rope_theta", .number = 10000},
        {.kind = SET_INT, .object = "/model", .name = "rope_theta", .number = 10000},
        {.kind = SET_BOOL, .object = "/model", .name = "keys_are_rotated"},
        {.kind = SET_TEXT, .object = "/model", .name = "rope_kind", .text = "rotate_half"},
        {.kind = SET_TEXT, .object = "/", .name = "Conventions", .text = "KVTRACE-1.0"},
        {.kind = CONVERT, .object = R "token", .type = I64},
        {.kind = CONVERT, .object = R "token", .type = I32_BIG},
        {.kind = CONVERT, .object = R "kind", .type = I64, .store = CHUNKED},
        {.kind = CONVERT, .object = R "position", .type = I64, .store = NO_FILTER_CHUNKED},
        {.kind = CONVERT, .object = R "q", .type = F32},
        {.kind = CONVERT, .object = R "q", .type = F16, .store = CHUNKED},
        {.kind = CONVERT, .object = R "q", .type = F16_BIG, .store = CHUNKED},
        {.kind = CONVERT, .object = R "k", .type = F16, .store = NO_FILTER_CHUNKED},
        {.kind = CONVERT, .object = R "hidden", .type = F16},
        {.kind = CONVERT, .object = R "lse", .type = F64},
        {.kind = MAKE_GROUP, .object = "/extra"},
        {.kind = MAKE_GROUP, .object = R "token_class"},
        {.kind = REPLACE, .object = "/requests/readme", .type = U8, .dim = {3}},
        {.kind = SET_VERSION, .index = 2, .number = 7},
    };
    for (size_t i = 0; i < sizeof m / sizeof *m; i++) {
        char what[160];
        snprintf(what, sizeof what, "case %zu: %s %s", i, m[i].object ? m[i].object : "version",
                 m[i].name ? m[i].name : "");
        small_folder_write("a.h5");
        cr_assert_eq(mutate("a.h5", &m[i]), 0, "%s", what);
        kv_trace *t = NULL;
        cr_expect_eq(kv_trace_open("a.h5", &t), KV_OK, "%s: %s", what, kv_error_message());
        if (!t) continue;
        kv_trace_layer x;
        cr_assert_eq(kv_trace_read_layer(t, 1, true, &x), KV_OK, "%s: %s", what,
                     kv_error_message());
        expect_layer(&x, 1, what);
        cr_expect(equal(kv_trace_get(t)->token, small->token, sizeof small->token), "%s", what);
        cr_expect(equal(x.hidden, small->hidden[1], sizeof small->hidden[1]), "%s", what);
        cr_expect(equal(x.lse, small->lse[1], sizeof small->lse[1]), "%s", what);
        kv_trace_layer_free(&x);
        kv_trace_close(t);
    }
}

static void count_warnings(void *context, kv_log_level level, const char *line) {
    (void)line;
    *(int *)context += level == KV_LOG_WARN;
}

Test(trace, a_later_minor_version_is_read_with_a_warning) {
    int warnings = 0;
    kv_log_set_level(KV_LOG_WARN);
    kv_log_set_sink(count_warnings, &warnings);
    small_folder_write("a.h5");
    mutate("a.h5", &(mutation){.kind = SET_VERSION, .index = 1, .number = 3});
    kv_trace_close(open_trace("a.h5"));
    kv_log_set_sink(NULL, NULL);
    cr_expect_eq(warnings, 1);
}

Test(trace, requests_are_pooled_in_name_order) {
    small_folder_write("a.h5");
    mutate("a.h5", &(mutation){.kind = COPY_REQUEST, .name = "early"});
    mutate("a.h5", &(mutation){.kind = WRITE, .object = "/requests/early/token", .number = 4242});
    mutate("a.h5", &(mutation){.kind = DROP, .object = "/requests/early/doc_start"});
    mutate("a.h5", &(mutation){.kind = DROP, .object = "/requests/early/position"});
    mutate("a.h5",
           &(mutation){.kind = SET_INT, .object = "/requests/early", .name = "seed", .number = 7});
    kv_trace *t = open_trace("a.h5");
    const kv_trace_info *i = kv_trace_get(t);
    cr_expect(i->n_request == 2 && i->n_token == 2 * FX_TOKEN && i->n_document == 4);
    cr_expect(i->token[0] == 4242 && i->token[FX_TOKEN] == small->token[0]);
    cr_expect(i->longest == FX_TOKEN && i->doc_first[1] == FX_TOKEN &&
              i->doc_first[2] == FX_TOKEN + 107);
    cr_expect(i->doc_request[0] == 0 && i->doc_request[3] == 1 && i->doc_in_request[3] == 2);
    cr_expect(i->position[1] == 1 && i->position[FX_TOKEN] == 5);
    cr_expect(i->has_corpus && i->corpus_seed == 7, "the smallest seed counts");
    kv_trace_layer x;
    cr_assert_eq(kv_trace_read_layer(t, 1, true, &x), KV_OK, "%s", kv_error_message());
    const size_t head = FX_TOKEN * FX_DIM;
    for (size_t h = 0; h < FX_Q; h++)
        for (size_t r = 0; r < 2; r++)
            cr_expect(equal(x.q + (2 * h + r) * head, small->q[1][h], head * 4),
                      "q of head %zu, request %zu", h, r);
    for (size_t r = 0; r < 2; r++)
        cr_expect(
            equal(x.hidden + r * FX_TOKEN * FX_WIDTH, small->hidden[1], sizeof small->hidden[1]));
    kv_span s;
    kv_trace_span(t, &x, 1, 3, &s);
    cr_expect(s.first == FX_TOKEN + 207 && s.n_token == 93 && s.request == 1 && s.document == 2);
    cr_expect(s.k[2 * head] == small->k[1][1][207][0]);
    kv_trace_layer_free(&x);
    kv_trace_close(t);
}

Test(trace, kinds_scores_and_gates) {
    float score[FX_KV * FX_TOKEN];
    double delta[FX_KV];
    small_folder_write("a.h5");
    mutate("a.h5", &(mutation){.kind = SET_TEXT,
                               .object = R "kind",
                               .name = "flag_meanings",
                               .text = "bos system user context question answer other"});
    mutate("a.h5", &(mutation){.kind = REPLACE,
                               .object = R "gate",
                               .type = F32,
                               .dim = {FX_LAYER, FX_KV, FX_TOKEN}});
    mutate("a.h5", &(mutation){.kind = SET_INT, .object = R "gate", .name = "shift", .number = 0});
    mutate("a.h5", &(mutation){.kind = MAKE_GROUP, .object = R "score"});
    mutate("a.h5", &(mutation){.kind = REPLACE,
                               .object = R "score/mine",
                               .type = F32,
                               .dim = {FX_LAYER, FX_KV, FX_TOKEN}});
    mutate("a.h5", &(mutation){.kind = WRITE,
                               .object = R "score/mine",
                               .number = 2.5,
                               .index = (FX_KV + 1) * FX_TOKEN + 3});
    kv_trace *t = open_trace("a.h5");
    const kv_trace_info *i = kv_trace_get(t);
    cr_expect_str_eq(i->kind_name[3], "context");
    cr_expect(i->has_gate && i->gate_shift == 0);
    kv_trace_layer x;
    cr_assert_eq(kv_trace_read_layer(t, 0, false, &x), KV_OK);
    cr_expect(x.gate && x.gate[FX_KV * FX_TOKEN - 1] == 1);
    kv_trace_layer_free(&x);
    cr_assert_eq(kv_trace_read_score(t, "mine", 1, score, NULL), KV_OK, "%s", kv_error_message());
    cr_expect(score[FX_TOKEN + 3] == 2.5f && score[FX_TOKEN + 2] == 1);
    cr_expect_eq(kv_trace_read_score(t, "mine", 1, score, delta), KV_E_DATA, "no delta");
    cr_expect_eq(kv_trace_read_score(t, "yours", 1, score, NULL), KV_E_NOINPUT);
    cr_expect(strstr(kv_error_message(), R "score/yours"), "%s", kv_error_message());
    kv_trace_close(t);
}

Test(trace, the_writer_refuses_what_it_cannot_store) {
    kv_trace_writer *w;
    struct stat found;
    small->q[1][2][30][4] = 70000.0f; /* finite, beyond f16 */
    cr_expect_eq(small_trace_write(small, "a.h5"), KV_E_DATA);
    cr_expect(strstr(kv_error_message(), "range"), "%s", kv_error_message());
    small->spec.type = KV_F32;
    small_folder_write("a.h5");
    small->q[1][2][30][4] = NAN;
    cr_expect_eq(small_trace_write(small, "b.h5"), KV_E_DATA);
    cr_expect(strstr(kv_error_message(), "finite") && strstr(kv_error_message(), "head 2"), "%s",
              kv_error_message());
    cr_expect_neq(stat("b.h5", &found), 0, "nothing is left behind");
    small->q[1][2][30][4] = 0;
    small->doc_start[1] = FX_TOKEN;
    cr_expect_eq(small_trace_write(small, "b.h5"), KV_E_DATA);
    small->doc_start[1] = 107;
    cr_assert_eq(kv_trace_writer_open("b.h5", &small->spec, &w), KV_OK);
    cr_expect_eq(kv_trace_writer_close(w, true), KV_E_USAGE, "no layer was written");
    cr_assert_eq(kv_trace_writer_open("b.h5", &small->spec, &w), KV_OK);
    cr_expect_eq(kv_trace_writer_layer(w, &(kv_span){.n_token = 1}, NULL), KV_E_USAGE);
    cr_expect_eq(kv_trace_writer_close(w, false), KV_OK);
    cr_expect_eq(kv_trace_writer_open("no/such/folder/b.h5", &small->spec, &w), KV_E_CANTCREATE);
    cr_expect(strstr(kv_error_message(), "no/such/folder/b.h5"), "%s", kv_error_message());
    cr_expect_neq(system("ls -A | grep -v '^a.h5$' | grep -q ."), 0, "nothing is left behind");
}
