/* One training from its options to its weights file. */
#include "experiments/train.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "experiments/cli.h"
#include "experiments/files.h"
#include "experiments/manifest.h"
#include "experiments/results.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/model.h"
#include "reference/replay.h"
#include "reference/tensors.h"
#include "traces/model_load.h"
#include "traces/output.h"
#include "traces/safetensors.h"

static const kv_learner *const learners[] = {&kv_learner_kvpop_mlp, &kv_learner_kvpop,
                                             &kv_learner_dms};

const kv_learner *kv_learner_at(int i) {
    return i < (int)(sizeof learners / sizeof *learners) ? learners[i] : NULL;
}

static kv_status find_learner(const char *policy, const kv_learner **out) {
    char known[128] = "";
    for (int i = 0; (*out = kv_learner_at(i)); i++) {
        if (strcmp((*out)->policy, policy) == 0) return KV_OK;
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", (*out)->policy);
    }
    return KV_FAIL(KV_E_USAGE, "--policy: '%s' cannot be trained; these can: %s", policy, known);
}

/* --set policy.key=value, in order; paper=1 sets several at its place. */
static kv_status apply_settings(const kv_learner *learner, const kv_train_options *o,
                                kv_params *p) {
    for (int32_t i = 0; i < o->n_set; i++) {
        char key[64];
        const char *text = o->set[i], *equals = strchr(text, '=');
        size_t n = strlen(learner->policy);
        if (!equals || strncmp(text, learner->policy, n) != 0 || text[n] != '.' ||
            (size_t)(equals - text) - n - 1 >= sizeof key)
            return KV_FAIL(KV_E_USAGE, "--set: '%s' is not %s.KEY=VALUE", text, learner->policy);
        snprintf(key, sizeof key, "%.*s", (int)(equals - text - (long)n - 1), text + n + 1);
        kv_status st = kv_params_set(p, learner->policy, key, equals + 1);
        if (st == KV_OK && strcmp(key, "paper") == 0 && learner->paper &&
            kv_params_int(p, "paper") == 1)
            st = learner->paper(p);
        if (st != KV_OK) return st;
    }
    return KV_OK;
}

/* Training traces, then the held-out one if the settings name it. */
static kv_status open_traces(kv_train_job *job) {
    kv_status st = KV_OK;
    const kv_train_options *o = job->options;
    const char **path = NULL, *held_out = kv_params_text(&job->params, "held_out");
    int32_t extra = held_out[0] != '\0';
    if (o->n_trace < 1) return KV_FAIL(KV_E_USAGE, "--trace: name at least one training trace");
    KV_NEW(path, o->n_trace + 1);
    memcpy(path, o->trace, (size_t)o->n_trace * sizeof *path);
    path[o->n_trace] = held_out;
    KV_TRY(kv_train_set_open(path, o->n_trace + extra, extra, o->force, &job->set));
    job->plan.n_trace = o->n_trace;
    job->plan.held_out = extra ? o->n_trace : -1;
out:
    free(path);
    return st;
}

static kv_status check_model(const kv_train_job *job) {
    kv_model *model = NULL;
    if (!job->options->model_dir) return KV_OK;
    kv_status st = kv_model_load(job->options->model_dir, &model);
    if (st == KV_OK && job->set.model_hash[0] && strcmp(model->hash, job->set.model_hash) != 0)
        st = KV_FAIL(KV_E_DATA, "%s: the trace was recorded from model %s, --model %s is %s",
                     job->set.trace[0].path, job->set.model_hash, job->options->model_dir,
                     model->hash);
    kv_model_free(model);
    return st;
}

/* Everything that decides the numbers. */
static json_t *identity_of(const kv_learner *learner, const kv_train_job *job) {
    json_t *o = json_object(), *params = json_object(), *traces = json_array();
    char seed[24];
    for (size_t i = 0; i < job->params.n; i++) {
        char text[512];
        kv_params_format(&job->params, i, text, sizeof text);
        if (strcmp(job->params.spec[i].name, "held_out") != 0) /* its content counts, below */
            json_object_set_new(params, job->params.spec[i].name, json_string(text));
    }
    for (int32_t i = 0; i < job->set.n_trace; i++)
        json_array_append_new(traces, json_string(job->set.trace[i].hash));
    snprintf(seed, sizeof seed, "%" PRIu64, job->run.seed);
    json_object_set_new(o, "command", json_string("train"));
    json_object_set_new(o, "policy", json_string(learner->policy));
    json_object_set_new(o, "budget", json_integer(job->run.budget));
    json_object_set_new(o, "sinks", json_integer(job->run.sinks));
    json_object_set_new(o, "window", json_integer(job->run.window));
    json_object_set_new(o, "seed", json_string(seed));
    json_object_set_new(o, "params", params);
    json_object_set_new(o, "model_xxh3", json_string(job->set.model_hash));
    json_object_set_new(o, "held_out_traces", json_integer(job->plan.held_out >= 0));
    if (job->options->ops != &kv_ops_cpu)
        json_object_set_new(o, "device", json_string(job->options->ops->name));
    if (json_object_set_new(o, "trace_xxh3", traces) == 0) return o;
    json_decref(o);
    return NULL;
}

/* The output: free, made by this very training (*done), or KV_E_CANTCREATE. */
static kv_status check_output(kv_train_job *job, bool *done) {
    kv_tensors set = {0};
    *done = false;
    kv_status st = kv_output_check(job->report->output);
    if (st != KV_OK) return st;
    if (job->options->force || access(job->report->output, F_OK) != 0) return KV_OK;
    st = kv_safetensors_open(job->report->output, &set);
    const char *identity = st == KV_OK ? kv_tensors_meta(&set, "training") : NULL;
    *done = identity && strcmp(identity, job->plan.identity) == 0;
    kv_tensors_free(&set);
    if (*done) return KV_OK;
    return KV_FAIL(KV_E_CANTCREATE,
                   "%s exists and was not made by this training; use --force to replace it, or "
                   "another --output",
                   job->report->output);
}

static kv_status name_files(const kv_learner *learner, kv_train_job *job) {
    char folder[PATH_MAX];
    const kv_train_options *o = job->options;
    int n = o->output ? snprintf(job->report->output, sizeof job->report->output, "%s", o->output)
                      : snprintf(job->report->output, sizeof job->report->output,
                                 "%s/policies/weights/%s-b%d.safetensors", kv_cli_home(),
                                 learner->policy, job->run.budget);
    if (n < 0 || (size_t)n >= sizeof job->report->output - 64)
        return KV_FAIL(KV_E_USAGE, "--output: the path is longer than %zu characters",
                       sizeof job->report->output - 64);
    snprintf(job->checkpoint, sizeof job->checkpoint, "%s.checkpoint", job->report->output);
    snprintf(folder, sizeof folder, "%s", job->report->output);
    char *slash = strrchr(folder, '/');
    if (!slash || slash == folder) return KV_OK;
    *slash = '\0';
    return kv_make_folders(folder);
}

/* <name>.manifest.json beside <name>.safetensors */
static kv_status write_manifest(const kv_train_job *job, const json_t *identity, double start) {
    kv_status st = KV_OK;
    char folder[PATH_MAX], name[NAME_MAX];
    json_t *manifest = NULL;
    kv_trace *trace = NULL;
    KV_TRY(kv_trace_open(job->set.trace[0].path, &trace));
    manifest = kv_manifest_make(identity, kv_trace_get(trace), start, job->set.dense_seconds);
    if (!manifest) KV_RAISE(KV_E_INTERNAL, "out of memory");
    snprintf(folder, sizeof folder, "%.4000s", job->report->output);
    char *slash = strrchr(folder, '/');
    snprintf(name, sizeof name, "%.200s", slash ? slash + 1 : folder);
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - folder) : 1,
             slash ? job->report->output : ".");
    char *suffix = strstr(name, ".safetensors");
    snprintf(suffix ? suffix : name + strlen(name), 16, ".manifest.json");
    KV_TRY(kv_json_write(manifest, folder, name));
out:
    json_decref(manifest);
    kv_trace_close(trace);
    return st;
}

void kv_train_job_plan(kv_train_job *job) {
    const kv_params *p = &job->params;
    job->plan.scorer = (kv_adamw){.rate = kv_params_real(p, "rate"),
                                  .beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .eps = 1e-8,
                                  .weight_decay = kv_params_real(p, "weight_decay")};
    job->plan.steps = kv_params_int(p, "steps");
    job->plan.warmup = kv_params_int(p, "warmup");
    job->plan.clip = kv_params_real(p, "clip");
    job->plan.check = kv_params_int(p, "check");
    job->plan.patience = kv_params_int(p, "patience");
}

kv_status kv_train_job_run(kv_train_job *job, const kv_train_objective *objective,
                           kv_train_state *state) {
    kv_train_figures last;
    double start = kv_now();
    kv_status st = kv_train_run(&job->plan, objective, state, &last);
    if (st != KV_OK) return st;
    char right[64] = "";
    if (!isnan(last.right))
        snprintf(right, sizeof right, ", decisions like the target's %.3f", last.right);
    snprintf(job->report->text, sizeof job->report->text,
             "%d traces, %" PRId64 " steps in %.0f s (targets %.0f s): loss %.4f%s, keep %.3f\n",
             job->plan.n_trace, state->step, kv_now() - start, job->set.dense_seconds, last.loss,
             right, last.keep);
    return KV_OK;
}

void kv_train_job_metadata(const kv_train_job *job, const char **out) {
    int n = 0;
    out[n++] = "training";
    out[n++] = job->plan.identity;
    if (job->set.model_hash[0]) {
        out[n++] = "model_xxh3";
        out[n++] = job->set.model_hash;
    }
    out[n] = NULL;
}

kv_status kv_train(const kv_train_options *o, kv_train_report *report) {
    kv_status st = KV_OK;
    const kv_learner *learner;
    json_t *identity = NULL;
    kv_train_job *job = NULL;
    double start = kv_now();
    bool done;
    KV_NEW(job, 1);
    job->options = o;
    job->report = report;
    job->run = (kv_run){.sinks = o->sinks, .window = o->window, .seed = o->seed, .eps = 1e-8};
    KV_TRY(find_learner(o->policy, &learner));
    KV_TRY(kv_params_init(&job->params, learner->params));
    KV_TRY(apply_settings(learner, o, &job->params));
    KV_TRY(kv_budget_parse(o->budget, 1, &job->run.budget)); /* is it one? its value comes below */
    if (o->dry_run) goto out;
    KV_TRY(open_traces(job));
    KV_TRY(kv_budget_parse(o->budget, job->set.longest, &job->run.budget));
    KV_TRY(kv_run_check(&job->run));
    if (job->run.budget == job->run.sinks + job->run.window)
        KV_RAISE(KV_E_USAGE,
                 "--budget %d leaves no slot beside %d sinks and window %d: nothing to "
                 "learn",
                 job->run.budget, job->run.sinks, job->run.window);
    KV_TRY(check_model(job));
    KV_TRY(name_files(learner, job));
    identity = identity_of(learner, job);
    if (!identity) KV_RAISE(KV_E_INTERNAL, "out of memory");
    kv_identity_hash(identity, job->plan.identity);
    job->plan.checkpoint = job->checkpoint;
    job->plan.seed = o->seed;
    job->plan.force = o->force;
    KV_TRY(check_output(job, &done));
    if (done) {
        snprintf(report->text, sizeof report->text,
                 "already made by this training; --force trains again\n");
        goto out;
    }
    KV_TRY(learner->train(learner, job));
    KV_TRY(write_manifest(job, identity, start));
    unlink(job->checkpoint);
out:
    json_decref(identity);
    if (job) {
        kv_train_set_free(&job->set);
        kv_params_free(&job->params);
    }
    free(job);
    return st;
}
