/* Loading scorer weights (contract.md 2), whole documents and the decode stream. */
#include "reference/scorer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/num.h"
#include "reference/tensors.h"

static const char *meta_or(const kv_tensors *set, const char *key, const char *otherwise) {
    const char *value = kv_tensors_meta(set, key);
    return value ? value : otherwise;
}

static bool is(const char *value, const char *word) { return strcmp(value, word) == 0; }

static const kv_tensor *part_of_layer(const kv_tensors *set, int32_t layer, const char *part) {
    char name[96];
    snprintf(name, sizeof name, "layers.%d.%s", layer, part);
    return kv_tensors_find(set, name);
}

/* Width of the second axis of a matrix, 0 if the file has no such tensor or one without elements. */
static int32_t width_of(const kv_tensors *set, int32_t layer, const char *part) {
    const kv_tensor *t = part_of_layer(set, layer, part);
    const bool matrix = t && t->n_dim == 3 && t->n_element > 0 && t->shape[1] <= INT32_MAX;
    return matrix ? (int32_t)t->shape[1] : 0;
}

static kv_status check_file(const kv_policy_input *input, const char *policy) {
    const kv_tensors *set = input->weights;
    if (!set)
        return KV_FAIL(KV_E_USAGE, "%s needs weights: --weights %s=FILE, or train them first",
                       policy, policy);
    const char *made_for = meta_or(set, "policy", policy), *window = kv_tensors_meta(set, "window");
    if (!is(made_for, policy))
        return KV_FAIL(KV_E_DATA, "%s: these weights are for policy %s, not %s", set->path,
                       made_for, policy);
    long long w = 0;
    if (!window || kv_parse_int(window, 1, INT32_MAX, &w) != KV_OK)
        return KV_FAIL(KV_E_DATA, "%s: metadata 'window' is %s; expected a whole number >= 1",
                       set->path, window ? window : "missing");
    if (w != input->run->window)
        return KV_FAIL(KV_E_DATA,
                       "%s: trained with window %lld, the run has %d; use --window %lld or train "
                       "for this window",
                       set->path, w, input->run->window, w);
    int32_t known = input->span->n_layer;
    for (int32_t i = 0; i < set->n_tensor; i++) {
        int layer = -1;
        if (sscanf(set->tensor[i].name, "layers.%d.", &layer) == 1 && known > 0 && layer >= known)
            return KV_FAIL(KV_E_DATA,
                           "%s: holds layer %d, but the model has %d layers: weights of another "
                           "model",
                           set->path, layer, known);
    }
    return KV_OK;
}

static kv_status read_spec(const kv_policy_input *input, bool recurrent, kv_net_spec *spec) {
    const kv_tensors *set = input->weights;
    const kv_span *span = input->span;
    const char *delay = meta_or(set, "delay", "1");
    *spec = (kv_net_spec){
        .recurrent = recurrent,
        .delay = !is(delay, "0") && !is(delay, "off"),
        .norm = is(meta_or(set, "norm", "rms"), "rms"),
        .sigmoid_gate = is(meta_or(set, "gate", "exp"), "sigmoid"),
        .hidden_input = is(meta_or(set, "input", "kv"), "hidden"),
        .hidden_gate = is(meta_or(set, "gate_input", "feature"), "hidden"),
        .window = input->run->window,
        .n_feature = width_of(set, span->layer_id, "feature.weight"),
        .n_key = width_of(set, span->layer_id, "phi_q.weight"),
        .n_value = width_of(set, span->layer_id, "phi_v.weight"),
        .n_mlp = width_of(set, span->layer_id, "mlp.w1"),
    };
    if ((spec->hidden_input || (recurrent && spec->hidden_gate)) && span->d_model < 1)
        return KV_FAIL(KV_E_DATA,
                       "%s: these weights read hidden states, and the trace has none; record it "
                       "with hidden states or train with input=kv",
                       set->path);
    spec->n_hidden = spec->hidden_input || spec->hidden_gate ? span->d_model : 0;
    spec->n_input = spec->hidden_input ? span->d_model : 2 * span->head_dim;
    bool complete = recurrent ? spec->n_key > 0 && spec->n_value > 0 : spec->n_mlp > 0;
    if (!complete)
        return KV_FAIL(KV_E_DATA,
                       "%s: tensor layers.%d.%s is missing, empty or not three-dimensional",
                       set->path, span->layer_id, recurrent ? "phi_q.weight" : "mlp.w1");
    return KV_OK;
}

static kv_status read_part(const kv_tensors *set, int32_t layer, const char *part, int32_t heads,
                           int32_t rows, int32_t cols, float *out) {
    char name[96];
    snprintf(name, sizeof name, "layers.%d.%s", layer, part);
    bool scalar = rows == 1 && cols == 0;
    const int64_t shape[3] = {heads, rows, cols};
    const kv_tensor *t;
    kv_status st = kv_tensors_get(set, name, scalar ? 1 : cols ? 3 : 2, shape, &t);
    return st == KV_OK ? kv_tensor_read(set, t, out) : st;
}

static void transpose(int32_t rows, int32_t cols, const float *in, float *out) {
    for (int32_t i = 0; i < rows; i++)
        for (int32_t j = 0; j < cols; j++) out[(int64_t)j * rows + i] = in[(int64_t)i * cols + j];
}

/* Products take rows of tokens times a [in][out] matrix; so every matrix is stored transposed in its own place, the three
 * projections and the two gates as one matrix each. */
static void arrange(const kv_net_spec *spec, const kv_net_layout *layout, const float *in,
                    float *out) {
    int32_t wide = kv_net_feature_width(spec), gate = layout->part[KV_NET_GATE_I_W].rows;
    int64_t feature = layout->part[KV_NET_FEATURE_W].at, phi = layout->part[KV_NET_PHI_Q].at;
    int64_t gates = layout->part[KV_NET_GATE_I_W].at, mlp = layout->part[KV_NET_MLP_W1].at;
    memcpy(out, in, (size_t)layout->n_param * sizeof *out);
    if (spec->recurrent) {
        transpose(spec->n_feature, spec->n_input, in + feature, out + feature);
        transpose(2 * spec->n_key + spec->n_value, wide, in + phi, out + phi);
        transpose(2, gate, in + gates, out + gates);
    }
    transpose(spec->n_mlp, spec->n_input, in + mlp, out + mlp);
}

static kv_status read_theta(const kv_policy_input *input, double *log_gamma) {
    kv_status st = KV_OK;
    const kv_span *span = input->span;
    float *theta = NULL;
    KV_NEW(theta, span->n_kv_head);
    KV_TRY(read_part(input->weights, span->layer_id, "theta", span->n_kv_head, 1, 0, theta));
    for (int32_t h = 0; h < span->n_kv_head; h++) log_gamma[h] = kv_net_log_gamma(theta[h], NULL);
out:
    free(theta);
    return st;
}

kv_status kv_scorer_open(const kv_policy_input *input, const char *policy, kv_scorer *out) {
    kv_status st = KV_OK;
    const kv_span *span = input->span;
    float *part = NULL, *flat = NULL;
    memset(out, 0, sizeof *out);
    KV_TRY(check_file(input, policy));
    KV_TRY(read_spec(input, is(policy, "kvpop"), &out->spec));
    kv_net_describe(&out->spec, &out->layout);
    out->n_kv_head = span->n_kv_head;
    out->head_dim = span->head_dim;
    int64_t n = out->layout.n_param, heads = span->n_kv_head;
    KV_NEW(out->param, heads * n);
    KV_NEW(out->log_gamma, heads);
    KV_NEW(part, heads * n);
    KV_NEW(flat, heads * n);
    for (int p = 0; p < KV_NET_PARTS; p++) {
        int64_t size = kv_net_part_size(&out->layout, (kv_net_part)p);
        if (size == 0) continue;
        KV_TRY(read_part(input->weights, span->layer_id, out->layout.part[p].name, span->n_kv_head,
                         out->layout.part[p].rows, out->layout.part[p].cols, part));
        for (int64_t h = 0; h < heads; h++)
            memcpy(flat + h * n + out->layout.part[p].at, part + h * size,
                   (size_t)size * sizeof *part);
    }
    for (int64_t h = 0; h < heads; h++)
        arrange(&out->spec, &out->layout, flat + h * n, out->param + h * n);
    KV_TRY(read_theta(input, out->log_gamma));
out:
    free(part);
    free(flat);
    if (st != KV_OK) kv_scorer_close(out);
    return st;
}

void kv_scorer_close(kv_scorer *s) {
    free(s->param);
    free(s->log_gamma);
    memset(s, 0, sizeof *s);
}

kv_status kv_scorer_target(const kv_policy_input *input, double *power, bool *target_mean,
                           double *log_gamma) {
    const kv_tensors *set = input->weights;
    if (!set) return KV_FAIL(KV_E_USAGE, "no weights: the target they were trained on is unknown");
    const char *text = meta_or(set, "target_power", "2");
    *power = INFINITY;
    if (!is(text, "max") && (kv_parse_real(text, power) != KV_OK || !(*power > 0)))
        return KV_FAIL(KV_E_DATA,
                       "%s: metadata 'target_power' is '%s', expected max or a number "
                       "above 0",
                       set->path, text);
    *target_mean = is(meta_or(set, "target_reduce", "max"), "mean");
    return read_theta(input, log_gamma);
}

static kv_status score_head(const kv_scorer *s, const kv_span *span, int32_t head, float *rhat) {
    kv_status st = KV_OK;
    kv_scorer_lane *lane = NULL;
    int32_t window = s->spec.window, n = span->n_token;
    KV_TRY(kv_scorer_lane_open(s, head, &lane));
    for (int32_t first = 0; first < n; first += KV_SCORER_ROWS) {
        int32_t rows = n - first < KV_SCORER_ROWS ? n - first : KV_SCORER_ROWS;
        int64_t at = ((int64_t)head * span->stride + first) * span->head_dim;
        kv_scorer_lane_rows(lane, rows, span->k + at, span->v + at,
                            span->hidden ? span->hidden + (int64_t)first * span->d_model : NULL);
        for (int32_t i = 0; i < rows; i++) {
            int32_t u = kv_scorer_lane_step(lane);
            if (u >= window) rhat[u - window] = kv_scorer_lane_score(lane, u - window);
        }
    }
    for (int32_t t = n > window ? n - window : 0; t < n; t++)
        rhat[t] = kv_scorer_lane_score(lane, t);
out:
    kv_scorer_lane_close(lane);
    return st;
}

static kv_status score_span(const kv_policy_input *input, const char *policy, float *rhat) {
    kv_scorer s;
    const kv_span *span = input->span;
    kv_status st = kv_scorer_open(input, policy, &s), failed = KV_OK;
    if (st != KV_OK) return st;
#pragma omp parallel for schedule(dynamic)
    for (int32_t h = 0; h < span->n_kv_head; h++) {
        kv_status one = score_head(&s, span, h, rhat + (int64_t)h * span->stride);
        if (one != KV_OK) {
#pragma omp atomic write
            failed = one;
        }
    }
    kv_scorer_close(&s);
    return failed == KV_OK ? KV_OK
                           : KV_FAIL(failed, "%s: out of memory while scoring %d tokens", policy,
                                     span->n_token);
}

kv_status kv_mlp_scores(const kv_policy_input *input, float *rhat) {
    return score_span(input, "kvpop_mlp", rhat);
}

kv_status kv_mlstm_scores(const kv_policy_input *input, float *rhat) {
    return score_span(input, "kvpop", rhat);
}

kv_status kv_scorer_priority(const kv_policy_input *input,
                             kv_status (*scores)(const kv_policy_input *input, float *rhat),
                             float *priority) {
    kv_status st = KV_OK;
    const kv_span *span = input->span;
    double *log_gamma = NULL;
    KV_NEW(log_gamma, span->n_kv_head);
    KV_TRY(scores(input, priority));
    KV_TRY(read_theta(input, log_gamma));
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) {
            float *at = priority + h * span->stride + t;
            *at = kv_static_priority(*at, t, log_gamma[h]);
        }
out:
    free(log_gamma);
    return st;
}

typedef struct stream {
    kv_scorer scorer;
    kv_scorer_lane **lane; /* [n_kv_head] */
} stream;

kv_status kv_scorer_stream_open(const kv_policy_input *input, const char *policy, void **state) {
    kv_status st = KV_OK;
    stream *s = NULL;
    KV_NEW(s, 1);
    KV_TRY(kv_scorer_open(input, policy, &s->scorer));
    KV_NEW(s->lane, s->scorer.n_kv_head);
    for (int32_t h = 0; h < s->scorer.n_kv_head; h++)
        KV_TRY(kv_scorer_lane_open(&s->scorer, h, &s->lane[h]));
    *state = s;
out:
    if (st != KV_OK) kv_scorer_stream_close(s);
    return st;
}

kv_status kv_scorer_stream_push(void *state, int32_t u, const float *k, const float *v,
                                const float *hidden) {
    stream *s = state;
    for (int32_t h = 0; h < s->scorer.n_kv_head; h++) {
        int64_t at = (int64_t)h * s->scorer.head_dim;
        kv_scorer_lane_rows(s->lane[h], 1, k + at, v + at, hidden);
        if (kv_scorer_lane_step(s->lane[h]) != u)
            return KV_FAIL(KV_E_INTERNAL, "token %d was pushed out of order", u);
    }
    return KV_OK;
}

kv_status kv_scorer_stream_priority(void *state, int32_t t, float *out) {
    stream *s = state;
    for (int32_t h = 0; h < s->scorer.n_kv_head; h++)
        out[h] = kv_static_priority(kv_scorer_lane_score(s->lane[h], t), t, s->scorer.log_gamma[h]);
    return KV_OK;
}

void kv_scorer_stream_close(void *state) {
    stream *s = state;
    if (!s) return;
    for (int32_t h = 0; s->lane && h < s->scorer.n_kv_head; h++) kv_scorer_lane_close(s->lane[h]);
    free(s->lane);
    kv_scorer_close(&s->scorer);
    free(s);
}
