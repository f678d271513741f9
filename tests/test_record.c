/* Recording, token files, inspecting: on a tiny random Qwen3 and on the embedded model. */
#include <criterion/criterion.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "experiments/inspect.h"
#include "experiments/record.h"
#include "experiments/token_file.h"
#include "reference/core/progress.h"
#include "tests/naive/mutate_hdf5.h"
#include "tests/naive/small_trace.h"
#include "tests/naive/test_folder.h"
#include "traces/corpus.h"
#include "traces/model_load.h"
#include "traces/safetensors.h"

static char home[PATH_MAX - 64], tiny[PATH_MAX], embedded[PATH_MAX];

static void setup(void) {
    cr_assert_not_null(getcwd(home, sizeof home));
    snprintf(tiny, sizeof tiny, "%s/tests/fixtures/hf_qwen3", home);
    snprintf(embedded, sizeof embedded, "%s/traces/model", home);
    test_folder_enter();
    kv_progress_set_quiet(1);
}

TestSuite(record, .init = setup, .fini = test_folder_leave);

static void put(const char *path, const void *data, size_t n) {
    FILE *f = fopen(path, "wb");
    cr_assert_eq(fwrite(data, 1, n, f), n);
    fclose(f);
}

static void put_text(const char *path, const char *text) { put(path, text, strlen(text)); }

/* A .npy file of version 1 with the given header dictionary. */
static void put_npy(const char *path, const char *header, const void *data, size_t n) {
    char all[512] = "\x93NUMPY\x01";
    size_t length = strlen(header);
    all[8] = (char)length;
    memcpy(all + 10, header, length);
    memcpy(all + 10 + length, data, n);
    put(path, all, 10 + length + n);
}

#define NPY(type, shape) "{'descr': '" type "', 'fortran_order': False, 'shape': " shape ", }\n"

/* The kind is told by the first bytes; a pipe has lost them when the tokens are read. */
Test(record, tokens_from_a_pipe_are_refused) {
    int32_t *token = NULL, n = 0;
    int end[2];
    char path[32];
    cr_assert_eq(pipe(end), 0);
    for (int i = 0; i < 6000; i++) cr_assert_eq(write(end[1], "5\n", 2), 2);
    close(end[1]);
    snprintf(path, sizeof path, "/dev/fd/%d", end[0]);
    cr_expect_eq(kv_token_file_read(path, &token, &n), KV_E_NOINPUT);
    cr_expect(strstr(kv_error_message(), "is a pipe"), "%s", kv_error_message());
    close(end[0]);
    free(token);
}

Test(record, token_files_of_every_kind) {
    const int16_t i2[] = {5, 0, 300};
    const int64_t i8[] = {5, 0, 300}, negative[] = {5, -1};
    const uint8_t big[] = {0, 5, 0, 0, 1, 44};
    put_text("a.txt", "5\n0\r\n\n  300 \n");
    put_text("b.txt", "5\n0\n300");
    put_text("marked.txt", "\xef\xbb\xbf"
                           "5\r\n0\r\n300\r\n");
    put_npy("c.npy", NPY("<i2", "(3,)"), i2, sizeof i2);
    put_npy("d.npy", NPY("<i8", "(3,)"), i8, sizeof i8);
    put_npy("e.npy", NPY(">u2", "(3,)"), big, sizeof big);
    small_trace *s = malloc(sizeof *s);
    small_trace_make(s);
    cr_assert_eq(small_trace_write(s, "f.h5"), KV_OK);
    cr_assert_eq(small_trace_write(s, "g.h5"), KV_OK);
    mutate("g.h5", &(mutation){.kind = REPLACE, .object = "/token", .type = I64, .dim = {3}});
    mutate("g.h5", &(mutation){.kind = WRITE, .object = "/token", .index = 2, .number = 300});
    const char *good[] = {"a.txt", "b.txt", "marked.txt", "c.npy", "d.npy", "e.npy"};
    int32_t *token, n;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        kv_status st = kv_token_file_read(good[i], &token, &n);
        cr_assert_eq(st, KV_OK, "%s: %s", good[i], kv_error_message());
        cr_expect(n == 3 && token[0] == 5 && token[1] == 0 && token[2] == 300, "%s", good[i]);
        free(token);
    }
    cr_assert_eq(kv_token_file_read("f.h5", &token, &n), KV_OK, "%s", kv_error_message());
    cr_expect(n == FX_TOKEN && memcmp(token, s->token, sizeof s->token) == 0);
    free(token);
    cr_assert_eq(kv_token_file_read("g.h5", &token, &n), KV_OK, "%s", kv_error_message());
    cr_expect(n == 3 && token[0] == 1 && token[2] == 300);
    free(token);
    free(s);

    put_text("1.txt", "5\nseven\n");
    put_text("2.txt", "5\n6 7\n");
    put_text("3.txt", "5\n-2\n");
    put_text("4.txt", "\n\n");
    put_text("5.txt", "4294967296\n");
    put_text("6.txt", "5\n1.5\n");
    put_npy("7.npy", NPY("<i8", "(2,)"), negative, sizeof negative);
    put_npy("8.npy", NPY("<f4", "(2,)"), negative, 8);
    put_npy("9.npy", NPY("<i8", "(1, 2)"), negative, sizeof negative);
    put_npy("10.npy", NPY("<i8", "(3,)"), i8, 2 * sizeof *i8);
    put("11.npy", "\x93NUMPY\x01\x00", 8);
    const struct {
        const char *path;
        kv_status st;
        const char *named;
    } bad[] = {{"none.txt", KV_E_NOINPUT, "none.txt"},
               {"1.txt", KV_E_DATA, "line 2 holds 'seven'"},
               {"2.txt", KV_E_DATA, "line 2 holds '6' and more"},
               {"3.txt", KV_E_DATA, "line 2 holds -2"},
               {"4.txt", KV_E_DATA, "no tokens"},
               {"5.txt", KV_E_DATA, "4294967296"},
               {"6.txt", KV_E_DATA, "'1.5'"},
               {"7.npy", KV_E_DATA, "token 2 holds -1"},
               {"8.npy", KV_E_DATA, "<f4"},
               {"9.npy", KV_E_DATA, "shape (1, 2), expected"},
               {"10.npy", KV_E_DATA, "2 of 3"},
               {"11.npy", KV_E_DATA, "truncated"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kv_status st = kv_token_file_read(bad[i].path, &token, &n);
        cr_expect_eq(st, bad[i].st, "%s: %d", bad[i].path, st);
        cr_expect(strstr(kv_error_message(), bad[i].named) &&
                      strstr(kv_error_message(), bad[i].path),
                  "%s: %s", bad[i].path, kv_error_message());
        cr_expect_null(token);
    }
}

static char said[1 << 14];

static kv_status inspect(const char *path, bool deep) {
    FILE *f = fmemopen(said, sizeof said, "w");
    kv_status st = kv_inspect(path, deep, f);
    fclose(f);
    return st;
}

/* Tokens 0..n-1 modulo the vocabulary of the tiny model. */
static kv_record_options tiny_options(const char *output) {
    FILE *f = fopen("tokens.txt", "w");
    for (int i = 0; i < 100; i++) fprintf(f, "%d\n", i * 7 % 61);
    fclose(f);
    return (kv_record_options){.model_dir = tiny,
                               .tokens = "tokens.txt",
                               .output = output,
                               .hidden = true,
                               .any_dtype = true,
                               .ops = &kv_ops_cpu};
}

typedef struct seen { /* what the model shows its hook in layer 1 */
    float *k, *hidden;
} seen;

static kv_status look(void *context, const kv_span *span, float *o) {
    seen *s = context;
    if (span->layer_id == 1)
        for (int64_t h = 0; h < span->n_kv_head; h++)
            memcpy(s->k + h * span->n_token * span->head_dim,
                   span->k + h * span->stride * span->head_dim,
                   (size_t)(span->n_token * span->head_dim) * sizeof(float));
    if (span->layer_id == 1)
        memcpy(s->hidden, span->hidden, (size_t)(span->n_token * span->d_model) * sizeof(float));
    return kv_attend(span, o, NULL);
}

Test(record, a_trace_holds_what_the_model_computed) {
    const kv_dtype type[] = {KV_F32, KV_F16, KV_BF16};
    const double unit[] = {0, 0x1p-11, 0x1p-8};
    kv_record_options o = tiny_options("t.h5");
    kv_model *model;
    int32_t *token, n;
    cr_assert_eq(kv_model_load(tiny, &model), KV_OK, "%s", kv_error_message());
    cr_assert_eq(kv_token_file_read("tokens.txt", &token, &n), KV_OK);
    const int32_t d = model->config.head_dim, width = model->config.d_model,
                  heads = model->config.n_kv_head;
    seen s = {malloc((size_t)(heads * n * d) * sizeof(float)),
              malloc((size_t)(n * width) * sizeof(float))};
    const kv_model_hooks hooks = {.context = &s, .attend = look};
    cr_assert_eq(kv_model_forward(model, token, NULL, n, &hooks), KV_OK, "%s", kv_error_message());
    for (int j = 0; j < 3; j++) {
        o.any_dtype = false, o.dtype = type[j], o.force = true;
        cr_assert_eq(kv_record(&o), KV_OK, "%s", kv_error_message());
        cr_expect_eq(inspect("t.h5", true), KV_OK, "%s\n%s", kv_error_message(), said);
        kv_trace *t;
        cr_assert_eq(kv_trace_open("t.h5", &t), KV_OK);
        const kv_trace_info *i = kv_trace_get(t);
        cr_expect(i->type == type[j] && i->n_layer == 3 && i->n_document == 1 && i->longest == 100);
        cr_expect(!i->kind && !i->has_corpus && i->has_lse && i->has_hidden);
        cr_expect_str_eq(i->model_hash, model->hash);
        cr_expect_float_eq(i->softmax_scale, 1 / sqrt(d), 1e-15);
        cr_expect_eq(memcmp(i->inv_freq, model->inv_freq, (size_t)d / 2 * sizeof(double)), 0);
        kv_trace_layer l;
        cr_assert_eq(kv_trace_read_layer(t, 1, true, &l), KV_OK);
        for (int32_t x = 0; x < heads * n * d; x++)
            cr_assert(fabs((double)(l.k[x] - s.k[x])) <= unit[j] * fabs((double)s.k[x]) + 0x1p-25,
                      "%s k[%d] %g %g", kv_dtype_name(type[j]), x, (double)l.k[x], (double)s.k[x]);
        for (int32_t x = 0; x < n * width; x++)
            cr_assert(fabs((double)(l.hidden[x] - s.hidden[x])) <=
                      0x1p-8 * fabs((double)s.hidden[x]));
        kv_trace_layer_free(&l);
        kv_trace_close(t);
    }
    free(s.k);
    free(s.hidden);
    free(token);
    kv_model_free(model);
}

/* The tiny model with the values of layer 2 scaled far beyond f16. */
static void make_loud_model(void) {
    char path[PATH_MAX + 32], command[2 * PATH_MAX];
    kv_tensors set;
    kv_tensor_out out[64];
    snprintf(path, sizeof path, "%s/model.safetensors", tiny);
    cr_assert_eq(kv_safetensors_open(path, &set), KV_OK, "%s", kv_error_message());
    for (int32_t i = 0; i < set.n_tensor; i++) {
        const kv_tensor *t = &set.tensor[i];
        float *x = malloc((size_t)t->n_element * sizeof *x);
        cr_assert_eq(kv_tensor_read(&set, t, x), KV_OK);
        if (strstr(t->name, "layers.2.self_attn.v_proj"))
            for (int64_t j = 0; j < t->n_element; j++) x[j] *= 1e7f;
        out[i] = (kv_tensor_out){.name = t->name, .n_dim = t->n_dim, .data = x};
        memcpy(out[i].shape, t->shape, sizeof t->shape);
    }
    mkdir("loud", 0777);
    cr_assert_eq(kv_safetensors_write("loud/model.safetensors", out, set.n_tensor, NULL), KV_OK,
                 "%s", kv_error_message());
    for (int32_t i = 0; i < set.n_tensor; i++) free((void *)out[i].data);
    snprintf(command, sizeof command, "cp %s/config.json loud/", tiny);
    cr_assert_eq(system(command), 0);
    kv_tensors_free(&set);
}

Test(record, values_beyond_f16_are_stored_wider) {
    kv_record_options o = tiny_options("t.h5");
    kv_trace *t;
    make_loud_model();
    o.model_dir = "loud";
    cr_assert_eq(kv_record(&o), KV_OK, "%s", kv_error_message());
    cr_assert_eq(kv_trace_open("t.h5", &t), KV_OK);
    cr_expect_eq(kv_trace_get(t)->type, KV_F32);
    kv_trace_close(t);
    o.any_dtype = false, o.dtype = KV_F16, o.force = true;
    cr_expect_eq(kv_record(&o), KV_E_DATA, "f16 was demanded");
    cr_expect(strstr(kv_error_message(), "f32"), "%s", kv_error_message());
}

Test(record, wrong_requests_are_named) {
    const kv_record_options good = tiny_options("t.h5");
    kv_record_options o;
    put_text("exists.h5", "something");
    put_text("far.txt", "5\n61\n");
    const struct {
        const char *what, *model, *corpus, *tokens, *output;
        int32_t length;
        kv_status st;
        const char *named;
    } bad[] = {
        {"no model", NULL, NULL, "tokens.txt", "t.h5", 0, KV_E_USAGE, "--model"},
        {"no output", tiny, NULL, "tokens.txt", NULL, 0, KV_E_USAGE, "--output"},
        {"no source", tiny, NULL, NULL, "t.h5", 0, KV_E_USAGE, "--corpus"},
        {"two sources", tiny, "reasoning", "tokens.txt", "t.h5", 0, KV_E_USAGE, "not both"},
        {"unknown corpus", tiny, "poems", NULL, "t.h5", 0, KV_E_USAGE, "poems"},
        {"short corpus", tiny, "reasoning", NULL, "t.h5", 10, KV_E_USAGE, "10"},
        {"too long", tiny, NULL, "tokens.txt", "t.h5", 101, KV_E_USAGE, "100"},
        {"negative", tiny, NULL, "tokens.txt", "t.h5", -1, KV_E_USAGE, "-1"},
        {"missing tokens", tiny, NULL, "none.txt", "t.h5", 0, KV_E_NOINPUT, "none.txt"},
        {"missing model", "none", NULL, "tokens.txt", "t.h5", 0, KV_E_NOINPUT, "none"},
        {"beyond the vocabulary", tiny, NULL, "far.txt", "t.h5", 0, KV_E_DATA, "token 2 is 61"},
        {"corpus of another language", tiny, "reasoning", NULL, "t.h5", 512, KV_E_DATA,
         "vocabulary"},
        {"occupied", tiny, NULL, "tokens.txt", "exists.h5", 0, KV_E_CANTCREATE, "--force"},
        {"no such folder", tiny, NULL, "tokens.txt", "no/t.h5", 0, KV_E_CANTCREATE, "no/t.h5"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        o = good;
        o.model_dir = bad[i].model, o.corpus = bad[i].corpus, o.tokens = bad[i].tokens;
        o.output = bad[i].output, o.length = bad[i].length;
        kv_status st = kv_record(&o);
        cr_expect_eq(st, bad[i].st, "%s: %d %s", bad[i].what, st, kv_error_message());
        cr_expect(strstr(kv_error_message(), bad[i].named), "%s: %s", bad[i].what,
                  kv_error_message());
    }
    struct stat found;
    cr_expect_neq(stat("t.h5", &found), 0);
}

Test(record, the_embedded_model_reads_its_corpus) {
    enum { N = 512 };
    static int32_t token[N];
    static uint8_t kind[N], scored[N];
    const kv_record_options o = {.model_dir = embedded,
                                 .corpus = "reasoning",
                                 .length = N,
                                 .seed = 3,
                                 .output = "t.h5",
                                 .any_dtype = true,
                                 .ops = &kv_ops_cpu};
    kv_trace *t;
    cr_assert_eq(kv_record(&o), KV_OK, "%s", kv_error_message());
    cr_assert_eq(kv_corpus_generate("reasoning", 3, N, token, kind, scored), KV_OK);
    cr_assert_eq(kv_trace_open("t.h5", &t), KV_OK);
    const kv_trace_info *i = kv_trace_get(t);
    cr_expect_eq(memcmp(i->token, token, sizeof token), 0);
    cr_expect_eq(memcmp(i->kind, kind, sizeof kind), 0);
    cr_expect_eq(memcmp(i->scored, scored, sizeof scored), 0);
    cr_expect(i->has_corpus && i->corpus_seed == 3 && i->type == KV_F16 && i->n_document == 1);
    kv_trace_close(t);
    cr_expect_eq(inspect("t.h5", true), KV_OK, "%s\n%s", kv_error_message(), said);
    cr_expect(strstr(said, "as recorded") && strstr(said, "held out") && strstr(said, "lse  "),
              "%s", said);
}

#define R "/requests/r00000/"

Test(record, inspect_finds_what_disagrees) {
    const struct {
        mutation m;
        bool shallow; /* found without --deep */
        const char *named;
    } c[] = {
        {{.kind = WRITE, .object = R "token", .index = 3, .number = 1}, false, "content_xxh3"},
        {{.kind = SET_TEXT, .object = "/", .name = "content_xxh3", .text = "00"},
         false,
         "content_xxh3"},
        {{.kind = WRITE, .object = R "position", .index = 30, .number = 2}, false, "position"},
        {{.kind = WRITE, .object = R "lse", .index = 299, .number = 9}, false, "lse"},
        {{.kind = WRITE, .object = R "lse", .index = 299, .number = NAN}, false, "lse"},
        {{.kind = WRITE, .object = R "k", .index = 5, .number = NAN}, false, R "k"},
        {{.kind = SET_REAL, .object = "/model", .name = "softmax_scale", .number = 0.5},
         false,
         "lse"},
        {{.kind = DROP, .object = R "q"}, true, R "q"},
    };
    small_trace *s = malloc(sizeof *s);
    small_trace_make(s);
    cr_assert_eq(small_trace_write(s, "t.h5"), KV_OK);
    cr_expect_eq(inspect("t.h5", true), KV_OK, "%s\n%s", kv_error_message(), said);
    cr_expect(strstr(said, "3 documents") && strstr(said, "layers     1 4"), "%s", said);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        cr_assert_eq(small_trace_write(s, "t.h5"), KV_OK);
        cr_assert_eq(mutate("t.h5", &c[i].m), 0, "case %zu", i);
        cr_expect_eq(inspect("t.h5", false), c[i].shallow ? KV_E_DATA : KV_OK, "case %zu", i);
        cr_expect_eq(inspect("t.h5", true), KV_E_DATA, "case %zu: %s", i, said);
        bool named = strstr(kv_error_message(), c[i].named) || strstr(said, c[i].named);
        cr_expect(named, "case %zu: %s\n%s", i, kv_error_message(), said);
    }
    free(s);
}

Test(record, inspect_describes_decisions_and_weights) {
    int32_t e[2 * 2 * 10];
    kv_evict_writer *w;
    char path[PATH_MAX + 32];
    for (int i = 0; i < 40; i++) e[i] = i % 10 + 1;
    kv_evict_writer_open("e.h5", &w);
    kv_evict_writer_add(w, "oracle:power=2", 4, 2, 2, 10, e);
    e[13] = 3;
    kv_evict_writer_add(w, "tova", 4, 2, 2, 10, e);
    cr_assert_eq(kv_evict_writer_close(w), KV_OK, "%s", kv_error_message());
    cr_expect_eq(inspect("e.h5", false), KV_OK, "%s", kv_error_message());
    cr_expect(strstr(said, "oracle:power=2, budget 4: 2 layers, 2 KV heads, 10 tokens"), "%s",
              said);
    cr_expect_eq(inspect("e.h5", true), KV_E_DATA);
    cr_expect(strstr(kv_error_message(), "/evict_at/tova/b4[0][1][3] is 3"), "%s",
              kv_error_message());
    snprintf(path, sizeof path, "%s/model.safetensors", tiny);
    cr_expect_eq(inspect(path, true), KV_OK, "%s", kv_error_message());
    cr_expect(strstr(said, "lm_head") || strstr(said, "embed_tokens"), "%s", said);
    put_text("x.txt", "words and more words");
    cr_expect_eq(inspect("x.txt", false), KV_E_DATA);
    cr_expect_eq(inspect("none", false), KV_E_NOINPUT);
}
