/* kvlab verify: GPU against CPU. */
#include "experiments/cli.h"
#include "experiments/verify.h"

static const struct argp_option options[] = {
    {"only", 'o', "NAME", 0, "One operation of the table", 0},
    {0},
};

static error_t parse(int key, char *arg, struct argp_state *state) {
    if (key != 'o') return ARGP_ERR_UNKNOWN;
    *(const char **)state->input = arg;
    return 0;
}

kv_status kv_cmd_verify(int argc, char **argv) {
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .doc = "Compares every operation and every policy on the GPU with the CPU reference, with "
               "the wgmma and with the portable kernels.\v"
               "Example:\n"
               "  kvlab verify\n"
               "Exit code 1 when anything differs, 69 without a GPU."};
    const char *only = NULL;
    const kv_status st = kv_cli_parse(&argp, argc, argv, &only);
    return st == KV_OK ? kv_verify_run(stdout, only) : st;
}
