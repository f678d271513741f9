/* Training traces in memory. */
#include "experiments/train_set.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "experiments/dense_cache.h"
#include "experiments/files.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/core/progress.h"
#include "reference/target.h"

/* Memory behind an unlinked file: clean shutdown needs nothing, and pages can leave when memory is short. */
static kv_status scratch_map(const char *folder, size_t bytes, void **out) {
    char path[PATH_MAX];
    int fd;
    kv_status st = folder ? kv_make_folders(folder) : KV_OK;
    if (st == KV_OK) st = kv_temporary_file(folder, path, &fd);
    if (st != KV_OK) return st;
    unlink(path);
    int failed = posix_fallocate(fd, 0, (off_t)bytes);
    *out = failed ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int error = failed ? failed : errno;
    close(fd);
    if (*out != MAP_FAILED) return KV_OK;
    *out = NULL;
    return KV_FAIL(KV_E_IO, "no room for %zu bytes of training inputs at %s: %s", bytes, path,
                   strerror(error));
}

static kv_status describe(const char *path, bool held_out, bool unknown_seeds, bool first,
                          kv_train_set *set, kv_train_trace *t) {
    kv_status st = KV_OK;
    kv_trace *trace = NULL;
    KV_TRY(kv_trace_open(path, &trace));
    const kv_trace_info *i = kv_trace_get(trace);
    if (!held_out && i->has_corpus && i->corpus_seed < UINT64_C(1) << 31)
        KV_RAISE(KV_E_USAGE,
                 "%s was generated from seed %llu; seeds below 2147483648 are held out for "
                 "evaluation: record training traces with larger seeds",
                 path, (unsigned long long)i->corpus_seed);
    if (!held_out && i->has_unknown_seed && !unknown_seeds)
        KV_RAISE(
            KV_E_USAGE,
            "%s holds the reasoning corpus but not the seed that made it (attribute seed of its "
            "requests): it may be held out for evaluation; record it again with `kvlab record`, "
            "or train on it all the same with --force",
            path);
    if (first) {
        set->n_layer = i->n_layer;
        set->n_q_head = i->n_q_head;
        set->n_kv_head = i->n_kv_head;
        set->head_dim = i->head_dim;
        set->d_model = i->d_model;
        set->scale = (float)i->softmax_scale;
        set->softcap = (float)i->logit_softcap;
        set->has_hidden = true;
        snprintf(set->model_hash, sizeof set->model_hash, "%s", i->model_hash);
        KV_NEW(set->layer_id, i->n_layer);
        memcpy(set->layer_id, i->layer_id, (size_t)i->n_layer * sizeof *set->layer_id);
    }
    bool same = set->n_layer == i->n_layer && set->n_q_head == i->n_q_head &&
                set->n_kv_head == i->n_kv_head && set->head_dim == i->head_dim &&
                memcmp(set->layer_id, i->layer_id, (size_t)i->n_layer * sizeof(int32_t)) == 0;
    if (!same || strcmp(set->model_hash, i->model_hash) != 0)
        KV_RAISE(KV_E_DATA,
                 "%s: %d layers, %d/%d heads of %d, model %s; the first trace has %d, %d/%d of %d, "
                 "model %s: training needs traces of one model",
                 path, i->n_layer, i->n_q_head, i->n_kv_head, i->head_dim, i->model_hash,
                 set->n_layer, set->n_q_head, set->n_kv_head, set->head_dim, set->model_hash);
    set->has_hidden &= i->has_hidden;
    if (i->longest > set->longest) set->longest = i->longest;
    t->path = kv_strdup(path);
    t->n_token = i->n_token;
    t->n_doc = i->n_document;
    t->type = i->type;
    KV_NEW(t->doc_first, i->n_document + 1);
    memcpy(t->doc_first, i->doc_first, (size_t)(i->n_document + 1) * sizeof *t->doc_first);
    snprintf(t->hash, sizeof t->hash, "%s", i->content_hash);
    if (!t->path) KV_RAISE(KV_E_INTERNAL, "out of memory");
    if (!t->hash[0]) KV_TRY(kv_trace_content_hash(trace, t->hash));
out:
    kv_trace_close(trace);
    return st;
}

kv_status kv_train_set_open(const char *const *path, int32_t n_path, int32_t held_out,
                            bool unknown_seeds, kv_train_set *out) {
    kv_status st = KV_OK;
    memset(out, 0, sizeof *out);
    KV_NEW(out->trace, n_path);
    out->n_trace = n_path;
    for (int32_t i = 0; i < n_path; i++)
        KV_TRY(
            describe(path[i], i >= n_path - held_out, unknown_seeds, i == 0, out, &out->trace[i]));
out:
    if (st != KV_OK) kv_train_set_free(out);
    return st;
}

void kv_train_set_free(kv_train_set *set) {
    for (int32_t i = 0; set->trace && i < set->n_trace; i++) {
        kv_train_trace *t = &set->trace[i];
        if (t->kv) munmap(t->kv, t->mapped);
        free(t->path);
        free(t->doc_first);
        free(t->target);
    }
    free(set->trace);
    free(set->layer_id);
    memset(set, 0, sizeof *set);
}

/* r [n_kv_head][stride] of one document. */
static kv_status target_of(const kv_span *span, const kv_train_need *need, float *r) {
    kv_status st = KV_OK;
    kv_dense dense = {0};
    kv_dense_request request = {.sinks = need->run->sinks,
                                .window = need->run->window,
                                .n_power = 1,
                                .power = {need->power}};
    KV_TRY(kv_dense_cached(need->ops, span, &request, need->cache_folder, &dense));
    KV_TRY(kv_target_log(span, &dense, need->power, need->mean, need->run->eps, r));
    if (need->sparse) {
        const kv_policy_input input = {.span = span, .run = need->run, .ops = need->ops};
        double log_gamma[span->n_kv_head];
        for (int32_t h = 0; h < span->n_kv_head; h++) log_gamma[h] = need->log_gamma;
        KV_TRY(kv_target_sparse(&input, need->power, need->mean, log_gamma, r));
    }
out:
    kv_dense_free(&dense);
    return st;
}

static void store_lanes(const kv_train_set *set, const kv_trace_layer *l, int32_t layer,
                        kv_train_trace *t) {
    size_t size = kv_dtype_size(t->type), d = (size_t)set->head_dim;
    for (int32_t h = 0; h < set->n_kv_head; h++)
        for (int64_t i = 0; i < t->n_token; i++) {
            size_t from = ((size_t)h * (size_t)t->n_token + (size_t)i) * d;
            size_t to = (((size_t)layer * (size_t)set->n_kv_head + (size_t)h) * (size_t)t->n_token +
                         (size_t)i) *
                        2 * d;
            kv_narrow(t->type, l->k + from, (char *)t->kv + to * size, d);
            kv_narrow(t->type, l->v + from, (char *)t->kv + (to + d) * size, d);
        }
    size_t rows = (size_t)set->n_q_head * (size_t)t->n_token * d;
    if (t->q) kv_narrow(t->type, l->q, (char *)t->q + (size_t)layer * rows * size, rows);
    size_t states = (size_t)t->n_token * (size_t)set->d_model;
    if (t->hidden)
        kv_narrow(KV_BF16, l->hidden, (uint16_t *)t->hidden + (size_t)layer * states, states);
}

static kv_status load_trace(kv_train_set *set, const kv_train_need *need, kv_train_trace *t,
                            kv_progress *progress, double *done) {
    kv_status st = KV_OK;
    kv_trace *trace = NULL;
    kv_trace_layer l = {0};
    size_t size = kv_dtype_size(t->type), tokens = (size_t)t->n_token * (size_t)set->n_layer;
    size_t kv = tokens * (size_t)(2 * set->n_kv_head * set->head_dim) * size;
    size_t q = need->queries ? tokens * (size_t)(set->n_q_head * set->head_dim) * size : 0;
    size_t hidden = need->hidden ? tokens * (size_t)set->d_model * sizeof(uint16_t) : 0;
    t->mapped = kv + q + hidden;
    KV_TRY(scratch_map(need->cache_folder, t->mapped, &t->kv));
    if (q) t->q = (char *)t->kv + kv;
    if (hidden) t->hidden = (char *)t->kv + kv + q;
    if (need->target) KV_NEW(t->target, (int64_t)set->n_layer * set->n_kv_head * t->n_token);
    KV_TRY(kv_trace_open(t->path, &trace));
    for (int32_t layer = 0; layer < set->n_layer; layer++) {
        KV_TRY(kv_interrupt_poll());
        KV_TRY(kv_trace_read_layer(trace, layer, need->hidden, &l));
        store_lanes(set, &l, layer, t);
        double start = kv_now();
        for (int32_t doc = 0; need->target && doc < t->n_doc; doc++) {
            kv_span span;
            kv_trace_span(trace, &l, layer, doc, &span);
            KV_TRY(target_of(&span, need,
                             t->target + (int64_t)layer * set->n_kv_head * t->n_token +
                                 t->doc_first[doc]));
        }
        set->dense_seconds += kv_now() - start;
        kv_trace_layer_free(&l);
        kv_progress_update(progress, ++*done);
    }
out:
    kv_trace_layer_free(&l);
    kv_trace_close(trace);
    return st;
}

kv_status kv_train_set_load(kv_train_set *set, const kv_train_need *need) {
    kv_status st = KV_OK;
    kv_progress progress;
    double done = 0;
    if (need->hidden && !set->has_hidden)
        return KV_FAIL(KV_E_DATA, "a training trace has no hidden states, which these settings "
                                  "read: record with --hidden, or train on input=kv");
    kv_progress_begin(&progress, "traces and targets", (double)set->n_trace * set->n_layer);
    for (int32_t i = 0; i < set->n_trace; i++) {
        st = load_trace(set, need, &set->trace[i], &progress, &done);
        if (st == KV_E_INTERRUPTED) goto out;
        if (st != KV_OK) {
            st = kv_error_context(st, "%s", set->trace[i].path);
            goto out;
        }
    }
out:
    kv_progress_end(&progress);
    return st;
}

void kv_train_lane_kv(const kv_train_set *set, const kv_train_trace *t, int32_t layer, int32_t head,
                      float *x) {
    size_t n = (size_t)t->n_token * 2 * (size_t)set->head_dim;
    size_t lane = (size_t)(layer * set->n_kv_head + head);
    kv_widen(t->type, (const char *)t->kv + lane * n * kv_dtype_size(t->type), x, n);
}
