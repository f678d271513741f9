/* The command line as users and scripts see it: exit codes, messages, nothing half-written, reuse of finished runs. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <hdf5.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests/naive/run_kvlab.h"
#include "tests/naive/small_trace.h"
#include "traces/safetensors.h"

static const char *place;

static void path_in(const char *name, char *out, size_t size) {
    snprintf(out, size, "%s/%s", place, name);
}

static void write_trace(const char *name) {
    small_trace *f = malloc(sizeof *f);
    char path[128];
    path_in(name, path, sizeof path);
    small_trace_make(f);
    cr_assert_eq(small_trace_write(f, path), KV_OK, "%s", kv_error_message());
    free(f);
}

static void open_place(void) {
    place = kv_playground_open();
    cr_assert_not_null(place);
    write_trace("t.h5");
}

static void close_place(void) { kv_playground_close(); }

TestSuite(cli, .init = open_place, .fini = close_place);

/* Text attribute `name` of the root group gets another value of the same size. */
static void set_version(const char *file, const char *text) {
    char path[128];
    path_in(file, path, sizeof path);
    hid_t f = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT), a = H5Aopen(f, "Conventions", H5P_DEFAULT);
    hid_t type = H5Aget_type(a);
    char *value = calloc(1, H5Tget_size(type) + 1);
    snprintf(value, H5Tget_size(type) + 1, "%s", text);
    cr_assert(H5Awrite(a, type, value) >= 0);
    free(value);
    H5Tclose(type);
    H5Aclose(a);
    H5Fclose(f);
}

static void write_weights(const char *file, const char *window, const char *reduce) {
    static const float w1[2 * 4 * 2 * FX_DIM], v[2 * 4], theta[2];
    char path[128];
    kv_tensor_out tensor[8];
    char names[8][64];
    int n = 0;
    for (int l = 1; l <= 4; l += 3) {
        static const char *const part[] = {"mlp.w1", "mlp.b1", "mlp.w2", "theta"};
        for (int i = 0; i < 4; i++, n++) {
            snprintf(names[n], sizeof names[n], "layers.%d.%s", l, part[i]);
            tensor[n] = (kv_tensor_out){names[n], 2, {2, 4}, v};
            if (i == 0) tensor[n] = (kv_tensor_out){names[n], 3, {2, 4, 2 * FX_DIM}, w1};
            if (i == 3) tensor[n] = (kv_tensor_out){names[n], 1, {2}, theta};
        }
    }
    const char *const meta[] = {"policy",
                                "kvpop_mlp",
                                "budget",
                                "32",
                                "sinks",
                                "2",
                                "window",
                                window,
                                "target_power",
                                "2",
                                "target_reduce",
                                reduce,
                                "lse",
                                "dense",
                                "delay",
                                "0",
                                NULL};
    path_in(file, path, sizeof path);
    cr_assert_eq(kv_safetensors_write(path, tensor, n, meta), KV_OK, "%s", kv_error_message());
}

#define RUN "experiment --sinks 2 --window 8 "

static const struct {
    const char *arguments;
    int code;
    const char *says; /* somewhere on stderr */
} bad[] = {
    {"", 64, "Usage"},
    {"dance", 64, "unknown command"},
    {"experiment --no-such-option", 64, "unrecognized option"},
    {"experiment extra --trace t.h5 --policy full --budget 32", 64, "arguments"},
    {"experiment", 64, "--trace is missing"},
    {"experiment --trace t.h5 --policy full", 64, "--budget is missing"},
    {RUN "--trace missing.h5 --policy full --budget 32", 66, "missing.h5"},
    {RUN "--trace short.h5 --policy full --budget 32", 65, "short.h5"},
    {RUN "--trace text.h5 --policy full --budget 32", 65, "text.h5"},
    {RUN "--trace version.h5 --policy full --budget 32", 65, "KVTRACE"},
    {RUN "--trace t.h5 --policy full --budget 0", 64, "--budget"},
    {RUN "--trace t.h5 --policy full --budget 9", 64, "--window"},
    {RUN "--trace t.h5 --policy full --budget -5", 64, "--budget"},
    {RUN "--trace t.h5 --policy full --budget 1.5", 64, "fraction"},
    {RUN "--trace t.h5 --policy full --budget 0.0", 64, "fraction"},
    {RUN "--trace t.h5 --policy full --budget 2e0", 64, "fraction"},
    {RUN "--trace t.h5 --policy full --budget 2048x", 64, "2048x"},
    {RUN "--trace t.h5 --policy full --budget +32", 64, "+32"},
    {RUN "--trace t.h5 --policy full --budget 32,", 64, "--budget"},
    {RUN "--trace t.h5 --policy full --budget 99999999999", 64, "--budget"},
    {RUN "--trace t.h5 --policy full --budget 1073741825", 64, "1073741824"},
    {RUN "--trace t.h5 --policy full --budget nan", 64, "nan"},
    {RUN "--trace t.h5 --policy full --budget 0x20", 64, "0x20"},
    {RUN "--trace t.h5 --policy full --budget 0.05", 64, "--budget"},
    {"experiment --window 0 --trace t.h5 --policy full --budget 32", 64, "--window"},
    {"experiment --sinks -1 --trace t.h5 --policy full --budget 32", 64, "--sinks"},
    {RUN "--trace t.h5 --policy fool --budget 32", 64, "oracle_step"},
    {"verify --only fool", 64, "oracle step"},
    {RUN "--trace t.h5 --policy full,,tova --budget 32", 64, "there is no policy"},
    {RUN "--trace t.h5 --policy h2o:share=1 --budget 32", 64, "recent_share"},
    {RUN "--trace t.h5 --policy h2o:recent_share=2 --budget 32", 64, "[0, 1]"},
    {RUN "--trace t.h5 --policy h2o:recent_share --budget 32", 64, "key=value"},
    {RUN "--trace t.h5 --policy oracle:power=0 --budget 32", 64, "power"},
    {RUN "--trace t.h5 --policy full --budget 32 --set nonsense", 64, "--set"},
    {RUN "--trace t.h5 --policy full --budget 32 --set run.eps=-1", 64, "eps"},
    {RUN "--trace t.h5 --policy full --budget 32 --set run.speed=1", 64, "speed"},
    {RUN "--trace t.h5 --policy full --budget 32 --seed x", 64, "--seed"},
    {RUN "--trace t.h5 --policy full --budget 32 --threads 0", 64, "--threads"},
    {RUN "--trace t.h5 --policy full --budget 32 --device tpu", 64, "tpu"},
    {RUN "--trace t.h5 --policy full --budget 32 --output /dev/null/x", 73, "/dev/null"},
    {RUN "--trace t.h5 --policy full --budget 32 --output t.h5", 73, "t.h5"},
    {RUN "--trace t.h5 --policy file:path=none.h5 --budget 32", 66, "none.h5"},
    {RUN "--trace t.h5 --policy kvpop_mlp --weights kvpop_mlp=none --budget 32", 66, "none"},
    {RUN "--trace t.h5 --policy kvpop_mlp --weights kvpop_mlp=w9.st --budget 32", 65, "window"},
    {RUN "--trace t.h5 --policy kvpop_mlp --weights kvpop_mlp=w8.st --budget 32", 65, "layers"},
    {RUN "--trace t.h5 --policy kvpop_mlp --weights kvpop_mlp=median.st --budget 32", 65, "median"},
    {RUN "--trace t.h5 --policy full --budget 32 --weights full=w8.st", 64, "no weights"},
    {RUN "--trace t.h5 --policy full --budget 32 --weights w8.st", 64, "POLICY=FILE"},
    {RUN "--trace t.h5 --policy full --budget 32 --config missing.ini", 66, "missing.ini"},
    {RUN "--trace t.h5 --policy full --budget 32 --config key.ini", 64, "key.ini:3"},
    {RUN "--trace t.h5 --policy full --budget 32 --config section.ini", 64, "section.ini:2"},
    {RUN "--trace t.h5 --policy full --budget 32 --config value.ini", 64, "value.ini:2"},
    {RUN "--trace t.h5 --policy full --budget 32 --config syntax.ini", 64, "syntax.ini:1"},
    {"evaluate --trace t.h5 --policy full --budget 300", 64, "--model is missing"},
    {"evaluate --trace t.h5 --policy full --budget 300 --model nowhere", 66, "nowhere"},
    {"policies nothing", 64, "streaming"},
    {"inspect missing.h5", 66, "missing.h5"},
};

static void write_file(const char *name, const char *text) {
    char path[128];
    path_in(name, path, sizeof path);
    FILE *f = fopen(path, "w");
    cr_assert_not_null(f);
    fputs(text, f);
    fclose(f);
}

/* Folders below results/experiment, hidden and temporary ones included. */
static int count_runs(void) {
    char path[128];
    int n = 0;
    path_in("results/experiment", path, sizeof path);
    DIR *dir = opendir(path);
    for (struct dirent *e; dir && (e = readdir(dir));)
        n += strcmp(e->d_name, ".") && strcmp(e->d_name, "..");
    if (dir) closedir(dir);
    return n;
}

Test(cli, bad_input_ends_with_its_code_and_one_message) {
    char path[128];
    write_trace("short.h5");
    path_in("short.h5", path, sizeof path);
    struct stat info;
    cr_assert_eq(stat(path, &info), 0);
    cr_assert_eq(truncate(path, info.st_size / 2), 0);
    write_file("text.h5", "this is no HDF5 file\n");
    write_trace("version.h5");
    set_version("version.h5", "KVTRACE-2.0");
    write_weights("w9.st", "9", "max");
    write_weights("w8.st", "8", "max");
    write_weights("median.st", "8", "median");
    write_file("key.ini", "[run]\nsinks = 2\nspeed = 3\n");
    write_file("section.ini", "[walk]\nsinks = 2\n");
    write_file("value.ini", "[policy.h2o]\nrecent_share = 3\n");
    write_file("syntax.ini", "what is this\n");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kv_said said = kv_run_command(bad[i].arguments);
        cr_expect_eq(said.code, bad[i].code, "kvlab %s: exit %d, expected %d; stderr: %s",
                     bad[i].arguments, said.code, bad[i].code, said.err);
        cr_expect(strstr(said.err, bad[i].says), "kvlab %s: stderr lacks '%s': %s",
                  bad[i].arguments, bad[i].says, said.err);
        const char *first = strstr(said.err, "kvlab: error: ");
        cr_expect(!first || !strstr(first + 1, "kvlab: error: "), "kvlab %s: two errors: %s",
                  bad[i].arguments, said.err);
    }
    cr_expect_eq(count_runs(), 0, "a failed command left results behind");
    kv_said said =
        kv_run_command(RUN "--trace t.h5 --policy full --budget 32 --device gpu --output g");
    cr_expect(said.code == 0 || (said.code == 69 && strstr(said.err, "kvlab: error: ")),
              "--device gpu: exit %d, expected 0 with a GPU, 69 without: %s", said.code, said.err);
}

static void interrupt_with(int signal_number) {
    static char arguments[8192];
    size_t used =
        (size_t)snprintf(arguments, sizeof arguments,
                         RUN "--trace t.h5 --policy tova,h2o,cumulative,oracle,keydiff,"
                             "knorm,random,streaming,oracle_exact,oracle:power=2 --budget 12");
    for (int b = 13; b < 105; b++)
        used += (size_t)snprintf(arguments + used, sizeof arguments - used, ",%d", b);
    pid_t pid = kv_start_command(arguments);
    cr_assert(pid > 0);
    for (int i = 0; i < 500 && count_runs() == 0; i++)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    cr_assert_eq(count_runs(), 1, "the run did not start");
    kill(pid, signal_number);
    kv_said said = kv_wait_command(pid);
    cr_expect_eq(said.code, 130, "signal %d: exit %d: %s", signal_number, said.code, said.err);
    cr_expect(strstr(said.err, "interrupted"), "signal %d: %s", signal_number, said.err);
    cr_expect_eq(count_runs(), 0, "signal %d: something was left in results/experiment",
                 signal_number);
}

Test(cli, interrupt_leaves_nothing) {
    signal(SIGHUP, SIG_DFL); /* under nohup kvlab rightly goes on */
    interrupt_with(SIGINT);
    interrupt_with(SIGHUP);
}

/* The folder that a run names in its last line. */
static void folder_of(const kv_said *said, char *out, size_t size) {
    const char *at = strstr(said->out, "results: ");
    cr_assert_not_null(at, "%s%s", said->out, said->err);
    at += strlen("results: ");
    snprintf(out, size, "%.*s", (int)strcspn(at, " "), at);
    char *name = strstr(out, "/summary.json");
    if (name) *name = '\0';
}

static json_t *summary_without_seconds(const char *folder) {
    char path[256];
    size_t i;
    json_t *row;
    snprintf(path, sizeof path, "%s/summary.json", folder);
    json_t *s = kv_load_json(path);
    cr_assert_not_null(s, "%s", path);
    json_array_foreach(json_object_get(s, "results"), i, row) json_object_del(row, "seconds");
    return s;
}

static struct timespec written(const char *folder) {
    char path[512], name[256];
    struct stat info;
    snprintf(name, sizeof name, "%s/summary.json", folder);
    path_in(name, path, sizeof path);
    cr_assert_eq(stat(path, &info), 0, "%s", path);
    return info.st_mtim;
}

/* What happens to each file of the cache of dense results. */
static void spoil_cache(bool remove_it) {
    char folder[128], file[512];
    path_in("results/cache", folder, sizeof folder);
    DIR *dir = opendir(folder);
    cr_assert_not_null(dir);
    for (struct dirent *e; (e = readdir(dir));) {
        if (e->d_type != DT_REG) continue;
        snprintf(file, sizeof file, "%s/%s", folder, e->d_name);
        if (remove_it) {
            cr_assert_eq(unlink(file), 0);
            continue;
        }
        FILE *f = fopen(file, "r+"); /* a flipped bit: the file is ignored */
        cr_assert_not_null(f);
        fseek(f, -1, SEEK_END);
        int c = fgetc(f);
        fseek(f, -1, SEEK_END);
        fputc(c ^ 1, f);
        fclose(f);
    }
    closedir(dir);
}

Test(cli, threads_and_cache_do_not_change_a_byte) {
    static const struct {
        int threads;
        const char *folder, *before; /* `before`: another run, after the cache was emptied */
    } how[] = {{1, "a", NULL},
               {2, "b", NULL},
               {2, "c", ""}, /* cache spoilt */
               {1, "d", RUN "--trace t.h5 --policy oracle:power=3 --budget 20 --output x"},
               {1, "e", "experiment --sinks 1 --window 5 --trace t.h5 --policy h2o --budget 20"}};
    json_t *first = NULL;
    for (size_t i = 0; i < sizeof how / sizeof *how; i++) {
        char arguments[512];
        if (how[i].before) spoil_cache(how[i].before[0] != '\0');
        if (how[i].before && how[i].before[0]) {
            kv_said other = kv_run_command(how[i].before);
            cr_assert_eq(other.code, 0, "%s", other.err);
        }
        snprintf(
            arguments, sizeof arguments,
            RUN
            "--trace t.h5 --policy tova,tova:reduce=head,h2o,cumulative,random,keydiff,knorm,full,"
            "streaming:pos=cache,oracle,oracle:power=3,oracle_step,oracle_exact "
            "--budget 20,40 --threads %d --output %s",
            how[i].threads, how[i].folder);
        kv_said said = kv_run_command(arguments);
        cr_assert_eq(said.code, 0, "%s", said.err);
        json_t *s = summary_without_seconds(how[i].folder);
        if (first)
            cr_expect(json_equal(first, s), "run %s gives other numbers than run a", how[i].folder);
        else
            first = json_incref(s);
        json_decref(s);
    }
    json_decref(first);
}

Test(cli, finished_runs_are_reused_unless_forced) {
    char folder[256], again[256];
    const char *arguments = RUN "--trace t.h5 --policy h2o --budget 24";
    kv_said said = kv_run_command(arguments);
    cr_assert_eq(said.code, 0, "%s", said.err);
    folder_of(&said, folder, sizeof folder);
    struct timespec before = written(folder);
    kv_said reused = kv_run_command(arguments);
    cr_expect_eq(reused.code, 0, "%s", reused.err);
    cr_expect_str_eq(reused.out, said.out, "a reused run prints another table");
    struct timespec after = written(folder);
    cr_expect(before.tv_sec == after.tv_sec && before.tv_nsec == after.tv_nsec, "it ran again");
    said = kv_run_command(RUN "--trace t.h5 --policy h2o --budget 24 --force");
    cr_expect_eq(said.code, 0, "%s", said.err);
    after = written(folder);
    cr_expect(before.tv_sec != after.tv_sec || before.tv_nsec != after.tv_nsec,
              "--force: no new run");
    said = kv_run_command(RUN "--trace t.h5 --policy h2o --budget 24 --seed 2");
    folder_of(&said, again, sizeof again);
    cr_expect_str_neq(folder, again, "another seed is another run");
    said = kv_run_command(RUN "--trace t.h5 --policy h2o --budget 24 --output mine");
    cr_expect_eq(said.code, 0, "%s", said.err);
    said = kv_run_command(RUN "--trace t.h5 --policy tova --budget 24 --output mine");
    cr_expect_eq(said.code, 0, "an older result in --output is replaced: %s", said.err);
    json_t *s = summary_without_seconds("mine");
    cr_expect_str_eq(json_string_value(json_object_get(
                         json_array_get(json_object_get(s, "results"), 0), "policy")),
                     "tova");
    json_decref(s);
}

static const json_t *row(const json_t *summary, size_t i) {
    return json_array_get(json_object_get(summary, "results"), i);
}

static const char *variant(const json_t *summary, size_t i) {
    return json_string_value(json_object_get(row(summary, i), "variant"));
}

static json_int_t budget(const json_t *summary, size_t i) {
    return json_integer_value(json_object_get(row(summary, i), "budget"));
}

Test(cli, settings_come_from_defaults_file_and_options_in_that_order) {
    write_file("e.ini", "[trace]\npath = t.h5\n[policy.oracle]\npower = 3\n[policy.h2o]\n"
                        "recent_share = 0.25\nreduce = mean\n[sweep]\npolicies = oracle,\n    h2o\n"
                        "budgets = 24\n[run]\nsinks = 2\nwindow = 8\nname = mine\n");
    kv_said said = kv_run_command("experiment --config e.ini --output a");
    cr_assert_eq(said.code, 0, "%s", said.err);
    json_t *s = summary_without_seconds("a");
    cr_expect_eq(json_array_size(json_object_get(s, "results")), 2);
    cr_expect_str_eq(variant(s, 0), "power=3");
    cr_expect_str_eq(variant(s, 1), "recent_share=0.25:reduce=mean");
    json_decref(s);
    /* longest document 107: .25 of it is 26.75 -> 27, and 27 given twice is one row */
    said =
        kv_run_command("experiment --config e.ini --set oracle.power=2 --set run.oracle_delta=1e-3 "
                       "--policy oracle,oracle:power=1,h2o:recent_share=0.5 --budget 0.25,27 "
                       "--output b");
    cr_assert_eq(said.code, 0, "%s", said.err);
    s = summary_without_seconds("b");
    cr_expect_eq(json_array_size(json_object_get(s, "results")), 3);
    cr_expect_str_eq(variant(s, 0), "power=2", "options win over the file");
    cr_expect_str_eq(variant(s, 1), "",
                     "the item's own value wins; the built-in default has no name");
    cr_expect_str_eq(variant(s, 2), "reduce=mean", "what the file says still holds");
    cr_expect_eq(budget(s, 0), 27);
    cr_expect_eq(json_real_value(json_object_get(json_object_get(s, "params"), "oracle_delta")),
                 1e-3);
    json_decref(s);
}

Test(cli, budget_at_or_above_the_longest_document_measures_nothing) {
    kv_said said = kv_run_command(RUN "--trace t.h5 --policy h2o --budget 107,1.0,5000 --output a");
    cr_assert_eq(said.code, 0, "%s", said.err);
    cr_expect(strstr(said.out, "not below the longest document"), "%s", said.out);
    json_t *s = summary_without_seconds("a");
    cr_expect_eq(json_array_size(json_object_get(s, "results")), 2, "1.0 is 107 again");
    for (size_t i = 0; i < 2; i++) {
        cr_expect_eq(json_integer_value(json_object_get(row(s, i), "n_counted")), 0);
        cr_expect(json_is_null(json_object_get(row(s, i), "recall_mean")));
        cr_expect(json_is_null(json_object_get(row(s, i), "output_error")));
        cr_expect(json_is_null(json_object_get(row(s, i), "kept_mean")));
        cr_expect_eq(json_integer_value(json_object_get(row(s, i), "kept_max")), 107);
    }
    json_decref(s);
}

Test(cli, help_and_lists) {
    static const char *const commands[] = {"record", "experiment", "train",   "evaluate",
                                           "verify", "bench",      "inspect", "policies"};
    kv_said said = kv_run_command("--help");
    cr_expect_eq(said.code, 0);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        char arguments[64];
        cr_expect(strstr(said.out, commands[i]), "--help lacks %s", commands[i]);
        snprintf(arguments, sizeof arguments, "%s --help", commands[i]);
        kv_said help = kv_run_command(arguments);
        cr_expect_eq(help.code, 0, "kvlab %s: exit %d", arguments, help.code);
        cr_expect(strstr(help.out, "xample"), "kvlab %s gives no example", arguments);
    }
    said = kv_run_command("--version");
    cr_expect_eq(said.code, 0);
    cr_expect(strstr(said.out, "kvlab "), "%s", said.out);
    said = kv_run_command("policies");
    cr_expect_eq(said.code, 0);
    cr_expect(strstr(said.out, "h2o") && !strstr(said.out, "recent_share"), "%s", said.out);
    said = kv_run_command("policies -v");
    cr_expect(strstr(said.out, "recent_share=0.5") && strstr(said.out, "tova"), "%s", said.out);
    said = kv_run_command("policies h2o");
    cr_expect(strstr(said.out, "recent_share=0.5") && !strstr(said.out, "tova"), "%s", said.out);
    said = kv_run_command("policies --quiet h2o,tova");
    cr_expect(said.code == 0 && !said.out[0], "%s", said.out);
}
