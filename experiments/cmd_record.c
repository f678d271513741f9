/* kvlab record: options -> kv_record. */
#include <stdio.h>
#include <string.h>

#include "experiments/cli.h"
#include "experiments/record.h"
#include "reference/core/param.h"
#include "traces/trace.h"

enum {
    KEY_MODEL = 0x100,
    KEY_CORPUS,
    KEY_TOKENS,
    KEY_LENGTH,
    KEY_SEED,
    KEY_OUTPUT,
    KEY_HIDDEN,
    KEY_DTYPE,
    KEY_DEVICE,
    KEY_FORCE
};

static const struct argp_option options[] = {
    {"model", KEY_MODEL, "DIR", 0, "Model folder: config.json and safetensors", 1},
    {"corpus", KEY_CORPUS, "NAME", 0, "Built-in corpus: reasoning", 1},
    {"tokens", KEY_TOKENS, "FILE", 0,
     "Token ids instead: text with one id per line, .npy, or HDF5 with /token", 1},
    {"length", KEY_LENGTH, "N", 0, "Tokens (default: 16384 of a corpus, all of a file)", 1},
    {"seed", KEY_SEED, "N", 0,
     "Seed of the corpus (default 1). Below 2^31: held out. `kvlab train` accepts traces from 2^31 "
     "on",
     1},
    {"output", KEY_OUTPUT, "FILE", 0, "The trace to be written", 2},
    {"hidden", KEY_HIDDEN, NULL, 0, "Also store the residual stream entering each layer", 2},
    {"dtype", KEY_DTYPE, "auto|f16|bf16|f32", 0,
     "How q, k, v are stored (default auto: f16, or f32 when a value would overflow)", 2},
    {"force", KEY_FORCE, NULL, 0, "Replace an existing trace", 2},
    {"device", KEY_DEVICE, "cpu|gpu", 0, "Where to compute (default cpu)", 3},
    {0},
};

typedef struct arguments {
    kv_record_options record;
    const char *length, *seed, *dtype, *device;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case KEY_MODEL: a->record.model_dir = arg; return 0;
    case KEY_CORPUS: a->record.corpus = arg; return 0;
    case KEY_TOKENS: a->record.tokens = arg; return 0;
    case KEY_LENGTH: a->length = arg; return 0;
    case KEY_SEED: a->seed = arg; return 0;
    case KEY_OUTPUT: a->record.output = arg; return 0;
    case KEY_HIDDEN: a->record.hidden = true; return 0;
    case KEY_DTYPE: a->dtype = arg; return 0;
    case KEY_DEVICE: a->device = arg; return 0;
    case KEY_FORCE: a->record.force = true; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static kv_status set_dtype(kv_record_options *o, const char *name) {
    static const kv_dtype types[] = {KV_F16, KV_BF16, KV_F32};
    o->any_dtype = strcmp(name, "auto") == 0;
    if (o->any_dtype) return KV_OK;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(name, kv_dtype_name(types[i])) == 0) {
            o->dtype = types[i];
            return KV_OK;
        }
    return KV_FAIL(KV_E_USAGE, "--dtype: '%s' is not one of auto, f16, bf16, f32", name);
}

kv_status kv_cmd_record(int argc, char **argv) {
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .doc =
            "Run a model over tokens and record queries, keys and values of every layer.\v"
            "Example: kvlab record --model traces/model --corpus reasoning --length 4096 --seed 1 "
            "--output t.h5"};
    kv_status st = KV_OK;
    arguments a = {.seed = "1", .dtype = "auto", .device = "cpu"};
    long long length = 0, seed;
    KV_TRY(kv_cli_parse(&argp, argc, argv, &a));
    if (a.length) st = kv_parse_int(a.length, 1, KV_MOST_TOKENS, &length);
    if (st != KV_OK) return kv_error_context(st, "--length");
    st = kv_parse_int(a.seed, 0, INT64_MAX, &seed);
    if (st != KV_OK) return kv_error_context(st, "--seed");
    a.record.length = (int32_t)length;
    a.record.seed = (uint64_t)seed;
    KV_TRY(set_dtype(&a.record, a.dtype));
    KV_TRY(kv_cli_device(a.device, &a.record.ops));
    KV_TRY(kv_record(&a.record));
    printf("%s\n", a.record.output);
out:
    return st;
}
