/* Checkpoints of a training run: everything that the next step depends on, as safetensors. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "experiments/train_loop.h"
#include "traces/safetensors.h"

enum { TENSORS = 8 };

/* The arrays in the order of their names below; n[i] elements each, 0: absent. */
static void list_arrays(const kv_train_state *s, float *array[TENSORS], int64_t n[TENSORS]) {
    float *all[TENSORS] = {s->param, s->m1, s->m2, s->best_param,
                           s->theta, s->t1, s->t2, s->best_theta};
    for (int i = 0; i < TENSORS; i++) {
        bool best = i % 4 == 3;
        array[i] = all[i];
        n[i] = (i < 4 ? s->n_lane * s->n_param : s->theta ? s->n_lane : 0);
        if (best && isinf(s->best)) n[i] = 0;
    }
}

static const char *const array_name[TENSORS] = {"param", "m1",      "m2",      "best",
                                                "theta", "theta_1", "theta_2", "theta_best"};

kv_status kv_train_save(const kv_train_plan *plan, const kv_train_state *s) {
    kv_tensor_out out[TENSORS];
    float *array[TENSORS];
    int64_t n[TENSORS];
    int32_t count = 0;
    char step[24], best[32], best_step[24];
    list_arrays(s, array, n);
    for (int i = 0; i < TENSORS; i++)
        if (n[i] > 0)
            out[count++] = (kv_tensor_out){
                .name = array_name[i], .n_dim = 1, .shape = {n[i]}, .data = array[i]};
    snprintf(step, sizeof step, "%lld", (long long)s->step);
    snprintf(best, sizeof best, "%.17g", s->best);
    snprintf(best_step, sizeof best_step, "%lld", (long long)s->best_step);
    const char *meta[] = {"identity", plan->identity, "step",    step, "best",
                          best,       "best_step",    best_step, NULL};
    kv_status st = kv_safetensors_write(plan->checkpoint, out, count, meta);
    return st == KV_OK ? st : kv_error_context(st, "checkpoint");
}

/* A count of steps in [0, most]. */
static kv_status read_step(const char *path, const kv_tensors *set, const char *key, int64_t most,
                           int64_t *out) {
    const char *text = kv_tensors_meta(set, key);
    char *end = NULL;
    errno = 0;
    const long long n = text ? strtoll(text, &end, 10) : -1;
    if (!text || end == text || *end || errno || n < 0 || n > most)
        return KV_FAIL(KV_E_DATA,
                       "%s: damaged: %s is '%s', expected a step from 0 to %lld; remove it", path,
                       key, text ? text : "missing", (long long)most);
    *out = n;
    return KV_OK;
}

static kv_status read_loss(const char *path, const kv_tensors *set, double *out) {
    const char *text = kv_tensors_meta(set, "best");
    char *end = NULL;
    *out = text ? strtod(text, &end) : NAN;
    if (!text || end == text || *end || isnan(*out))
        return KV_FAIL(KV_E_DATA, "%s: damaged: best is '%s', expected a loss; remove it", path,
                       text ? text : "missing");
    return KV_OK;
}

kv_status kv_train_restore(const kv_train_plan *plan, kv_train_state *s, bool *found) {
    kv_status st = KV_OK;
    kv_tensors set = {0};
    float *array[TENSORS];
    int64_t n[TENSORS];
    *found = false;
    if (plan->force || access(plan->checkpoint, F_OK) != 0) return KV_OK;
    st = kv_safetensors_open(plan->checkpoint, &set);
    if (st != KV_OK)
        KV_TRY(kv_error_context(st, "the checkpoint cannot be continued; remove it, or start over "
                                    "with --force"));
    const char *identity = kv_tensors_meta(&set, "identity");
    if (!identity || strcmp(identity, plan->identity) != 0)
        KV_RAISE(KV_E_USAGE,
                 "%s belongs to a training with other settings, traces or seed; finish that one, "
                 "remove the file, or start over with --force",
                 plan->checkpoint);
    KV_TRY(read_step(plan->checkpoint, &set, "step", plan->steps, &s->step));
    KV_TRY(read_step(plan->checkpoint, &set, "best_step", s->step, &s->best_step));
    KV_TRY(read_loss(plan->checkpoint, &set, &s->best));
    list_arrays(s, array, n);
    for (int i = 0; i < TENSORS; i++) {
        const kv_tensor *t;
        if (n[i] == 0) continue;
        KV_TRY(kv_tensors_get(&set, array_name[i], 1, &n[i], &t));
        KV_TRY(kv_tensor_read(&set, t, array[i]));
    }
    *found = true;
out:
    kv_tensors_free(&set);
    return st;
}
