/* Provenance of a run. */
#include "experiments/manifest.h"

#include <cblas.h>
#include <hdf5.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <xxhash.h>

#include "experiments/cli.h"
#include "experiments/results.h"
#include "experiments/version.h"
#include "kernels/kernels.h"
#include "reference/core/cpu.h"
#include "reference/core/log.h"
#include "reference/model.h"

/* Size and time of a file, for inputs that carry no hash of their own. */
static json_t *file_stamp(const char *path) {
    struct stat info;
    char text[96];
    if (stat(path, &info) != 0) return json_null();
    snprintf(text, sizeof text, "%lld bytes, %lld.%09ld", (long long)info.st_size,
             (long long)info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
    return json_string(text);
}

static json_t *row_identity(const kv_row *row) {
    json_t *o = json_object(), *params = json_object();
    for (size_t i = 0; i < row->params.n; i++) {
        char text[PATH_MAX];
        kv_params_format(&row->params, i, text, sizeof text);
        json_object_set_new(params, row->params.spec[i].name, kv_json_text(text));
        if (strcmp(row->params.spec[i].name, "path") == 0) /* decisions of a foreign engine */
            json_object_set_new(o, "file", file_stamp(text));
    }
    json_object_set_new(o, "policy", json_string(row->policy->name));
    json_object_set_new(o, "budget", json_integer(row->run.budget));
    json_object_set_new(o, "params", params);
    if (row->weights) {
        char hex[33];
        snprintf(hex, sizeof hex, "%016" PRIx64 "%016" PRIx64, row->weights->tensors.hash[0],
                 row->weights->tensors.hash[1]);
        json_object_set_new(o, "weights", kv_json_text(row->weights->name));
        json_object_set_new(o, "weights_xxh3", json_string(hex));
    }
    return o;
}

json_t *kv_identity_make(const char *command, const kv_config *config, const kv_trace_info *trace,
                         const kv_plan *plan, const kv_ops *ops, const char *model_hash) {
    static const char *const settings[] = {"sinks",        "window",        "seed",       "eps",
                                           "oracle_delta", "target_reduce", "save_evict", "decode"};
    json_t *o = json_object(), *rows = json_array(), *run = json_object();
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        for (size_t j = 0; j < config->run.n; j++) {
            char text[512];
            if (strcmp(config->run.spec[j].name, settings[i]) != 0) continue;
            kv_params_format(&config->run, j, text, sizeof text);
            json_object_set_new(run, settings[i], json_string(text));
        }
    for (size_t i = 0; i < plan->n_row; i++)
        json_array_append_new(rows, row_identity(&plan->row[i]));
    json_object_set_new(o, "command", json_string(command));
    json_object_set_new(o, "trace_xxh3", kv_json_text(trace->content_hash));
    if (!trace->content_hash[0]) json_object_set_new(o, "trace_stamp", file_stamp(trace->path));
    json_object_set_new(o, "run", run);
    json_object_set_new(o, "rows", rows);
    json_object_set_new(o, "device", json_string(ops->name));
    if (json_object_set_new(o, "model_xxh3", json_string(model_hash)) == 0) return o;
    json_decref(o);
    return NULL;
}

void kv_identity_hash(const json_t *identity, char hex[33]) {
    char *text = json_dumps(identity, JSON_COMPACT | JSON_SORT_KEYS);
    XXH128_hash_t d = XXH3_128bits(text ? text : "", text ? strlen(text) : 0);
    snprintf(hex, 33, "%016" PRIx64 "%016" PRIx64, (uint64_t)d.high64, (uint64_t)d.low64);
    free(text);
}

static json_t *build_of(void) {
    const kv_version *v = &kv_version_build;
    json_t *o = json_object();
    json_object_set_new(o, "version", json_string(v->number));
    json_object_set_new(o, "commit", json_string(v->commit));
    json_object_set_new(o, "dirty", json_boolean(v->dirty));
    json_object_set_new(o, "sources", json_string(v->sources));
    json_object_set_new(o, "compiler", json_string(v->compiler));
    json_object_set_new(o, "flags", json_string(v->flags));
    return o;
}

static json_t *libraries(void) {
    unsigned major = 0, minor = 0, release = 0;
    char text[128];
    json_t *o = json_object();
    H5get_libversion(&major, &minor, &release);
    snprintf(text, sizeof text, "%u.%u.%u", major, minor, release);
    json_object_set_new(o, "hdf5", json_string(text));
    json_object_set_new(o, "jansson", json_string(jansson_version_str()));
    snprintf(text, sizeof text, "%u.%u.%u", XXH_VERSION_MAJOR, XXH_VERSION_MINOR,
             XXH_VERSION_RELEASE);
    json_object_set_new(o, "xxhash", json_string(text));
    json_object_set_new(o, "openblas", json_string(openblas_get_config()));
    return o;
}

/* Null for a run on the CPU. */
static json_t *gpu_name(const json_t *identity) {
    const char *device = json_string_value(json_object_get(identity, "device"));
    kv_gpu *gpu = NULL;
    kv_gpu_info info;
    char text[192];
    if (!device || strcmp(device, "gpu") != 0 || kv_gpu_shared(&gpu) != KV_OK) return json_null();
    kv_gpu_describe(gpu, &info);
    snprintf(text, sizeof text, "%s, compute capability %d.%d, %s kernels", info.name,
             info.cc_major, info.cc_minor, info.hopper ? "wgmma" : "portable");
    return json_string(text);
}

static json_t *machine(const json_t *identity) {
    json_t *o = json_object();
    const char *before = getenv("KV_BLAS_CORRECTED");
    json_object_set_new(o, "cpu", json_string(kv_cpu_model()));
    json_object_set_new(o, "gpu", gpu_name(identity));
    json_object_set_new(o, "isa", json_string(kv_isa_name(kv_cpu_isa())));
    json_object_set_new(o, "threads", json_integer(kv_threads()));
    json_object_set_new(o, "openblas_core", json_string(kv_blas_core()));
    json_object_set_new(o, "openblas_core_corrected_from",
                        before ? json_string(before) : json_null());
    return o;
}

static json_t *clock_time(time_t t) {
    char text[32];
    struct tm utc;
    gmtime_r(&t, &utc);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
    return json_string(text);
}

json_t *kv_manifest_make(const json_t *identity, const kv_trace_info *trace, double start,
                         double dense_seconds) {
    char hex[33];
    json_t *o = json_object(), *time_of = json_object();
    double elapsed = kv_now() - start;
    kv_identity_hash(identity, hex);
    json_object_set_new(time_of, "start", clock_time(time(NULL) - (time_t)elapsed));
    json_object_set_new(time_of, "end", clock_time(time(NULL)));
    json_object_set_new(time_of, "seconds", json_real(elapsed));
    json_object_set_new(time_of, "dense_seconds", json_real(dense_seconds));
    json_object_set_new(o, "schema", json_integer(1));
    json_object_set_new(o, "status", json_string("complete"));
    json_object_set_new(o, "config_xxh3", json_string(hex));
    json_object_set_new(o, "config", json_deep_copy(identity));
    json_object_set_new(o, "trace", kv_json_text(trace->path));
    json_object_set_new(o, "trace_id",
                        trace->trace_id ? kv_json_text(trace->trace_id) : json_null());
    json_object_set_new(o, "trace_file", file_stamp(trace->path));
    json_object_set_new(o, "command_line", kv_json_text(kv_cli_command_line()));
    json_object_set_new(o, "build", build_of());
    json_object_set_new(o, "libraries", libraries());
    json_object_set_new(o, "machine", machine(identity));
    if (json_object_set_new(o, "time", time_of) == 0) return o;
    json_decref(o);
    return NULL;
}

bool kv_manifest_matches(const char *folder, const json_t *identity, const kv_trace_info *trace) {
    char hex[33];
    json_t *m = NULL, *stamp = file_stamp(trace->path);
    kv_identity_hash(identity, hex);
    bool same = kv_json_read(folder, "manifest.json", &m) == KV_OK;
    if (same) {
        const char *found = json_string_value(json_object_get(m, "config_xxh3"));
        const char *sources =
            json_string_value(json_object_get(json_object_get(m, "build"), "sources"));
        same = found && sources && strcmp(found, hex) == 0 &&
               strcmp(sources, kv_version_build.sources) == 0 &&
               json_equal(json_object_get(m, "trace_file"), stamp);
    }
    json_decref(m);
    json_decref(stamp);
    return same;
}
