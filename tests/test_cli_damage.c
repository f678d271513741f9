/* The command line among damaged and foreign files: nothing of others is deleted, nothing damaged is believed. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/naive/run_kvlab.h"
#include "tests/naive/small_trace.h"
#include "traces/safetensors.h"
#include "traces/trace.h"

#define RUN "experiment --sinks 2 --window 8 --trace t.h5 --policy streaming "

static void open_place(void) {
    const char *place = kv_playground_open();
    small_trace *f = malloc(sizeof *f);
    cr_assert_not_null(place);
    cr_assert_eq(chdir(place), 0);
    small_trace_make(f);
    cr_assert_eq(small_trace_write(f, "t.h5"), KV_OK, "%s", kv_error_message());
    free(f);
}

static void close_place(void) {
    cr_assert_eq(chdir("/"), 0);
    kv_playground_close();
}

TestSuite(cli_damage, .init = open_place, .fini = close_place);

static void put_text(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    cr_assert_not_null(f, "%s", path);
    fputs(text, f);
    fclose(f);
}

static void expect(const char *arguments, int code, const char *says) {
    kv_said said = kv_run_command(arguments);
    cr_expect_eq(said.code, code, "kvlab %.100s: exit %d, expected %d: %s", arguments, said.code,
                 code, said.err);
    cr_expect(strstr(said.err, says), "kvlab %.100s: '%s' is not in: %s", arguments, says,
              said.err);
}

Test(cli_damage, budgets_hold_no_blank_on_the_command_line) {
    static const char *const budget[] = {"' 32'", "'32 '", "'32, 40'", "'\t32'", "'0.5 '"};
    char arguments[256];
    for (size_t i = 0; i < sizeof budget / sizeof *budget; i++) {
        snprintf(arguments, sizeof arguments, RUN "--output o --budget %s", budget[i]);
        expect(arguments, 64, "blank");
    }
    put_text("blank.ini", "[sweep]\nbudgets = 32 , 40\n");
    expect(RUN "--output o --config blank.ini", 0, "");
}

Test(cli_damage, config_files_that_cannot_be_read) {
    char text[1024] = "[run]\nname = ";
    memset(text + strlen(text), 'x', 900);
    put_text("long.ini", text);
    expect(RUN "--budget 32 --config long.ini", 64, "long.ini:2: longer than");
    expect(RUN "--budget 32 --config .", 66, "cannot read config .");
}

Test(cli_damage, folders_of_others_are_not_replaced) {
    char arguments[6000];
    cr_assert_eq(mkdir("site", 0777), 0);
    put_text("site/manifest.json", "{\"name\": \"a web application\"}\n");
    put_text("site/index.html", "precious\n");
    expect(RUN "--budget 32 --output site", 73, "something else is there");
    cr_expect_eq(access("site/index.html", F_OK), 0, "a file of another program is gone");
    put_text("results", "a file\n");
    expect(RUN "--budget 32", 73, "Not a directory");
    size_t n = (size_t)snprintf(arguments, sizeof arguments, RUN "--budget 32 --output ");
    for (; n < 5500; n++) arguments[n] = n % 100 ? 'y' : '/';
    arguments[n] = '\0';
    expect(arguments, 64, "longer than");
}

Test(cli_damage, a_folder_left_by_a_killed_run_is_no_obstacle) {
    char name[64];
    /* the process of the run gets one of the next ids */
    for (int i = 0; i < 40; i++) {
        snprintf(name, sizeof name, "o.tmp-%d-0", (int)getpid() + i);
        mkdir(name, 0777);
    }
    expect(RUN "--budget 32 --output o", 0, "");
    cr_expect_eq(access("o/summary.json", F_OK), 0);
}

Test(cli_damage, a_damaged_result_is_made_again) {
    static const char *const text[] = {
        "", "null", "[]", "{}", "{\"results\": \"x\"}", "{\"results\": [1]}", "{\"schema\": 1,"};
    static const char *const file[] = {"o/summary.json", "o/manifest.json"};
    const char *arguments = RUN "--budget 32 --output o";
    kv_said first = kv_run_command(arguments);
    cr_assert_eq(first.code, 0, "%s", first.err);
    const size_t row = strcspn(strstr(first.out, "streaming"), "\n") - 10; /* without seconds */
    for (size_t f = 0; f < 2; f++)
        for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
            put_text(file[f], text[i]);
            kv_said said = kv_run_command(arguments);
            const char *again = strstr(said.out, "streaming");
            cr_expect_eq(said.code, 0, "%s '%s': %s", file[f], text[i], said.err);
            cr_expect(again && strncmp(again, strstr(first.out, "streaming"), row) == 0,
                      "%s '%s': another table: %s", file[f], text[i], said.out);
        }
}

Test(cli_damage, names_that_are_not_utf8_are_written_down) {
    cr_assert_eq(rename("t.h5", "t\xff.h5"), 0);
    kv_said said = kv_run_command("experiment --sinks 2 --window 8 --trace t\xff.h5 --policy full "
                                  "--budget 32 --output o");
    cr_assert_eq(said.code, 0, "%s", said.err);
    json_t *m = kv_load_json("o/manifest.json");
    const char *trace = json_string_value(json_object_get(m, "trace"));
    cr_expect(trace && strcmp(trace, "t?.h5") == 0, "trace is %s", trace ? trace : "missing");
    cr_expect(json_object_get(m, "command_line"), "no command_line");
    json_decref(m);
}

Test(cli_damage, outputs_replace_files_only) {
    static const float x[1];
    static const char *const path[] = {"pipe", "folder", "link", "dangling", ""};
    const kv_tensor_out tensor = {"a", 1, {1}, x};
    cr_assert_eq(mkfifo("pipe", 0666), 0);
    cr_assert_eq(mkdir("folder", 0777), 0);
    cr_assert_eq(symlink("t.h5", "link"), 0);
    cr_assert_eq(symlink("nowhere", "dangling"), 0);
    for (size_t i = 0; i < sizeof path / sizeof *path; i++) {
        kv_evict_writer *w = NULL;
        cr_expect_eq(kv_evict_writer_open(path[i], &w), KV_E_CANTCREATE, "'%s'", path[i]);
        cr_expect_null(w);
        cr_expect_eq(kv_safetensors_write(path[i], &tensor, 1, NULL), KV_E_CANTCREATE, "'%s'",
                     path[i]);
        cr_expect(strstr(kv_error_message(), path[i]), "%s", kv_error_message());
    }
    struct stat info;
    cr_expect(stat("pipe", &info) == 0 && S_ISFIFO(info.st_mode), "the pipe was replaced");
    expect(RUN "--budget 32 --output folder/run", 0, "");
    cr_assert_eq(symlink("folder/run", "run"), 0);
    expect(RUN "--budget 33 --output run --force", 73, "symbolic link");
}

Test(cli_damage, names_below_results_stay_there) {
    static const char *const name[] = {"latest", "cache", "..", "../up", "a/b", ".hidden"};
    char arguments[256];
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        snprintf(arguments, sizeof arguments, RUN "--budget 32 --name %s", name[i]);
        expect(arguments, 64, "--name");
    }
    cr_expect_neq(access("results", F_OK), 0);
    expect(RUN "--budget 32 --name mine", 0, "");
    cr_expect_eq(access("results/mine", F_OK), 0);
}

static void make_old(const char *path) {
    const struct timespec then[2] = {{.tv_sec = time(NULL) - 3600}, {.tv_sec = time(NULL) - 3600}};
    cr_assert_eq(utimensat(AT_FDCWD, path, then, 0), 0, "%s", path);
}

/* What killed processes left beside an output goes when that output is made again; what lives or is fresh stays. */
Test(cli_damage, leavings_of_killed_processes_are_swept) {
    static const float x[1];
    const kv_tensor_out tensor = {"a", 1, {1}, x};
    const pid_t gone = fork();
    if (gone == 0) _exit(0);
    cr_assert_eq(waitpid(gone, NULL, 0), gone);
    char old[64], fresh[64], folder[64];
    snprintf(old, sizeof old, "w.safetensors.%d.part", (int)gone);
    snprintf(fresh, sizeof fresh, "o.h5.%d.part", (int)gone);
    snprintf(folder, sizeof folder, "o.tmp-%d-0", (int)gone);
    const char *const file[] = {old, fresh, "w.safetensors.1.part" /* lives */,
                                "w.safetensors.part", "w.safetensors.0.part"};
    for (size_t i = 0; i < sizeof file / sizeof *file; i++) put_text(file[i], "");
    cr_assert_eq(mkdir(folder, 0777), 0);
    for (size_t i = 0; i < sizeof file / sizeof *file; i++)
        if (file[i] != fresh) make_old(file[i]);
    make_old(folder);
    cr_assert_eq(kv_safetensors_write("w.safetensors", &tensor, 1, NULL), KV_OK);
    kv_evict_writer *w = NULL;
    cr_assert_eq(kv_evict_writer_open("o.h5", &w), KV_OK);
    cr_assert_eq(kv_evict_writer_close(w), KV_OK);
    expect(RUN "--budget 32 --output o", 0, "");
    cr_expect_neq(access(old, F_OK), 0, "%s is still there", old);
    cr_expect_neq(access(folder, F_OK), 0, "%s is still there", folder);
    for (size_t i = 1; i < sizeof file / sizeof *file; i++)
        cr_expect_eq(access(file[i], F_OK), 0, "%s is gone", file[i]);
}
