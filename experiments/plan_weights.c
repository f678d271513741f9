/* Which weights a learned policy runs with, and whether they fit the trace (contract.md 4). */
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/cli.h"
#include "experiments/plan.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "traces/safetensors.h"

static const char shipped_folder[] = "policies/weights";

static const char *chosen_file(const kv_config *config, const char *policy) {
    const char *path = NULL;
    for (size_t i = 0; i < config->n_setting; i++)
        if (strcmp(config->setting[i].policy, policy) == 0 &&
            strcmp(config->setting[i].key, "weights") == 0)
            path = config->setting[i].value;
    return path;
}

/* N of "<policy>-b<N>.safetensors", 0 for other names. */
static int32_t shipped_budget(const char *file, const char *policy) {
    size_t n = strlen(policy);
    int32_t budget = 0;
    int used = 0;
    if (strncmp(file, policy, n) != 0) return 0;
    if (sscanf(file + n, "-b%d.safetensors%n", &budget, &used) != 1 || used == 0) return 0;
    return file[n + (size_t)used] == '\0' && budget > 0 ? budget : 0;
}

static kv_status nearest_shipped(const char *policy, int32_t budget, char *name, size_t size) {
    char folder[PATH_MAX];
    int32_t best = 0;
    snprintf(folder, sizeof folder, "%s/%s", kv_cli_home(), shipped_folder);
    DIR *dir = opendir(folder);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        int32_t b = shipped_budget(e->d_name, policy);
        if (!b) continue;
        int64_t far = llabs((long long)b - budget), best_far = llabs((long long)best - budget);
        if (!best || far < best_far || (far == best_far && b > best)) best = b;
    }
    if (dir) closedir(dir);
    if (!best)
        return KV_FAIL(KV_E_NOINPUT,
                       "%s needs weights and %s holds none: train some with `kvlab train --policy "
                       "%s`, then name them with --weights %s=FILE",
                       policy, folder, policy, policy);
    snprintf(name, size, "%s/%s-b%d.safetensors", shipped_folder, policy, best);
    return KV_OK;
}

/* The memory is read for a token when it leaves the window, or at once: 0, off. Other words and numbers mean the window. */
static void remark_delay(const kv_tensors *t, const kv_row *row) {
    const char *delay = kv_tensors_meta(t, "delay");
    static const char *const known[] = {"0", "off", "1", "on"};
    char number[24];
    snprintf(number, sizeof number, "%d", row->run.window);
    bool clear = !delay || strcmp(delay, number) == 0;
    for (size_t i = 0; !clear && i < sizeof known / sizeof *known; i++)
        clear = strcmp(delay, known[i]) == 0;
    if (!clear)
        kv_log(KV_LOG_WARN, "plan",
               "%s: metadata 'delay' is '%s', expected 0 or off, or the window %d: %s takes it for "
               "the window",
               t->path, delay, row->run.window, row->policy->name);
}

static kv_status check_window(const kv_tensors *t, const kv_row *row) {
    const char *policy = kv_tensors_meta(t, "policy"), *window = kv_tensors_meta(t, "window");
    long long w = 0;
    if (policy && strcmp(policy, row->policy->name) != 0)
        return KV_FAIL(KV_E_DATA, "%s: weights of policy %s, wanted for %s", t->path, policy,
                       row->policy->name);
    if (!window || kv_parse_int(window, 1, KV_MOST_ENTRIES, &w) != KV_OK)
        return KV_FAIL(KV_E_DATA, "%s: metadata 'window' is %s, expected a whole number from 1 on",
                       t->path, window ? window : "missing");
    if (w != row->run.window)
        return KV_FAIL(KV_E_DATA,
                       "%s: trained for window %lld, this run has --window %d; train for that "
                       "window or use --window %lld",
                       t->path, w, row->run.window, w);
    return KV_OK;
}

/* A word that nobody knows would silently stand for another one. A key left out means the default. */
static kv_status check_words(const kv_tensors *t) {
    static const char *const known[][3] = {
        {"target_reduce", "max", "mean"}, {"lse", "dense", "sparse"},
        {"norm", "rms", "none"},          {"gate", "exp", "sigmoid"},
        {"input", "kv", "hidden"},        {"gate_input", "feature", "hidden"}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const char *word = kv_tensors_meta(t, known[i][0]);
        if (word && strcmp(word, known[i][1]) != 0 && strcmp(word, known[i][2]) != 0)
            return KV_FAIL(KV_E_DATA, "%s: metadata '%s' is '%s', expected %s or %s", t->path,
                           known[i][0], word, known[i][1], known[i][2]);
    }
    return KV_OK;
}

/* Every per-layer tensor has the KV heads as its first axis; those that read [k;v] have 2 d as their last. */
static kv_status check_layer(const kv_tensors *t, int32_t layer, const kv_trace_info *trace) {
    static const char *const reads_kv[] = {"mlp.w1", "feature.weight"};
    const char *input = kv_tensors_meta(t, "input");
    size_t n_kv = input && strcmp(input, "hidden") == 0 ? 0 : sizeof reads_kv / sizeof *reads_kv;
    char prefix[64];
    int n = snprintf(prefix, sizeof prefix, "layers.%d.", layer), found = 0;
    for (int32_t i = 0; i < t->n_tensor; i++) {
        const kv_tensor *x = &t->tensor[i];
        if (strncmp(x->name, prefix, (size_t)n) != 0) continue;
        found = 1;
        if (x->n_dim > 0 && x->shape[0] != trace->n_kv_head)
            return KV_FAIL(KV_E_DATA, "%s: tensor %s is for %lld KV heads, the trace %s has %d",
                           t->path, x->name, (long long)x->shape[0], trace->path, trace->n_kv_head);
        for (size_t j = 0; j < n_kv; j++)
            if (strcmp(x->name + n, reads_kv[j]) == 0 && x->n_dim == 3 &&
                x->shape[2] != 2 * trace->head_dim)
                return KV_FAIL(KV_E_DATA,
                               "%s: tensor %s is for head size %lld, the trace %s has %d", t->path,
                               x->name, (long long)x->shape[2] / 2, trace->path, trace->head_dim);
    }
    if (!found)
        return KV_FAIL(KV_E_DATA, "%s: no weights for layer %d of the trace %s", t->path, layer,
                       trace->path);
    return KV_OK;
}

static int32_t count_layers(const kv_tensors *t) { /* highest layer id + 1 */
    int32_t n = 0, layer = 0;
    for (int32_t i = 0; i < t->n_tensor; i++)
        if (sscanf(t->tensor[i].name, "layers.%d.", &layer) == 1 && layer >= n) n = layer + 1;
    return n;
}

static kv_status check_fit(const kv_tensors *t, const kv_row *row, const kv_trace_info *trace) {
    kv_status st = check_window(t, row);
    if (st == KV_OK) st = check_words(t);
    for (int32_t l = 0; st == KV_OK && l < trace->n_layer; l++)
        st = check_layer(t, trace->layer_id[l], trace);
    if (st != KV_OK) return st;
    if (count_layers(t) != trace->n_model_layer && !trace->depth_is_guess)
        return KV_FAIL(KV_E_DATA, "%s: weights for %d layers, the model of %s has %d", t->path,
                       count_layers(t), trace->path, trace->n_model_layer);
    return KV_OK;
}

/* The open file called `name`; opened on first use. */
static kv_status open_once(kv_plan *plan, const char *name, const char *path,
                           const kv_weights **out) {
    kv_status st = KV_OK;
    kv_weights *w = NULL;
    for (size_t i = 0; i < plan->n_weights; i++)
        if (strcmp(plan->weights[i]->name, name) == 0) {
            *out = plan->weights[i];
            return KV_OK;
        }
    kv_weights **grown = realloc(plan->weights, (plan->n_weights + 1) * sizeof *grown);
    if (!grown) KV_RAISE(KV_E_INTERNAL, "out of memory");
    plan->weights = grown;
    KV_NEW(w, 1);
    if (!(w->name = kv_strdup(name))) KV_RAISE(KV_E_INTERNAL, "out of memory");
    KV_TRY(kv_safetensors_open(path, &w->tensors));
    *out = plan->weights[plan->n_weights++] = w;
    w = NULL;
out:
    if (w) free(w->name);
    free(w);
    return st;
}

static void warn_shift(const kv_row *row, const kv_trace_info *trace) {
    int shift = kv_params_int(&row->params, "shift") == 0;
    if (trace->gate_shift >= 0 && trace->gate_shift != shift)
        kv_log(KV_LOG_WARN, "plan",
               "%s: the gate was recorded with shift %d, this run uses shift %d (%s:shift=%d "
               "follows the recording)",
               trace->path, trace->gate_shift, shift, row->policy->name, trace->gate_shift);
}

kv_status kv_plan_open_weights(kv_plan *plan, const kv_config *config, const kv_trace_info *trace) {
    for (size_t i = 0; i < plan->n_row; i++) {
        kv_row *row = &plan->row[i];
        kv_status st = KV_OK;
        char name[PATH_MAX], path[PATH_MAX];
        const char *chosen = chosen_file(config, row->policy->name);
        if (!row->policy->learned || kv_row_reads_scores(row)) continue;
        if (!chosen && row->policy->kind == KV_GATE && trace->has_gate) {
            warn_shift(row, trace);
            continue;
        }
        if (!chosen) {
            st = nearest_shipped(row->policy->name, row->run.budget, name, sizeof name);
            if (st != KV_OK) return st;
            snprintf(path, sizeof path, "%.2000s/%.2000s", kv_cli_home(), name);
        } else {
            snprintf(name, sizeof name, "%s", chosen);
            snprintf(path, sizeof path, "%s", chosen);
        }
        const size_t opened = plan->n_weights;
        st = open_once(plan, name, path, &row->weights);
        if (st == KV_OK) st = check_fit(&row->weights->tensors, row, trace);
        if (st != KV_OK) return st;
        if (plan->n_weights > opened) remark_delay(&row->weights->tensors, row);
    }
    return KV_OK;
}
