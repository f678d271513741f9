/* Settings as (section, key, value) triples. */
#include "experiments/config.h"

#include <errno.h>
#include <ini.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policies/registry.h"
#include "reference/core/mem.h"

const kv_param kv_config_spec[] = {
    {.name = "path", .help = "trace file", .type = KV_PARAM_TEXT},
    {.name = "policies", .help = "comma list of name[:key=value]...", .type = KV_PARAM_TEXT},
    {.name = "budgets", .help = "comma list of counts or fractions", .type = KV_PARAM_TEXT},
    {.name = "name", .help = "folder below results/", .type = KV_PARAM_TEXT},
    {.name = "sinks", .type = KV_PARAM_INT, .default_value = 4, .max = KV_MOST_ENTRIES},
    {.name = "window",
     .type = KV_PARAM_INT,
     .default_value = 256,
     .min = 1,
     .max = KV_MOST_ENTRIES},
    {.name = "seed", .type = KV_PARAM_TEXT, .default_text = "1"},
    {.name = "eps", .type = KV_PARAM_REAL, .default_value = 1e-8, .max = 1, .min_open = 1},
    {.name = "oracle_delta", .type = KV_PARAM_REAL, .default_value = 2e-5, .max = 0.5},
    {.name = "target_reduce", .type = KV_PARAM_CHOICE, .choices = "max|mean"},
    {.name = "device", .type = KV_PARAM_TEXT, .default_text = "cpu"},
    {.name = "model", .help = "model folder for accuracy", .type = KV_PARAM_TEXT},
    {.name = "output", .help = "results folder", .type = KV_PARAM_TEXT},
    {.name = "save_evict", .type = KV_PARAM_CHOICE, .choices = "no|yes"},
    {.name = "decode", .type = KV_PARAM_CHOICE, .choices = "no|yes"},
    {.name = "force", .type = KV_PARAM_CHOICE, .choices = "no|yes"},
    {0},
};

static const struct {
    const char *key, *section;
} placed[] = {{"path", "trace"}, {"policies", "sweep"}, {"budgets", "sweep"}}; /* the rest: run */

static const char *section_of(const char *key) {
    for (size_t i = 0; i < sizeof placed / sizeof *placed; i++)
        if (strcmp(placed[i].key, key) == 0) return placed[i].section;
    return "run";
}

kv_status kv_config_init(kv_config *c) {
    memset(c, 0, sizeof *c);
    return kv_params_init(&c->run, kv_config_spec);
}

void kv_config_free(kv_config *c) {
    kv_params_free(&c->run);
    for (size_t i = 0; i < c->n_setting; i++) {
        free(c->setting[i].policy);
        free(c->setting[i].key);
        free(c->setting[i].value);
    }
    free(c->setting);
    memset(c, 0, sizeof *c);
}

/* Judges a policy's key and value now, so that the message can name the place it came from. */
static kv_status check_policy_key(const char *name, const char *key, const char *value) {
    kv_params probe;
    const kv_policy *policy = kv_policy_find(name);
    if (!policy)
        return KV_FAIL(KV_E_USAGE, "there is no policy '%s' (`kvlab policies` lists them)", name);
    if (strcmp(key, "weights") == 0)
        return policy->learned ? KV_OK : KV_FAIL(KV_E_USAGE, "%s takes no weights", name);
    kv_status st = kv_params_init(&probe, policy->params);
    if (st == KV_OK) st = kv_params_set(&probe, name, key, value);
    kv_params_free(&probe);
    return st;
}

static kv_status set_policy_key(kv_config *c, const char *name, const char *key,
                                const char *value) {
    kv_status st = check_policy_key(name, key, value);
    if (st != KV_OK) return st;
    kv_setting *grown = realloc(c->setting, (c->n_setting + 1) * sizeof *grown);
    if (!grown) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    c->setting = grown;
    kv_setting *s = &grown[c->n_setting];
    *s = (kv_setting){kv_strdup(name), kv_strdup(key), kv_strdup(value)};
    c->n_setting++;
    return s->policy && s->key && s->value ? KV_OK : KV_E_INTERNAL;
}

kv_status kv_config_set(kv_config *c, const char *section, const char *key, const char *value) {
    if (strncmp(section, "policy.", 7) == 0) return set_policy_key(c, section + 7, key, value);
    if (strcmp(section, "trace") && strcmp(section, "sweep") && strcmp(section, "run"))
        return KV_FAIL(KV_E_USAGE,
                       "unknown section [%s]; there are [trace], [policy.NAME], [sweep], [run]",
                       section);
    for (const kv_param *p = kv_config_spec; p->name; p++)
        if (strcmp(p->name, key) == 0 && strcmp(section_of(key), section) == 0)
            return kv_params_set(&c->run, section, key, value);
    char known[512] = "";
    for (const kv_param *p = kv_config_spec; p->name; p++) {
        size_t used = strlen(known);
        if (strcmp(section_of(p->name), section) == 0)
            snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", p->name);
    }
    return KV_FAIL(KV_E_USAGE, "section [%s] has no key '%s'; it knows: %s", section, key, known);
}

kv_status kv_config_set_text(kv_config *c, const char *text) {
    char section[96], key[96];
    const char *dot = strchr(text, '.'), *equals = strchr(text, '=');
    if (!dot || !equals || dot > equals || dot == text || equals == dot + 1)
        return KV_FAIL(KV_E_USAGE,
                       "--set: '%s' is not policy.key=value, for example h2o.recent_share=0.5 or "
                       "run.oracle_delta=1e-4",
                       text);
    snprintf(key, sizeof key, "%.*s", (int)(equals - dot - 1), dot + 1);
    bool run = dot - text == 3 && strncmp(text, "run", 3) == 0;
    snprintf(section, sizeof section, "%s%.*s", run ? "" : "policy.", (int)(dot - text), text);
    kv_status st = kv_config_set(c, section, key, equals + 1);
    return st == KV_OK ? st : kv_error_context(st, "--set %s", text);
}

typedef struct ini_state {
    kv_config *config;
    FILE *file;
    int line;
    bool indented; /* the line continues the value before it */
    const char *path;
    kv_status status; /* of the first bad line */
} ini_state;

static void note_error(ini_state *s, kv_status status) {
    if (s->status != KV_OK || status == KV_OK) return;
    s->status = kv_error_context(status, "%s:%d", s->path, s->line);
}

/* inih does not tell its handler the line, so lines are counted as they are read; and it would take the tail of a long line for
 * a line of its own. */
static char *read_line(char *text, int size, void *stream) {
    ini_state *s = stream;
    s->line++;
    if (!fgets(text, size, s->file)) return NULL;
    s->indented = text[0] == ' ' || text[0] == '\t';
    if (!strchr(text, '\n') && !feof(s->file) && s->status == KV_OK)
        note_error(s, KV_FAIL(KV_E_USAGE,
                              "longer than %d characters; put the rest on an indented "
                              "line of its own",
                              size - 2));
    return text;
}

/* A comma list of the file, possibly over several lines, as the command line would give it: without blanks at commas. */
static void join_list(const char *before, const char *value, char *out, size_t size) {
    size_t n = 0;
    snprintf(out, size, "%s%s%s", before, before[0] && before[strlen(before) - 1] != ',' ? "," : "",
             value);
    for (const char *c = out; *c; c++) {
        bool blank = *c == ' ' || *c == '\t';
        if (blank && (n == 0 || out[n - 1] == ',' || c[1 + strspn(c + 1, " \t")] == ',')) continue;
        out[n++] = *c;
    }
    out[n] = '\0';
}

static int on_key(void *user, const char *section, const char *key, const char *value) {
    ini_state *s = user;
    char joined[4096];
    if (s->status != KV_OK) return 1;
    if (strcmp(section, "sweep") == 0) {
        join_list(s->indented ? kv_config_text(s->config, key) : "", value, joined, sizeof joined);
        value = joined;
    }
    note_error(s, kv_config_set(s->config, section, key, value));
    return 1;
}

kv_status kv_config_file(kv_config *c, const char *path) {
    ini_state s = {.config = c, .file = fopen(path, "r"), .path = path};
    if (!s.file) return KV_FAIL(KV_E_NOINPUT, "cannot read config %s: %s", path, strerror(errno));
    int bad_line = ini_parse_stream(read_line, &s, on_key, &s);
    if (ferror(s.file) && s.status == KV_OK)
        s.status = KV_FAIL(KV_E_NOINPUT, "cannot read config %s: %s", path, strerror(errno));
    fclose(s.file);
    if (s.status != KV_OK) return s.status;
    if (bad_line > 0)
        return KV_FAIL(KV_E_USAGE, "%s:%d: neither [section] nor key = value", path, bad_line);
    return KV_OK;
}

const char *kv_config_text(const kv_config *c, const char *key) {
    return kv_params_text(&c->run, key);
}

bool kv_config_flag(const kv_config *c, const char *key) {
    return kv_params_int(&c->run, key) != 0;
}

kv_status kv_config_run(const kv_config *c, kv_run *run) {
    long long seed = 0;
    kv_status st = kv_parse_int(kv_config_text(c, "seed"), 0, INT64_MAX, &seed);
    if (st != KV_OK) return kv_error_context(st, "--seed");
    *run = (kv_run){
        .sinks = kv_params_int(&c->run, "sinks"),
        .window = kv_params_int(&c->run, "window"),
        .seed = (uint64_t)seed,
        .eps = kv_params_real(&c->run, "eps"),
        .oracle_delta = kv_params_real(&c->run, "oracle_delta"),
        .target_mean = kv_params_int(&c->run, "target_reduce") == 1,
    };
    return KV_OK;
}
