/* kvlab train: options -> kv_train. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/cli.h"
#include "experiments/train.h"

enum {
    KEY_POLICY = 0x100,
    KEY_BUDGET,
    KEY_TRACE,
    KEY_OUTPUT,
    KEY_MODEL,
    KEY_SEED,
    KEY_DEVICE,
    KEY_SET,
    KEY_SINKS,
    KEY_WINDOW,
    KEY_FORCE,
    KEY_DRY_RUN,
};

static const struct argp_option options[] = {
    {"policy", KEY_POLICY, "NAME", 0, "What to train: kvpop_mlp, kvpop, dms", 1},
    {"budget", KEY_BUDGET, "N", 0,
     "Cache entries per KV head, or with a point a fraction of the longest document", 1},
    {"trace", KEY_TRACE, "FILE...", 0,
     "Training traces, from corpus seeds of 2147483648 or more; further files may follow", 1},
    {"output", KEY_OUTPUT, "FILE", 0,
     "Weights to write (default policies/weights/<policy>-b<N>.safetensors)", 2},
    {"set", KEY_SET, "P.KEY=VALUE", 0, "A setting of the training, listed below; may be repeated",
     2},
    {"seed", KEY_SEED, "N", 0, "Seed of starting values, trace order and samples (default 1)", 2},
    {"sinks", KEY_SINKS, "N", 0, "First tokens that always stay (default 4)", 2},
    {"window", KEY_WINDOW, "N", 0,
     "Newest tokens that always stay, the query itself included (default 256)", 2},
    {"model", KEY_MODEL, "DIR", 0, "Make sure that the traces come from this model", 3},
    {"device", KEY_DEVICE, "cpu|gpu", 0, "Where to compute (default cpu)", 3},
    {"force", KEY_FORCE, NULL, 0,
     "Replace other weights and start over; take reasoning traces whose seed is unknown", 3},
    {"dry-run", KEY_DRY_RUN, NULL, 0, "Check policy, budget and settings, and stop", 3},
    {0},
};

typedef struct arguments {
    kv_train_options train;
    const char *seed, *device, *sinks, *window;
    const char **trace, **set;
} arguments;

static error_t append(const char ***list, int32_t *n, const char *text) {
    const char **grown = realloc(*list, (size_t)(*n + 1) * sizeof *grown);
    if (!grown) return ENOMEM;
    *list = grown;
    grown[(*n)++] = text;
    return 0;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case KEY_POLICY: a->train.policy = arg; return 0;
    case KEY_BUDGET: a->train.budget = arg; return 0;
    case ARGP_KEY_ARG:
    case KEY_TRACE: return append(&a->trace, &a->train.n_trace, arg);
    case KEY_SET: return append(&a->set, &a->train.n_set, arg);
    case KEY_OUTPUT: a->train.output = arg; return 0;
    case KEY_MODEL: a->train.model_dir = arg; return 0;
    case KEY_SEED: a->seed = arg; return 0;
    case KEY_DEVICE: a->device = arg; return 0;
    case KEY_SINKS: a->sinks = arg; return 0;
    case KEY_WINDOW: a->window = arg; return 0;
    case KEY_FORCE: a->train.force = true; return 0;
    case KEY_DRY_RUN: a->train.dry_run = true; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static kv_status number(const char *option, const char *text, long long most, long long *out) {
    kv_status st = kv_parse_int(text, 0, most, out);
    return st == KV_OK ? st : kv_error_context(st, "%s", option);
}

/* The settings tables as text below the options of --help. */
static char *help_text(int key, const char *text, void *input) {
    (void)input;
    char *out = NULL;
    size_t size;
    if (key != ARGP_KEY_HELP_POST_DOC) return (char *)(uintptr_t)text;
    FILE *f = open_memstream(&out, &size);
    if (!f) return NULL;
    const kv_learner *l;
    fprintf(f, "%s\n", text ? text : "");
    for (int i = 0; (l = kv_learner_at(i)); i++) {
        kv_params p;
        if (kv_params_init(&p, l->params) != KV_OK) continue;
        fprintf(f, "Settings of %s:\n", l->policy);
        for (size_t j = 0; j < p.n; j++) {
            char value[64];
            kv_params_format(&p, j, value, sizeof value);
            fprintf(f, "  %s.%s=%s%s%s%s  %s\n", l->policy, p.spec[j].name, value,
                    p.spec[j].type == KV_PARAM_CHOICE ? " (" : "",
                    p.spec[j].type == KV_PARAM_CHOICE ? p.spec[j].choices : "",
                    p.spec[j].type == KV_PARAM_CHOICE ? ")" : "", p.spec[j].help);
        }
        kv_params_free(&p);
    }
    fclose(f);
    return out;
}

kv_status kv_cmd_train(int argc, char **argv) {
    static const struct argp argp = {
        .options = options,
        .parser = parse,
        .args_doc = "[TRACE...]",
        .doc = "Train the weights of a learned policy on recorded traces.\v"
               "Example:\n"
               "  kvlab train --policy kvpop_mlp --budget 2048 --trace a.h5 b.h5 --output "
               "w.safetensors\n",
        .help_filter = help_text,
    };
    kv_status st = KV_OK;
    arguments a = {.train = {.cache_folder = "results/cache"},
                   .seed = "1",
                   .device = "cpu",
                   .sinks = "4",
                   .window = "256"};
    kv_train_report report = {0};
    long long seed, sinks, window;
    KV_TRY(kv_cli_parse(&argp, argc, argv, &a));
    if (!a.train.policy || !a.train.budget)
        KV_RAISE(KV_E_USAGE, "train needs --policy and --budget; see kvlab train --help");
    KV_TRY(number("--seed", a.seed, INT64_MAX, &seed));
    KV_TRY(number("--sinks", a.sinks, KV_MOST_ENTRIES, &sinks));
    KV_TRY(number("--window", a.window, KV_MOST_ENTRIES, &window));
    a.train.seed = (uint64_t)seed;
    a.train.sinks = (int32_t)sinks;
    a.train.window = (int32_t)window;
    a.train.trace = a.trace;
    a.train.set = a.set;
    KV_TRY(kv_cli_device(a.device, &a.train.ops));
    KV_TRY(kv_train(&a.train, &report));
    if (!a.train.dry_run) printf("%s%s\n", report.text, report.output);
out:
    free(a.trace);
    free(a.set);
    return st;
}
