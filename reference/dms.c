/* Dynamic Memory Sparsification: inputs, relaxation, schedule, gate logits from weights (maths.md 7). */
#include "reference/dms.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "reference/tensors.h"

enum { ROWS = 256 };

int64_t kv_dms_param(const kv_dms_spec *spec) {
    return (spec->n_mlp ? (int64_t)spec->n_mlp * (spec->n_input + 2) : spec->n_input) + 1;
}

void kv_dms_input(const kv_dms_spec *spec, int32_t n, int32_t head_dim, const float *k,
                  const float *v, int64_t stride, const float *hidden, float *x) {
    for (int32_t t = 0; t < n; t++) {
        float *row = x + (int64_t)t * spec->n_input;
        if (spec->source == KV_DMS_CHANNEL) {
            row[0] = k[t * stride + spec->channel];
        } else if (spec->source == KV_DMS_KV) {
            memcpy(row, k + t * stride, (size_t)head_dim * sizeof *row);
            memcpy(row + head_dim, v + t * stride, (size_t)head_dim * sizeof *row);
        } else {
            const float *state = hidden + (int64_t)t * spec->n_input;
            double size = 0;
            for (int32_t j = 0; j < spec->n_input; j++) size += (double)state[j] * (double)state[j];
            double by = 1 / sqrt(size / spec->n_input + 1e-6);
            for (int32_t j = 0; j < spec->n_input; j++) row[j] = (float)(by * state[j]);
        }
    }
}

double kv_dms_noise(uint64_t seed, uint32_t step, uint32_t lane, uint32_t token) {
    double u = kv_rand_uniform(seed, step, lane, token, 2);
    return log(u) - log1p(-u);
}

double kv_dms_alpha(double logit, double noise, double temp, double *log_keep) {
    double y = (logit + noise) / temp;
    *log_keep = -(fmax(y, 0) + log1p(exp(-fabs(y))));
    return 1 / (1 + exp(-y));
}

double kv_dms_target(double ratio, int64_t step, int64_t ramp) {
    double share = ramp > 0 ? fmin(1, (double)step / (double)ramp) : 1;
    return 1 - 1 / (1 + (ratio - 1) * share);
}

static const char *meta_or(const kv_tensors *set, const char *key, const char *otherwise) {
    const char *value = kv_tensors_meta(set, key);
    return value ? value : otherwise;
}

static kv_status read_spec(const kv_policy_input *input, kv_dms_spec *spec, int32_t *shift) {
    static const char *const words[] = {"kv", "hidden", "channel"};
    const kv_tensors *set = input->weights;
    const kv_span *span = input->span;
    char name[64];
    const char *source = meta_or(set, "source", "kv");
    long long window = 0, channel = 0, late = 1;
    memset(spec, 0, sizeof *spec);
    int found = -1;
    for (int i = 0; i < 3; i++)
        if (strcmp(source, words[i]) == 0) found = i;
    bool good =
        found >= 0 && strcmp(meta_or(set, "policy", "dms"), "dms") == 0 &&
        kv_parse_int(meta_or(set, "window", ""), 1, INT32_MAX, &window) == KV_OK &&
        kv_parse_int(meta_or(set, "channel", "0"), 0, span->head_dim - 1, &channel) == KV_OK &&
        kv_parse_int(meta_or(set, "shift", "1"), 0, 1, &late) == KV_OK &&
        kv_parse_real(meta_or(set, "scale", "1"), &spec->scale) == KV_OK;
    if (!good)
        return KV_FAIL(KV_E_DATA,
                       "%s: metadata policy %s, window %s, source %s, channel %s, shift %s, scale "
                       "%s; expected dms, a whole number >= 1, kv, hidden or channel, 0..%d, 0 or "
                       "1, a number, as `kvlab train --policy dms` writes them",
                       set->path, meta_or(set, "policy", "dms"), meta_or(set, "window", "missing"),
                       source, meta_or(set, "channel", "0"), meta_or(set, "shift", "1"),
                       meta_or(set, "scale", "1"), span->head_dim - 1);
    if (window != input->run->window)
        return KV_FAIL(KV_E_DATA,
                       "%s: trained with window %lld, the run has %d; use --window %lld "
                       "or train for this window",
                       set->path, window, input->run->window, window);
    spec->source = (kv_dms_source)found;
    spec->channel = (int32_t)channel;
    *shift = (int32_t)late;
    const int32_t width[] = {2 * span->head_dim, span->d_model, 1};
    spec->n_input = width[found];
    if (spec->source == KV_DMS_HIDDEN && !span->hidden)
        return KV_FAIL(KV_E_DATA,
                       "%s: these weights read hidden states, and the trace has none; "
                       "record it with --hidden",
                       set->path);
    snprintf(name, sizeof name, "layers.%d.gate.w1", span->layer_id);
    const kv_tensor *t = kv_tensors_find(set, name);
    if (!t) return KV_OK; /* a linear gate */
    /* Checked here, since its width is what memory is taken for: one that fits is in the file. */
    const bool wide = t->n_dim == 3 && t->shape[1] > 0 && t->shape[1] <= INT32_MAX;
    const int64_t shape[] = {span->n_kv_head, wide ? t->shape[1] : 1, spec->n_input};
    spec->n_mlp = (int32_t)shape[1];
    return kv_tensors_get(set, name, 3, shape, &t);
}

/* Parameters of all heads, head by head: param [n_kv_head][kv_dms_param]. */
static kv_status read_param(const kv_policy_input *input, const kv_dms_spec *spec, float *param) {
    kv_status st = KV_OK;
    int64_t heads = input->span->n_kv_head, n = kv_dms_param(spec), at = 0;
    int64_t m = spec->n_mlp, ni = spec->n_input;
    const struct {
        const char *name;
        int64_t shape[3];
        int32_t n_dim;
        int64_t size;
    } mlp[] = {{"w1", {heads, m, ni}, 3, m * ni},
               {"b1", {heads, m}, 2, m},
               {"w2", {heads, m}, 2, m},
               {"bias", {heads}, 1, 1}},
      linear[] = {{"weight", {heads, ni}, 2, ni}, {"bias", {heads}, 1, 1}}, *part;
    float *all = NULL;
    KV_NEW(all, heads * n);
    for (int i = 0; i < (m ? 4 : 2); i++) {
        char name[64];
        const kv_tensor *t;
        part = m ? &mlp[i] : &linear[i];
        snprintf(name, sizeof name, "layers.%d.gate.%s", input->span->layer_id, part->name);
        KV_TRY(kv_tensors_get(input->weights, name, part->n_dim, part->shape, &t));
        KV_TRY(kv_tensor_read(input->weights, t, all));
        for (int64_t h = 0; h < heads; h++)
            memcpy(param + h * n + at, all + h * part->size, (size_t)part->size * sizeof *all);
        at += part->size;
    }
out:
    free(all);
    return st;
}

kv_status kv_dms_gates_open(const kv_policy_input *input, kv_dms_gates *out) {
    kv_status st = KV_OK;
    memset(out, 0, sizeof *out);
    KV_TRY(read_spec(input, &out->spec, &out->shift));
    KV_NEW(out->param, input->span->n_kv_head * kv_dms_param(&out->spec));
    KV_TRY(read_param(input, &out->spec, out->param));
out:
    if (st != KV_OK) kv_dms_gates_close(out);
    return st;
}

void kv_dms_gates_close(kv_dms_gates *gates) {
    free(gates->param);
    gates->param = NULL;
}

kv_status kv_dms_gate(const kv_policy_input *input, float *logit, int32_t *shift) {
    kv_status st = KV_OK;
    const kv_span *span = input->span;
    kv_dms_gates gates;
    kv_net_tape_f32 *tape = NULL;
    float *x = NULL;
    KV_TRY(kv_dms_gates_open(input, &gates));
    *shift = gates.shift;
    int64_t n = kv_dms_param(&gates.spec);
    KV_NEW(x, ROWS * gates.spec.n_input);
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t first = 0; first < span->n_token; first += ROWS) {
            int32_t rows = span->n_token - first < ROWS ? span->n_token - first : ROWS;
            int64_t at = (h * span->stride + first) * span->head_dim;
            const float *hidden =
                span->hidden ? span->hidden + (int64_t)first * span->d_model : NULL;
            kv_dms_input(&gates.spec, rows, span->head_dim, span->k + at, span->v + at,
                         span->head_dim, hidden, x);
            KV_TRY(kv_dms_logits_f32(&gates.spec, gates.param + h * n, rows, x, &tape,
                                     logit + h * span->stride + first));
        }
out:
    kv_net_tape_free_f32(tape);
    kv_dms_gates_close(&gates);
    free(x);
    return st;
}

int64_t kv_dms_kept(const kv_dms_cache *cache, int64_t n_lane, const float *logit, double offset) {
    const int64_t n_token = cache->doc_first[cache->n_doc], from = cache->budget;
    int64_t seen = 0;
    for (int64_t lane = 0; lane < n_lane; lane++)
        for (int32_t doc = 0; doc < cache->n_doc; doc++) {
            const float *own = logit + lane * n_token + cache->doc_first[doc];
            int64_t n = cache->doc_first[doc + 1] - cache->doc_first[doc];
            for (int64_t i = 0; i < n; i++) {
                bool marked = i + cache->shift < n && (double)own[i + cache->shift] + offset > 0;
                int64_t end = marked && i + cache->window < n ? i + cache->window : n;
                int64_t begin = i > from ? i : from;
                if (end > begin) seen += end - begin;
            }
        }
    return seen;
}

int64_t kv_dms_counted(const kv_dms_cache *cache, int64_t n_lane) {
    int64_t counted = 0;
    for (int32_t doc = 0; doc < cache->n_doc; doc++) {
        int64_t n = cache->doc_first[doc + 1] - cache->doc_first[doc];
        if (n > cache->budget) counted += n - cache->budget;
    }
    return n_lane * counted;
}

void kv_dms_gap(int64_t n, const float *logit, double offset, float *below, float *above) {
    for (int64_t i = 0; i < n; i++)
        if ((double)logit[i] + offset > 0)
            *above = fminf(*above, logit[i]);
        else
            *below = fmaxf(*below, logit[i]);
}
