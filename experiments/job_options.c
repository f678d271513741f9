/* Command line of the two commands that run policies. */
#include <argp.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/cli.h"
#include "experiments/job.h"
#include "reference/core/mem.h"

enum { KEY_FIRST = 0x100 };

/* An option and the setting it stands for. */
typedef struct job_option {
    const char *name, *argument, *section, *key, *fixed_value, *help;
    int group;
    bool experiment_only;
} job_option;

static const job_option table[] = {
    {"trace", "FILE", "trace", "path", NULL, "Recorded trace (`kvlab record` makes one)", 1, false},
    {"policy", "LIST", "sweep", "policies", NULL,
     "Policies, as name[:key=value]..., separated by commas: oracle,oracle:power=2", 1, false},
    {"budget", "LIST", "sweep", "budgets", NULL,
     "Cache entries per KV head, sinks and window included: counts (2048) or, with a point, "
     "fractions of the longest document (0.125)",
     1, false},
    {"sinks", "N", "run", "sinks", NULL,
     "First tokens that priority policies and dms always keep and that never count as far (default "
     "4)",
     2, false},
    {"window", "N", "run", "window", NULL,
     "The same of the newest tokens, the query itself included (default 256)", 2, false},
    {"seed", "N", "run", "seed", NULL, "Seed of the random policy (default 1)", 2, false},
    {"model", "DIR", "run", "model", NULL,
     "Model folder for accuracy (experiment: left out, the embedded model is used for traces that "
     "it recorded)",
     3, false},
    {"device", "cpu|gpu", "run", "device", NULL,
     "Where to compute (default cpu); the schedule of oracle_exact and head sizes above 128 need "
     "the CPU",
     3, false},
    {"output", "DIR", "run", "output", NULL,
     "Results folder (default results/<name>/<trace>-<hash>)", 4, false},
    {"name", "NAME", "run", "name", NULL, "Folder below results/ (default: the command)", 4, false},
    {"save-evict", NULL, "run", "save_evict", "yes",
     "Also write evict.h5, every decision; the policy `file` reads it back", 4, true},
    {"decode", NULL, "run", "decode", "yes",
     "Also decode every causal row token by token over an allocated slot cache (slow), check that "
     "it "
     "holds the same tokens and gives the same outputs as the mask, and report "
     "cache_bytes_allocated: all slots of keys and values, counted in elements of the trace's type",
     4, true},
    {"force", NULL, "run", "force", "yes", "Run again although a finished run is there", 4, false},
};
enum { TABLE = sizeof table / sizeof *table, KEY_CONFIG = KEY_FIRST + TABLE, KEY_SET, KEY_WEIGHTS };

typedef struct pending { /* one option as given; applied after the config file, in order */
    int key;
    const char *value;
} pending;

typedef struct args {
    pending *list;
    size_t n;
    const char *config_file;
} args;

static error_t parse(int key, char *arg, struct argp_state *state) {
    args *a = state->input;
    if (key == KEY_CONFIG) {
        a->config_file = arg;
        return 0;
    }
    if (key < KEY_FIRST || key > KEY_WEIGHTS) return ARGP_ERR_UNKNOWN;
    pending *grown = realloc(a->list, (a->n + 1) * sizeof *grown);
    if (!grown) return ENOMEM;
    a->list = grown;
    a->list[a->n++] = (pending){key, arg};
    return 0;
}

static kv_status set_weights(kv_config *c, const char *text) {
    char section[96];
    const char *equals = strchr(text, '=');
    if (!equals || equals == text)
        return KV_FAIL(KV_E_USAGE, "--weights: '%s' is not POLICY=FILE", text);
    snprintf(section, sizeof section, "policy.%.*s", (int)(equals - text), text);
    kv_status st = kv_config_set(c, section, "weights", equals + 1);
    return st == KV_OK ? st : kv_error_context(st, "--weights %s", text);
}

static kv_status apply(kv_config *c, const pending *p) {
    if (p->key == KEY_SET) return kv_config_set_text(c, p->value);
    if (p->key == KEY_WEIGHTS) return set_weights(c, p->value);
    const job_option *o = &table[p->key - KEY_FIRST];
    /* contract.md 4; a list in a config file may be laid out with blanks */
    if (strcmp(o->key, "budgets") == 0 && strpbrk(p->value, " \t\r\n\v\f"))
        return KV_FAIL(KV_E_USAGE, "--budget: '%s' holds a blank; write it like 512,0.25",
                       p->value);
    kv_status st = kv_config_set(c, o->section, o->key, o->fixed_value ? o->fixed_value : p->value);
    return st == KV_OK ? st : kv_error_context(st, "--%s", o->name);
}

static size_t fill_options(kv_job job, struct argp_option *out) {
    static const char *const titles[] = {
        "", "What to run:", "Settings of the run:", "Model and device:", "Results:"};
    size_t n = 0;
    for (int i = 0; i < TABLE; i++) {
        if (i == 0 || table[i].group != table[i - 1].group)
            out[n++] = (struct argp_option){.doc = titles[table[i].group], .group = table[i].group};
        if (table[i].experiment_only && job != KV_JOB_EXPERIMENT) continue;
        out[n++] = (struct argp_option){table[i].name, KEY_FIRST + i, table[i].argument, 0,
                                        table[i].help, table[i].group};
    }
    out[n++] = (struct argp_option){
        "config",
        KEY_CONFIG,
        "FILE",
        0,
        "INI file with sections [trace] [policy.NAME] [sweep] [run]; options win over it",
        1};
    out[n++] = (struct argp_option){
        "set",
        KEY_SET,
        "P.KEY=VALUE",
        0,
        "Parameter of a policy (h2o.recent_share=0.25) or of the run (run.oracle_delta=1e-4, "
        "run.target_reduce=mean, run.eps=1e-8); may be repeated",
        2};
    out[n++] = (struct argp_option){
        "weights",
        KEY_WEIGHTS,
        "POLICY=FILE",
        0,
        "Weights of a learned policy (default: the shipped ones of the nearest budget)",
        3};
    out[n] = (struct argp_option){0};
    return n;
}

static const char *const doc[] = {
    [KV_JOB_EXPERIMENT] =
        "Replays a recorded trace through eviction policies and measures what each lost.\v"
        "Example:\n"
        "  kvlab experiment --trace t.h5 --policy streaming,h2o,oracle:power=2 --budget 512,0.25\n"
        "\n"
        "One row per policy and budget: recall of the best long-range tokens against the oracle, "
        "retrievals served, attention mass kept, output error, and, when the trace's model is at "
        "hand, accuracy. A finished run of the same settings is printed again instead of repeated "
        "(--force repeats it).",
    [KV_JOB_EVALUATE] =
        "Runs a model with a policy's mask in every layer and measures its accuracy.\v"
        "Example:\n"
        "  kvlab evaluate --model traces/model --trace t.h5 --policy full,h2o --budget 2048\n"
        "\n"
        "The trace gives tokens and scored positions; every layer's decisions are made on that "
        "run's own queries, keys and values.",
};

kv_status kv_job_options(kv_job job, int argc, char **argv, kv_config *config) {
    kv_status st = KV_OK;
    args a = {0};
    struct argp_option options[TABLE + 16];
    fill_options(job, options);
    const struct argp argp = {.options = options, .parser = parse, .doc = doc[job]};
    KV_TRY(kv_config_init(config));
    KV_TRY(kv_cli_parse(&argp, argc, argv, &a));
    if (a.config_file) KV_TRY(kv_config_file(config, a.config_file));
    for (size_t i = 0; i < a.n; i++) KV_TRY(apply(config, &a.list[i]));
out:
    free(a.list);
    return st;
}
