/* Common options, devices, and where the repository lies. */
#include "experiments/cli.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/kernels.h"
#include "reference/core/cpu.h"
#include "reference/core/log.h"
#include "reference/core/param.h"
#include "reference/core/progress.h"

enum { KEY_THREADS = 0x7000 };

typedef struct common {
    int verbose, quiet;
    const char *threads;
} common;

/* argp hands child parsers no input of their own unless the parent sets it; one parse per process makes a static simplest. */
static common chosen;

static const struct argp_option common_options[] = {
    {"quiet", 'q', NULL, 0, "No progress, no remarks: errors and the table only", 0},
    {"verbose", 'v', NULL, 0, "Say what is done (-vv: in detail)", 0},
    {"threads", KEY_THREADS, "N", 0,
     "Use N threads (default: all cores); results never depend on it", 0},
    {0},
};

static error_t parse_common(int key, char *arg, struct argp_state *state) {
    (void)state;
    switch (key) {
    case 'q': chosen.quiet = 1; return 0;
    case 'v': chosen.verbose++; return 0;
    case KEY_THREADS: chosen.threads = arg; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static kv_status apply_common(void) {
    long long threads = 0;
    if (chosen.quiet) {
        kv_log_set_level(KV_LOG_ERROR);
        kv_progress_set_quiet(1);
    } else if (chosen.verbose) {
        kv_log_set_level(chosen.verbose > 1 ? KV_LOG_DEBUG : KV_LOG_INFO);
    }
    if (!chosen.threads) return KV_OK;
    kv_status st = kv_parse_int(chosen.threads, 1, 4096, &threads);
    if (st != KV_OK) return kv_error_context(st, "--threads");
    kv_threads_set((int)threads);
    return KV_OK;
}

kv_status kv_cli_parse(const struct argp *argp, int argc, char **argv, void *input) {
    static const struct argp common_argp = {.options = common_options, .parser = parse_common};
    const struct argp_child children[] = {{&common_argp, 0, "General:", 90}, {0}};
    struct argp full = *argp;
    full.children = children;
    error_t error = argp_parse(&full, argc, argv, 0, NULL, input);
    if (error) return KV_FAIL(KV_E_INTERNAL, "reading the command line: %s", strerror(error));
    return apply_common();
}

const char *kv_cli_home(void) {
    static char home[PATH_MAX];
    if (home[0]) return home;
    ssize_t n = readlink("/proc/self/exe", home, sizeof home - 1);
    home[n > 0 ? n : 0] = '\0';
    for (char *slash; (slash = strrchr(home, '/'));) {
        char probe[PATH_MAX + 32];
        *slash = '\0';
        snprintf(probe, sizeof probe, "%s/traces/model/config.json", home);
        if (access(probe, F_OK) == 0) return home;
    }
    snprintf(home, sizeof home, ".");
    return home;
}

static char command_line[8192];

void kv_cli_remember(int argc, char **argv) {
    static const char safe[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./,:@%";
    size_t n = 0;
    for (int i = 0; i < argc && n + 8 < sizeof command_line; i++) {
        bool plain = argv[i][0] && argv[i][strspn(argv[i], safe)] == '\0';
        if (i) command_line[n++] = ' ';
        if (!plain) command_line[n++] = '\'';
        for (const char *c = argv[i]; *c && n + 8 < sizeof command_line; c++) {
            if (*c == '\'') {
                memcpy(command_line + n, "'\\'", 3);
                n += 3;
            }
            command_line[n++] = *c;
        }
        if (!plain) command_line[n++] = '\'';
    }
    command_line[n] = '\0';
}

const char *kv_cli_command_line(void) { return command_line; }

kv_status kv_cli_device(const char *name, const kv_ops **out) {
    *out = &kv_ops_cpu;
    if (strcmp(name, "cpu") == 0) return KV_OK;
    if (strcmp(name, "gpu") != 0)
        return KV_FAIL(KV_E_USAGE, "--device: '%s' is not one of cpu, gpu", name);
    return kv_gpu_ops(out);
}
