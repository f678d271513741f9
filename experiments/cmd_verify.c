/* kvlab verify: GPU against CPU. */
#include "experiments/cli.h"
#include "experiments/verify.h"

static const struct argp_option options[] = {
    {"only", 'o', "NAME", 0, "One operation of the table", 0},
    {"small", 's', NULL, 0,
     "Only cases of at most 257 tokens: short enough for compute-sanitizer (memcheck, racecheck, "
     "initcheck)",
     0},
    {0},
};

typedef struct arguments {
    const char *only;
    bool small;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case 'o': a->only = arg; return 0;
    case 's': a->small = true; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

kv_status kv_cmd_verify(int argc, char **argv) {
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .doc = "Compares every operation and every policy on the GPU with the CPU reference, with "
               "the wgmma and with the portable kernels.\v"
               "Example:\n"
               "  kvlab verify\n"
               "  compute-sanitizer --tool racecheck kvlab verify --small\n"
               "Exit code 1 when anything differs, 69 without a GPU."};
    arguments a = {0};
    const kv_status st = kv_cli_parse(&argp, argc, argv, &a);
    return st == KV_OK ? kv_verify_run(stdout, a.only, a.small) : st;
}
