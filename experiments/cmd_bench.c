/* kvlab bench: CPU kernels and the model's forward pass, or GPU kernels. */
#include <stdio.h>

#include "experiments/bench_cpu.h"
#include "experiments/bench_gpu.h"
#include "experiments/bench_model.h"
#include "experiments/bench_replay.h"
#include "experiments/cli.h"
#include "reference/core/param.h"

typedef struct args {
    const char *length, *repeats, *model, *device;
} args;

enum { KEY_LENGTH = 0x100, KEY_REPEATS, KEY_MODEL, KEY_DEVICE };

static const struct argp_option options[] = {
    {"length", KEY_LENGTH, "N", 0, "Tokens (default 16384)", 0},
    {"repeats", KEY_REPEATS, "N", 0, "Repetitions; medians are printed (default 3)", 0},
    {"model", KEY_MODEL, "DIR", 0, "Model for the forward pass (default: the embedded one)", 0},
    {"device", KEY_DEVICE, "cpu|gpu", 0, "What to time (default cpu)", 0},
    {0},
};

static error_t parse(int key, char *arg, struct argp_state *state) {
    args *a = state->input;
    switch (key) {
    case KEY_LENGTH: a->length = arg; return 0;
    case KEY_REPEATS: a->repeats = arg; return 0;
    case KEY_MODEL: a->model = arg; return 0;
    case KEY_DEVICE: a->device = arg; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static kv_status read_count(const char *text, const char *option, long long least, int32_t *out) {
    long long n = 0;
    kv_status st = kv_parse_int(text, least, 1 << 20, &n);
    *out = (int32_t)n;
    return st == KV_OK ? st : kv_error_context(st, "--%s", option);
}

kv_status kv_cmd_bench(int argc, char **argv) {
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .doc =
            "Times the kernels on random data, each against the ceiling of this machine measured "
            "in the same run.\v"
            "Example:\n"
            "  kvlab bench --length 8192 --repeats 5"};
    kv_status st = KV_OK;
    char embedded[4200];
    int32_t length, repeats;
    const kv_ops *ops;
    snprintf(embedded, sizeof embedded, "%.4096s/traces/model", kv_cli_home());
    args a = {.length = "16384", .repeats = "3", .model = embedded, .device = "cpu"};
    KV_TRY(kv_cli_parse(&argp, argc, argv, &a));
    KV_TRY(read_count(a.length, "length", 4096, &length));
    KV_TRY(read_count(a.repeats, "repeats", 1, &repeats));
    KV_TRY(kv_cli_device(a.device, &ops));
    if (ops != &kv_ops_cpu) return kv_bench_gpu(stdout, length, repeats);
    KV_TRY(kv_bench_cpu(stdout, length, repeats));
    KV_TRY(kv_bench_replay(stdout, length, repeats));
    KV_TRY(kv_bench_model(stdout, a.model, length, repeats));
out:
    return st;
}
