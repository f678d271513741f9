/* One run: check everything, reuse or compute, write by rename, print. */
#include "experiments/job.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "experiments/accuracy.h"
#include "experiments/cli.h"
#include "experiments/cache.h"
#include "experiments/experiment.h"
#include "experiments/files.h"
#include "experiments/manifest.h"
#include "experiments/plot_data.h"
#include "experiments/results.h"
#include "kernels/kernels.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "traces/model_load.h"

static const char *const job_name[] = {"experiment", "evaluate"};
static const char cache_folder[] = "results/cache";
static const int64_t cache_limit = (int64_t)4 << 30; /* bytes */

typedef struct run {
    kv_job job;
    const kv_config *config;
    double start;
    kv_trace *trace;
    const kv_trace_info *info;
    kv_plan plan;
    const kv_ops *ops;
    kv_model *model; /* NULL: no accuracy */
    json_t *identity;
    kv_layer_reader *reader;  /* reads ahead while the device is opened; NULL on the CPU */
    double prepare, accuracy; /* seconds */
    char folder[PATH_MAX - 64];
} run;

static kv_status require(const kv_config *c, const char *key, const char *option) {
    if (kv_config_text(c, key)[0]) return KV_OK;
    return KV_FAIL(KV_E_USAGE, "--%s is missing (see --help)", option);
}

static kv_status default_folder(run *r) {
    char hex[33];
    const char *base = strrchr(r->info->path, '/'), *name = kv_config_text(r->config, "name");
    if (strchr(name, '/') || name[0] == '.' || !strcmp(name, "latest") || !strcmp(name, "cache"))
        return KV_FAIL(KV_E_USAGE,
                       "--name: '%s' cannot be a folder below results/: expected a name without "
                       "'/', not starting with '.', and neither latest nor cache; use --output for "
                       "another place",
                       name);
    base = base ? base + 1 : r->info->path;
    size_t n = strlen(base);
    if (n > 3 && strcmp(base + n - 3, ".h5") == 0) n -= 3;
    kv_identity_hash(r->identity, hex);
    snprintf(r->folder, sizeof r->folder, "results/%.200s/%.*s-%.8s",
             name[0] ? name : job_name[r->job], (int)(n < 200 ? n : 200), base, hex);
    return KV_OK;
}

/* --model, or for an experiment the embedded model when it recorded this trace. */
static kv_status open_model(run *r) {
    char embedded[PATH_MAX];
    const char *folder = kv_config_text(r->config, "model");
    if (folder[0]) {
        kv_status st = kv_model_load(folder, &r->model);
        if (st != KV_OK) return st;
        if (!r->info->scored)
            kv_log(KV_LOG_WARN, job_name[r->job],
                   "%s does not say which tokens are determined (dataset scored), so accuracy, "
                   "agreement and KL are undefined",
                   r->info->path);
        if (r->info->model_hash[0] && strcmp(r->info->model_hash, r->model->hash) != 0)
            kv_log(KV_LOG_WARN, job_name[r->job],
                   "%s was recorded with other weights than those of %s: accuracy and the other "
                   "numbers describe different models",
                   r->info->path, folder);
        return KV_OK;
    }
    snprintf(embedded, sizeof embedded, "%.4000s/traces/model", kv_cli_home());
    if (!r->info->scored || !r->info->model_hash[0] || access(embedded, F_OK) != 0) return KV_OK;
    kv_status st = kv_model_load(embedded, &r->model);
    if (st != KV_OK || strcmp(r->info->model_hash, r->model->hash) == 0) return st;
    kv_model_free(r->model);
    r->model = NULL;
    return KV_OK;
}

/* As many layers ahead of a GPU as fit a gigabyte. */
static kv_status read_ahead(run *r) {
    const kv_trace_info *t = r->info;
    const int64_t layer = t->n_token * t->head_dim * (t->n_q_head + 2 * t->n_kv_head) * 4,
                  fit = ((int64_t)1 << 30) / layer;
    const int32_t ahead = fit < t->n_layer ? (int32_t)fit : t->n_layer;
    return kv_layer_reader_open(r->trace, kv_plan_reads_hidden(&r->plan, t), ahead < 1 ? 1 : ahead,
                                &r->reader);
}

/* Everything that can be wrong with the arguments is found here, before the first number. */
static kv_status prepare(run *r) {
    kv_status st = KV_OK;
    const kv_config *c = r->config;
    KV_TRY(require(c, "path", "trace"));
    KV_TRY(require(c, "policies", "policy"));
    KV_TRY(require(c, "budgets", "budget"));
    if (r->job == KV_JOB_EVALUATE) KV_TRY(require(c, "model", "model"));
    KV_TRY(kv_plan_check(c)); /* a misspelt policy is told even when the trace is missing */
    const bool on_gpu = strcmp(kv_config_text(c, "device"), "gpu") == 0;
    if (on_gpu) kv_gpu_begin();
    if (kv_config_flag(c, "decode") && on_gpu)
        KV_RAISE(KV_E_USAGE, "--decode runs on the CPU; leave out --device gpu");
    KV_TRY(kv_trace_open(kv_config_text(c, "path"), &r->trace));
    r->info = kv_trace_get(r->trace);
    const int64_t fall = kv_trace_falling_position(r->info);
    if (fall >= 0)
        kv_log(
            KV_LOG_WARN, job_name[r->job],
            "%s: position is %d at token %lld and %d before it; streaming:pos=cache and accuracy "
            "turn keys by positions and expect them to rise within a document",
            r->info->path, r->info->position[fall], (long long)fall, r->info->position[fall - 1]);
    KV_TRY(kv_plan_make(c, r->info->longest, &r->plan));
    KV_TRY(kv_plan_check_decisions(&r->plan, r->info));
    KV_TRY(kv_plan_open_weights(&r->plan, c, r->info));
    if (on_gpu && r->job == KV_JOB_EXPERIMENT) KV_TRY(read_ahead(r));
    KV_TRY(open_model(r));
    KV_TRY(kv_cli_device(kv_config_text(c, "device"), &r->ops));
    r->identity = kv_identity_make(job_name[r->job], c, r->info, &r->plan, r->ops,
                                   r->model ? r->model->hash : "");
    if (!r->identity) KV_RAISE(KV_E_INTERNAL, "out of memory");
    const char *output = kv_config_text(c, "output");
    if (strlen(output) >= sizeof r->folder)
        KV_RAISE(KV_E_USAGE, "--output: the path is longer than %zu characters",
                 sizeof r->folder - 1);
    if (output[0])
        snprintf(r->folder, sizeof r->folder, "%s", output);
    else
        KV_TRY(default_folder(r));
out:
    return st;
}

static kv_status save_evict(const run *r, const kv_row_result *result, const char *folder) {
    kv_status st = KV_OK, closed;
    char path[PATH_MAX + 16], item[KV_VARIANT_MAX + 64];
    kv_evict_writer *w = NULL;
    snprintf(path, sizeof path, "%s/evict.h5", folder);
    KV_TRY(kv_evict_writer_open(path, &w));
    for (size_t i = 0; i < r->plan.n_row; i++) {
        const kv_row *row = &r->plan.row[i];
        if (!result[i].evict_at) continue;
        snprintf(item, sizeof item, "%s%s%s", row->policy->name, row->variant[0] ? ":" : "",
                 row->variant);
        KV_TRY(kv_evict_writer_add(w, item, row->run.budget, r->info->n_layer, r->info->n_kv_head,
                                   r->info->n_token, result[i].evict_at));
    }
out:
    closed = w ? kv_evict_writer_close(w) : KV_OK;
    return st != KV_OK ? st : closed;
}

/* Where the time went: device and files until the first number, waiting for layers, dense sweeps, all rows together, model runs. */
static void put_times(const run *r, const kv_row_result *result, const kv_experiment *e,
                      json_t *time_of) {
    double rows = 0;
    for (size_t i = 0; i < r->plan.n_row; i++) rows += result[i].seconds;
    json_object_set_new(time_of, "prepare_seconds", json_real(r->prepare));
    json_object_set_new(time_of, "read_seconds", json_real(e->read_seconds));
    json_object_set_new(time_of, "row_seconds", json_real(rows));
    json_object_set_new(time_of, "accuracy_seconds", json_real(r->accuracy));
    kv_log(KV_LOG_INFO, job_name[r->job],
           "%.3f s: %.3f prepare, %.3f wait for layers, %.3f dense, %.3f policies and metrics, "
           "%.3f accuracy",
           kv_now() - r->start, r->prepare, e->read_seconds, e->dense_seconds, rows, r->accuracy);
}

static kv_status write_files(run *r, const kv_row_result *result, const kv_accuracy *accuracy,
                             const kv_experiment *e, const char *folder, json_t **summary) {
    kv_status st = KV_OK;
    json_t *manifest = NULL;
    kv_report report = {.config = r->config,
                        .trace = r->info,
                        .plan = &r->plan,
                        .result = result,
                        .accuracy = accuracy,
                        .has_metrics = r->job == KV_JOB_EXPERIMENT};
    if (!(*summary = kv_summary_make(&report))) KV_RAISE(KV_E_INTERNAL, "out of memory");
    KV_TRY(kv_json_write(*summary, folder, "summary.json"));
    KV_TRY(kv_metrics_csv_write(&report, folder));
    KV_TRY(kv_delay_csv_write(&report, folder));
    KV_TRY(kv_plot_data(&folder, 1, folder));
    if (kv_config_flag(r->config, "save_evict")) KV_TRY(save_evict(r, result, folder));
    manifest = kv_manifest_make(r->identity, r->info, r->start, e->dense_seconds);
    if (!manifest) KV_RAISE(KV_E_INTERNAL, "out of memory");
    put_times(r, result, e, json_object_get(manifest, "time"));
    KV_TRY(kv_json_write(manifest, folder, "manifest.json"));
out:
    json_decref(manifest);
    return st;
}

/* accuracy [n_row] */
static kv_status run_model(run *r, kv_accuracy *accuracy) {
    kv_status st = KV_OK;
    kv_accuracy_bench *bench = NULL;
    kv_recorded recorded = {0};
    KV_TRY(kv_accuracy_open_cached(r->model, r->info, r->ops, cache_folder, &bench));
    for (size_t i = 0; i < r->plan.n_row; i++) {
        const kv_row *row = &r->plan.row[i];
        const bool reads = kv_row_reads_recording(row) && r->info->scored;
        if (reads && !kv_accuracy_covers_model(bench))
            kv_log(KV_LOG_WARN, job_name[r->job],
                   "%s decides by what was recorded, and %s lacks layers of the model: no accuracy",
                   row->policy->name, r->info->path);
        else if (reads)
            KV_TRY(kv_recorded_read(r->trace, row, &recorded));
        KV_TRY(kv_accuracy_run(bench, row, reads ? &recorded : NULL, &accuracy[i]));
        kv_recorded_free(&recorded);
    }
out:
    kv_recorded_free(&recorded);
    kv_accuracy_close(bench);
    return st;
}

static kv_status compute(run *r, json_t **summary) {
    kv_status st = KV_OK;
    kv_staging staging = {0};
    kv_row_result *result = NULL; /* [n_row] */
    kv_accuracy *accuracy = NULL; /* [n_row] */
    KV_TRY(kv_staging_open(&staging, r->folder));
    KV_NEW(result, r->plan.n_row);
    if (r->model) KV_NEW(accuracy, r->plan.n_row);
    kv_experiment e = {.trace = r->trace,
                       .reader = r->reader,
                       .plan = &r->plan,
                       .ops = r->ops,
                       .cache_folder = cache_folder,
                       .timeline_folder = staging.folder,
                       .keep_evict_at = kv_config_flag(r->config, "save_evict"),
                       .decode = kv_config_flag(r->config, "decode")};
    if (r->job == KV_JOB_EXPERIMENT) KV_TRY(kv_experiment_run(&e, result));
    const double before = kv_now();
    if (r->model) KV_TRY(run_model(r, accuracy));
    r->accuracy = kv_now() - before;
    st = write_files(r, result, accuracy, &e, staging.folder, summary);
    if (st != KV_OK && kv_cache_drop_fresh() > 0) { /* the result goes before the cache */
        json_decref(*summary);
        *summary = NULL;
        st = write_files(r, result, accuracy, &e, staging.folder, summary);
    }
    KV_TRY(st);
    KV_TRY(kv_interrupt_poll());
    KV_TRY(kv_staging_commit(&staging));
    kv_cache_trim(cache_folder, cache_limit);
out:
    for (size_t i = 0; result && i < r->plan.n_row; i++) kv_row_result_free(&result[i]);
    free(result);
    free(accuracy);
    kv_staging_drop(&staging);
    return st;
}

static bool has_file(const run *r, const char *name) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", r->folder, name);
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0;
}

/* The tables that every run writes, if only their heads. */
static bool has_tables(const run *r) {
    static const char *const file[] = {
        "metrics.csv",     "delay.csv",    "curve.csv",   "points.csv",     "power.csv",
        "correlation.csv", "timeline.csv", "pattern.csv", "evict_kind.csv", "evict_ratio.csv"};
    enum { OF_BOTH = 6 }; /* the others hold decisions, which evaluate does not keep */
    const size_t n = r->job == KV_JOB_EXPERIMENT ? sizeof file / sizeof *file : OF_BOTH;
    for (size_t i = 0; i < n; i++)
        if (!has_file(r, file[i])) return false;
    return true;
}

/* The summary of a finished run of the same settings. A damaged one, or one that lost a file, is as good as none. */
static bool read_finished(const run *r, json_t **summary) {
    size_t i;
    json_t *row;
    if (!has_tables(r) || (kv_config_flag(r->config, "save_evict") && !has_file(r, "evict.h5")) ||
        !kv_manifest_matches(r->folder, r->identity, r->info) ||
        kv_json_read(r->folder, "summary.json", summary) != KV_OK)
        return false;
    const json_t *results = json_object_get(*summary, "results");
    bool whole = json_array_size(results) == r->plan.n_row;
    json_array_foreach(results, i, row) whole = whole && json_object_get(row, "policy");
    return whole;
}

kv_status kv_job_run(kv_job job, const kv_config *config) {
    kv_status st = KV_OK;
    json_t *summary = NULL;
    const bool quiet = kv_log_get_level() == KV_LOG_ERROR;
    run r = {.job = job, .config = config, .start = kv_now()};
    KV_TRY(prepare(&r));
    r.prepare = kv_now() - r.start;
    bool finished = read_finished(&r, &summary);
    if (finished && !kv_config_flag(config, "force")) {
        if (!quiet) fprintf(stderr, "these settings were run before; --force runs them again\n");
    } else {
        json_decref(summary);
        summary = NULL;
        KV_TRY(compute(&r, &summary));
    }
    if (!kv_config_text(config, "output")[0]) kv_link(r.folder, "results/latest");
    kv_table_print(summary, r.folder, !quiet);
    if (kv_config_flag(config, "decode") && job == KV_JOB_EXPERIMENT && !quiet)
        kv_decode_print(summary);
out:
    json_decref(summary);
    json_decref(r.identity);
    kv_plan_free(&r.plan);
    kv_model_free(r.model);
    kv_layer_reader_close(r.reader);
    kv_trace_close(r.trace);
    kv_gpu_settle();
    return st;
}
