/* Corners of runs and traces: results that lost a file, decision files of another trace, odd kind names, requests that number kinds
 * differently, corpora without a seed, the cache making room. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "experiments/cache.h"
#include "experiments/train_set.h"
#include "tests/naive/mutate_hdf5.h"
#include "tests/naive/run_kvlab.h"
#include "tests/naive/small_trace.h"

static const char *place;

static char *at(const char *name) {
    static char path[4][512];
    static int turn;
    char *out = path[turn++ % 4];
    snprintf(out, sizeof path[0], "%s/%s", place, name);
    return out;
}

static void open_place(void) {
    place = kv_playground_open();
    cr_assert_not_null(place);
    small_trace *f = malloc(sizeof *f);
    small_trace_make(f);
    cr_assert_eq(small_trace_write(f, at("t.h5")), KV_OK, "%s", kv_error_message());
    free(f);
}

static void close_place(void) { kv_playground_close(); }

TestSuite(corners, .init = open_place, .fini = close_place);

#define RUN "experiment --sinks 2 --window 8 --trace t.h5 "

Test(corners, a_result_that_lost_a_file_is_made_again) {
    static const char *const lost[] = {"a/metrics.csv", "a/evict.h5", "a/summary.json",
                                       "a/points.csv", "a/timeline.csv"};
    const char *arguments = RUN "--policy h2o --budget 24 --save-evict --output a";
    kv_said said = kv_run_command(arguments);
    cr_assert_eq(said.code, 0, "%s", said.err);
    for (size_t i = 0; i < sizeof lost / sizeof *lost; i++) {
        cr_assert_eq(unlink(at(lost[i])), 0, "%s", lost[i]);
        said = kv_run_command(arguments);
        cr_expect_eq(said.code, 0, "%s: %s", lost[i], said.err);
        cr_expect_null(strstr(said.err, "run before"), "%s: %s", lost[i], said.err);
        cr_expect_eq(access(at(lost[i]), R_OK), 0, "%s is not there again", lost[i]);
    }
    said = kv_run_command(arguments);
    cr_expect(strstr(said.err, "run before"), "%s", said.err);
    cr_assert_eq(truncate(at("a/metrics.csv"), 0), 0);
    said = kv_run_command(arguments);
    cr_expect_null(strstr(said.err, "run before"), "an empty metrics.csv: %s", said.err);
}

Test(corners, a_file_beside_a_result_is_kept) {
    kv_said said = kv_run_command(RUN "--policy h2o --budget 24 --output d");
    cr_assert_eq(said.code, 0, "%s", said.err);
    FILE *f = fopen(at("d/notes.txt"), "w");
    cr_assert_not_null(f);
    fputs("precious\n", f);
    fclose(f);
    said = kv_run_command(RUN "--policy h2o --budget 25 --output d");
    cr_expect_eq(said.code, 73, "%s", said.err);
    cr_expect(strstr(said.err, "notes.txt"), "%s", said.err);
    said = kv_run_command(RUN "--policy h2o --budget 24 --output d --force");
    cr_expect_eq(said.code, 73, "%s", said.err);
    cr_expect_eq(access(at("d/notes.txt"), R_OK), 0, "a file of the user is gone");
    cr_assert_eq(unlink(at("d/notes.txt")), 0);
    cr_assert_eq(mkdir(at("d/plots"), 0777), 0);
    said = kv_run_command(RUN "--policy h2o --budget 25 --output d");
    cr_expect_eq(said.code, 0, "%s", said.err);
}

Test(corners, decisions_of_another_trace_are_refused) {
    static const struct {
        int layers, heads, tokens;
    } shape[] = {{FX_LAYER + 1, FX_KV, FX_TOKEN},
                 {FX_LAYER, FX_KV, FX_TOKEN + 1},
                 {1, FX_KV, FX_TOKEN},
                 {FX_LAYER, FX_KV + 1, FX_TOKEN},
                 {FX_LAYER, FX_KV, FX_TOKEN}};
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        const int n = shape[i].layers * shape[i].heads * shape[i].tokens;
        int32_t *e = malloc((size_t)n * sizeof *e);
        kv_evict_writer *w;
        for (int j = 0; j < n; j++) e[j] = KV_NEVER;
        cr_assert_eq(kv_evict_writer_open(at("e.h5"), &w), KV_OK, "%s", kv_error_message());
        cr_assert_eq(
            kv_evict_writer_add(w, "mine", 24, shape[i].layers, shape[i].heads, shape[i].tokens, e),
            KV_OK);
        cr_assert_eq(kv_evict_writer_close(w), KV_OK);
        kv_said said =
            kv_run_command(RUN "--policy file:path=e.h5:item=mine --budget 24 --force --output b");
        const bool fits = i == 4;
        cr_expect_eq(said.code, fits ? 0 : 65, "case %zu: %s", i, said.err);
        cr_expect(fits || (strstr(said.err, "e.h5") && strstr(said.err, "t.h5")), "%s", said.err);
        free(e);
    }
}

Test(corners, inspect_refuses_decisions_that_the_replay_refuses) {
    static const mutation damage[] = {
        {.kind = SOFT_LINK, .object = "/evict_at/h2o/b24"},
        {.kind = MAKE_GROUP, .object = "/evict_at/h2o/b24"},
        {.kind = REPLACE, .object = "/evict_at/h2o/b24", .type = F32, .dim = {2, 2, 4}},
        {.kind = REPLACE, .object = "/evict_at/h2o/b24", .type = I32, .dim = {2, 4}}};
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        kv_said said =
            kv_run_command(RUN "--policy h2o --budget 24 --save-evict --output a --force");
        cr_assert_eq(said.code, 0, "%s", said.err);
        said = kv_run_command("inspect --deep a/evict.h5");
        cr_assert_eq(said.code, 0, "%s", said.err);
        cr_assert_eq(mutate(at("a/evict.h5"), &damage[i]), 0, "case %zu", i);
        said = kv_run_command("inspect a/evict.h5");
        cr_expect_eq(said.code, 65, "case %zu: %d %s", i, said.code, said.err);
        cr_expect(strstr(said.err, "/evict_at/h2o/b24"), "%s", said.err);
        said = kv_run_command(RUN "--policy file:path=a/evict.h5:item=h2o --budget 24 --output b");
        cr_expect_eq(said.code, 65, "case %zu: %d %s", i, said.code, said.err);
    }
}

/* recall_by_kind of a run on t.h5, in *summary. */
static const json_t *recall_by_kind(json_t **summary) {
    const kv_said said = kv_run_command(RUN "--policy streaming --budget 24 --output a");
    cr_assert_eq(said.code, 0, "%s", said.err);
    *summary = kv_load_json("a/summary.json");
    return json_object_get(json_array_get(json_object_get(*summary, "results"), 0),
                           "recall_by_kind");
}

/* Names that are no UTF-8 or stand twice give way to the number of the kind. */
Test(corners, every_kind_has_a_key) {
    cr_assert_eq(mutate(at("t.h5"), &(mutation){.kind = SET_TEXT,
                                                .object = "/requests/r00000/kind",
                                                .name = "flag_meanings",
                                                .text = "one \xff\xfe two two five six seven"}),
                 0);
    json_t *s;
    const json_t *kinds = recall_by_kind(&s);
    static const char *const key[] = {"one", "1", "two", "3", "five", "six", "seven"};
    cr_expect_eq(json_object_size(kinds), 7);
    for (size_t i = 0; i < 7; i++)
        cr_expect(json_object_get(kinds, key[i]), "recall_by_kind lacks %s", key[i]);
    json_decref(s);
}

/* The last token is never far, so nothing of its kind can be kept or missed. */
Test(corners, a_kind_without_far_tokens_is_null) {
    cr_assert_eq(mutate(at("t.h5"), &(mutation){.kind = WRITE,
                                                .object = "/requests/r00000/kind",
                                                .index = FX_TOKEN - 1,
                                                .number = 200}),
                 0);
    json_t *s;
    const json_t *kinds = recall_by_kind(&s);
    cr_expect_eq(json_object_size(kinds), 8);
    cr_expect(json_is_null(json_object_get(kinds, "200")));
    cr_expect(json_is_number(json_object_get(kinds, "filler")));
    json_decref(s);
}

Test(corners, positions_that_fall_are_told) {
    kv_said said = kv_run_command(RUN "--policy h2o --budget 24 --output a");
    cr_expect_null(strstr(said.err, "position"), "%s", said.err);
    cr_assert_eq(mutate(at("t.h5"), &(mutation){.kind = WRITE,
                                                .object = "/requests/r00000/position",
                                                .index = 10,
                                                .number = 3}),
                 0);
    said = kv_run_command(RUN "--policy h2o --budget 24 --output b");
    cr_expect_eq(said.code, 0, "%s", said.err);
    cr_expect(strstr(said.err, "position is 3 at token 10 and 14 before it"), "%s", said.err);
    said = kv_run_command("inspect --deep t.h5");
    cr_expect_eq(said.code, 65, "%s", said.err);
}

Test(corners, the_largest_window_and_budget) {
    static const char *const policy[] = {"h2o", "tova", "oracle", "streaming:pos=cache", "random"};
    for (size_t i = 0; i < sizeof policy / sizeof *policy; i++) {
        char command[256];
        snprintf(
            command, sizeof command,
            "experiment --trace t.h5 --sinks 0 --window 1073741824 --budget 1073741824 --policy "
            "%s --output a --force",
            policy[i]);
        const kv_said said = kv_run_command(command);
        cr_expect_eq(said.code, 0, "%s: %d, %s", policy[i], said.code, said.err);
    }
}

Test(corners, requests_are_brought_to_one_numbering_of_kinds) {
    static const char *const standard[] = {"special",   "value",  "scratch", "name",
                                           "structure", "filler", "equation"};
    kv_trace *t = NULL;
    uint8_t before[FX_TOKEN];
    cr_assert_eq(kv_trace_open(at("t.h5"), &t), KV_OK, "%s", kv_error_message());
    memcpy(before, kv_trace_get(t)->kind, sizeof before);
    kv_trace_close(t);
    cr_assert_eq(mutate(at("t.h5"), &(mutation){.kind = COPY_REQUEST, .name = "early"}), 0);
    cr_assert_eq(mutate(at("t.h5"), &(mutation){.kind = SET_TEXT,
                                                .object = "/requests/early/kind",
                                                .name = "flag_meanings",
                                                .text = "equation value special user a b c"}),
                 0);
    cr_assert_eq(kv_trace_open(at("t.h5"), &t), KV_OK, "%s", kv_error_message());
    const kv_trace_info *i = kv_trace_get(t);
    cr_expect_eq(i->n_kind_name,
                 11); /* seven of the first request, scratch name structure filler */
    cr_expect_str_eq(i->kind_name[3], "user");
    for (int x = 0; x < FX_TOKEN; x++) {
        cr_expect_eq(i->kind[x], before[x], "the first request keeps its numbers");
        cr_expect_str_eq(i->kind_name[i->kind[FX_TOKEN + x]], standard[before[x]], "token %d", x);
    }
    kv_trace_close(t);
}

Test(corners, a_corpus_without_a_seed_is_not_trained_on_unasked) {
    const char *path[] = {at("t.h5")};
    kv_train_set set;
    cr_assert_eq(kv_train_set_open(path, 1, 0, false, &set), KV_OK, "%s", kv_error_message());
    kv_train_set_free(&set);
    cr_assert_eq(
        mutate(path[0],
               &(mutation){.kind = DROP_ATTRIBUTE, .object = "/requests/r00000", .name = "seed"}),
        0);
    cr_expect_eq(kv_train_set_open(path, 1, 0, false, &set), KV_E_USAGE);
    cr_expect(strstr(kv_error_message(), "t.h5") && strstr(kv_error_message(), "--force"), "%s",
              kv_error_message());
    cr_expect_eq(kv_train_set_open(path, 1, 1, false, &set), KV_OK, "a held-out trace may be any");
    kv_train_set_free(&set);
    cr_expect_eq(kv_train_set_open(path, 1, 0, true, &set), KV_OK, "%s", kv_error_message());
    kv_train_set_free(&set);
}

/* Documents of 107, 100 and 93 tokens: the arrays of each have its own length, not the trace's. */
Test(corners, a_cached_document_takes_the_room_of_its_own_tokens) {
    const off_t longest = 107, header = 128, most = FX_Q * longest * FX_DIM * 4 + header;
    char command[512];
    int n = 0;
    kv_said said = kv_run_command(RUN "--policy oracle --budget 24 --output e");
    cr_assert_eq(said.code, 0, "%s", said.err);
    snprintf(command, sizeof command, "find %s/results/cache -type f -printf '%%s\\n'", place);
    FILE *f = popen(command, "r");
    cr_assert_not_null(f);
    for (long size; fscanf(f, "%ld", &size) == 1; n++)
        cr_expect_leq(size, most, "a cached file of %ld bytes", size);
    pclose(f);
    cr_expect_geq(n, 3 * FX_LAYER);
}

Test(corners, the_cache_gives_its_fresh_files_back) {
    int32_t *x = calloc(100, sizeof *x), *y = NULL;
    x[99] = 7;
    kv_cached out = {.name = "x",
                     .key = {1, 2},
                     .n_array = 1,
                     .array = {(void **)&x},
                     .bytes = {400}},
              in = out;
    in.array[0] = (void **)&y;
    kv_cache_store(at("cache"), &out);
    cr_assert(kv_cache_load(at("cache"), &in), "is less than 256 MiB of the disk free?");
    cr_expect_eq(y[99], 7);
    cr_expect_eq(kv_cache_drop_fresh(), 1);
    cr_expect_eq(kv_cache_drop_fresh(), 0);
    cr_expect(!kv_cache_load(at("cache"), &in));
    free(x);
    free(y);
}
