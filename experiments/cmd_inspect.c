/* kvlab inspect: options -> kv_inspect. */
#include "experiments/cli.h"
#include "experiments/inspect.h"

enum { KEY_DEEP = 0x100 };

typedef struct arguments {
    const char *path;
    bool deep;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case KEY_DEEP: a->deep = true; return 0;
    case ARGP_KEY_ARG:
        if (a->path) argp_error(state, "one file at a time");
        a->path = arg;
        return 0;
    case ARGP_KEY_NO_ARGS: argp_error(state, "which file?"); return EINVAL;
    default: return ARGP_ERR_UNKNOWN;
    }
}

kv_status kv_cmd_inspect(int argc, char **argv) {
    static const struct argp_option options[] = {
        {"deep", KEY_DEEP, NULL, 0,
         "Read everything and compare the content hash, lse with q and k, positions, finite values",
         1},
        {0},
    };
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .args_doc = "FILE",
        .doc = "Say what a trace, a file of decisions (evict.h5) or weights (.safetensors) hold.\v"
               "Example:\n"
               "  kvlab inspect --deep t.h5"};
    arguments a = {0};
    kv_status st = kv_cli_parse(&argp, argc, argv, &a);
    return st == KV_OK ? kv_inspect(a.path, a.deep, stdout) : st;
}
