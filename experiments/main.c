/* kvlab: the command line. Dispatches to cmd_*.c, turns a status into one message and an exit code. */
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "experiments/cli.h"
#include "experiments/version.h"
#include "reference/core/log.h"
#include "reference/model.h"

typedef struct command {
    const char *name, *summary;
    kv_status (*run)(int argc, char **argv);
} command;

static const command commands[] = {
    {"record", "model + tokens, or the built-in corpus -> trace", kv_cmd_record},
    {"experiment", "trace x policies x budgets -> table, results folder", kv_cmd_experiment},
    {"train", "traces -> weights of a learned policy", kv_cmd_train},
    {"evaluate", "model + policy -> token accuracy, agreement, KL", kv_cmd_evaluate},
    {"verify", "GPU against CPU, operation by operation and policy by policy", kv_cmd_verify},
    {"bench", "time of every kernel, as a ratio to this machine's ceiling", kv_cmd_bench},
    {"inspect", "what a trace holds, and whether it is sound", kv_cmd_inspect},
    {"policies", "list of policies with their parameters", kv_cmd_policies},
};
enum { COMMANDS = sizeof commands / sizeof *commands };

static const char help_text[] =
    "kvlab replays recorded attention through KV-cache eviction policies and says what each lost.\n"
    "\n"
    "Usage: kvlab COMMAND [OPTION...]        kvlab COMMAND --help explains one command\n"
    "\n";
static const char help_example[] =
    "\n"
    "First steps:\n"
    "  kvlab record --model traces/model --corpus reasoning --length 4096 --seed 1 --output t.h5\n"
    "  kvlab experiment --trace t.h5 --policy streaming,h2o,oracle:power=2 --budget 512,0.25\n"
    "\n"
    "Exit codes: 0 success, 1 numbers differ, 64 wrong arguments, 65 bad trace or weights,\n"
    "66 input missing, 69 no GPU or feature, 70 internal error, 73 cannot create output,\n"
    "74 read or write failed, 130 interrupted.\n";

static void print_help(FILE *to) {
    fputs(help_text, to);
    for (int i = 0; i < COMMANDS; i++)
        fprintf(to, "  %-12s %s\n", commands[i].name, commands[i].summary);
    fputs(help_example, to);
}

/* Work looks for an interrupt within a block of attention or a training step. What has not ended after ten minutes hangs, as OpenBLAS
 * does when memory is short: the alarm ends it. */
static void on_interrupt(int signal_number) {
    enum { SECONDS = 600 };
    (void)signal_number;
    alarm(SECONDS);
    kv_interrupt_request();
}

/* The first Ctrl-C unwinds in order; a second one ends the process at once. A closed terminal counts as Ctrl-C, unless nohup asked to
 * go on. A reader of messages that leaves (2>&1 | head) must not end a run half-way. */
static void catch_interrupts(void) {
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND}, before;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    if (sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file at its size limit is a failed write, with a message */
}

/* A stream that the caller closed (>&-) leaves its number to the next file opened, and messages would be written into that one. What
 * is opened here instead refuses writing. */
static void occupy_closed_streams(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDONLY) < 0) return;
}

/* `kvlab ... | head` ends like other filters do: silently, by SIGPIPE. */
static kv_status finish_output(void) {
    struct pollfd out = {.fd = STDOUT_FILENO, .events = POLLOUT};
    bool failed = fflush(stdout) != 0;
    if (!failed && !ferror(stdout)) return KV_OK;
    if (poll(&out, 1, 0) > 0 && out.revents & POLLERR) {
        signal(SIGPIPE, SIG_DFL);
        raise(SIGPIPE);
    }
    return KV_FAIL(KV_E_IO, "cannot write to standard output");
}

/* OpenBLAS chooses its kernels while the program loads, so a better choice needs a fresh process (kv_blas_better_core). */
static void restart_with_better_blas(char **argv) {
    const char *core = getenv("KV_BLAS_CORRECTED") ? NULL : kv_blas_better_core();
    if (!core) return;
    if (setenv("KV_BLAS_CORRECTED", kv_blas_core(), 1) || setenv("OPENBLAS_CORETYPE", core, 1))
        return;
    execv("/proc/self/exe", argv);
    kv_log(KV_LOG_WARN, "main", "cannot restart with OPENBLAS_CORETYPE=%s: model runs are slow",
           core);
}

static kv_status dispatch(int argc, char **argv) {
    char title[64], names[256] = "";
    for (int i = 0; i < COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name) == 0) {
            snprintf(title, sizeof title, "kvlab %s", commands[i].name);
            argv[1] = title;
            return commands[i].run(argc - 1, argv + 1);
        }
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "", commands[i].name);
    }
    return KV_FAIL(KV_E_USAGE, "unknown command '%s'; commands: %s", argv[1], names);
}

int main(int argc, char **argv) {
    kv_status st;
    occupy_closed_streams();
    kv_cli_remember(argc, argv);
    argp_program_version = kv_version_text();
    if (argc < 2) {
        print_help(stderr);
        return -KV_E_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-?") || !strcmp(argv[1], "help")) {
        print_help(stdout);
        return 0;
    }
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V")) {
        puts(kv_version_text());
        return 0;
    }
    restart_with_better_blas(argv);
    catch_interrupts();
    st = dispatch(argc, argv);
    if (st == KV_OK) st = finish_output();
    if (st == KV_OK) return 0;
    fflush(stdout);
    fprintf(stderr, "kvlab: error: %s\n", kv_error_message());
    if (kv_log_get_level() >= KV_LOG_DEBUG) fprintf(stderr, "  at %s\n", kv_error_where());
    return -st;
}
