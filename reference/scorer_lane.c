/* One KV head's scorer, token by token: features by blocks of rows, the mLSTM memory by steps (maths.md 5, 6.2, 6.3). */
#include <math.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/gemm.h"
#include "reference/scorer.h"

struct kv_scorer_lane {
    const kv_scorer *s;
    const float *param;         /* [layout.n_param], matrices transposed */
    int32_t n_project;          /* q~, k~, v~ of one row */
    int32_t next, taken, given; /* next position; rows of the block already absorbed, rows in it */
    /* block, KV_SCORER_ROWS rows each */
    float *x, *feature, *hidden_layer, *project, *gate, *own; /* own: score of the MLP */
    /* the last window + 1 tokens, slot = position modulo window + 1 */
    float *ring_query, *ring_own;
    /* memory: state [n_key][n_value + 1], the last column is the normaliser; log scale m */
    float *state, *scratch; /* scratch [n_value + 1] */
    double m;
};

kv_status kv_scorer_lane_open(const kv_scorer *s, int32_t head, kv_scorer_lane **out) {
    kv_status st = KV_OK;
    kv_scorer_lane *lane = NULL;
    const kv_net_spec *spec = &s->spec;
    int64_t rows = KV_SCORER_ROWS, slots = spec->window + 1;
    KV_NEW(lane, 1);
    lane->s = s;
    lane->param = s->param + head * s->layout.n_param;
    lane->n_project = 2 * spec->n_key + spec->n_value;
    KV_NEW(lane->x, rows * spec->n_input);
    KV_NEW(lane->feature, rows * spec->n_feature);
    KV_NEW(lane->hidden_layer, rows * spec->n_mlp);
    KV_NEW(lane->project, rows * lane->n_project);
    KV_NEW(lane->gate, rows * 2);
    KV_NEW(lane->own, rows);
    KV_NEW(lane->ring_query, slots * spec->n_key);
    KV_NEW(lane->ring_own, slots);
    KV_NEW(lane->state, (int64_t)spec->n_key * (spec->n_value + 1));
    KV_NEW(lane->scratch, spec->n_value + 1);
    *out = lane;
out:
    if (st != KV_OK) kv_scorer_lane_close(lane);
    return st;
}

void kv_scorer_lane_close(kv_scorer_lane *lane) {
    if (!lane) return;
    float *owned[] = {lane->x,     lane->feature, lane->hidden_layer, lane->project,
                      lane->gate,  lane->own,     lane->ring_query,   lane->ring_own,
                      lane->state, lane->scratch};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    free(lane);
}

static const float *part(const kv_scorer_lane *lane, kv_net_part p) {
    return lane->param + lane->s->layout.part[p].at;
}

/* out [n][width] = silu(x [n][n_input] W + b) */
static void activated(int32_t n, int32_t width, int32_t n_input, const float *x, const float *w,
                      const float *bias, float *out) {
    kv_gemm_f32(KV_NN, n, width, n_input, x, n_input, w, width, false, out, width);
    for (int32_t i = 0; i < n; i++)
        for (int32_t j = 0; j < width; j++) out[(int64_t)i * width + j] += bias[j];
    kv_silu_f32((int64_t)n * width, out, out, NULL);
}

void kv_scorer_lane_rows(kv_scorer_lane *lane, int32_t n, const float *k, const float *v,
                         const float *hidden) {
    const kv_net_spec *spec = &lane->s->spec;
    int32_t d = lane->s->head_dim, n_input = spec->n_input;
    const float *x = hidden;
    lane->given = n;
    lane->taken = 0;
    if (!spec->hidden_input) {
        x = lane->x;
        for (int32_t i = 0; i < n; i++) {
            memcpy(lane->x + (int64_t)i * n_input, k + (int64_t)i * d, (size_t)d * sizeof *k);
            memcpy(lane->x + (int64_t)i * n_input + d, v + (int64_t)i * d, (size_t)d * sizeof *v);
        }
    }
    memset(lane->own, 0, (size_t)n * sizeof *lane->own);
    if (spec->n_mlp) {
        activated(n, spec->n_mlp, n_input, x, part(lane, KV_NET_MLP_W1), part(lane, KV_NET_MLP_B1),
                  lane->hidden_layer);
        kv_gemm_f32(KV_NN, n, 1, spec->n_mlp, lane->hidden_layer, spec->n_mlp,
                    part(lane, KV_NET_MLP_W2), 1, false, lane->own, 1);
    }
    if (!spec->recurrent) return;
    int32_t wide = kv_net_feature_width(spec);
    const float *f = x;
    if (spec->n_feature) {
        activated(n, wide, n_input, x, part(lane, KV_NET_FEATURE_W), part(lane, KV_NET_FEATURE_B),
                  lane->feature);
        f = lane->feature;
    }
    kv_gemm_f32(KV_NN, n, lane->n_project, wide, f, wide, part(lane, KV_NET_PHI_Q), lane->n_project,
                false, lane->project, lane->n_project);
    int32_t gate_width = spec->hidden_gate ? spec->n_hidden : wide;
    kv_gemm_f32(KV_NN, n, 2, gate_width, spec->hidden_gate ? hidden : f, gate_width,
                part(lane, KV_NET_GATE_I_W), 2, false, lane->gate, 2);
}

static double log_sigmoid(double x) { return fmin(x, 0) - log1p(exp(-fabs(x))); }

static double capped(double pre) { return 15 * tanh(pre / 15); }

/* The memory takes in one token (maths.md 6.2). */
static void absorb(kv_scorer_lane *lane, const float *project, const float *gate) {
    const kv_net_spec *spec = &lane->s->spec;
    int32_t nv = spec->n_value;
    double in = capped((double)gate[0] + *part(lane, KV_NET_GATE_I_B));
    double keep = log_sigmoid(capped((double)gate[1] + *part(lane, KV_NET_GATE_F_B)));
    if (spec->sigmoid_gate) in = log_sigmoid(in);
    double m = fmax(keep + lane->m, in);
    float fade = (float)exp(keep + lane->m - m), write = (float)exp(in - m);
    const float *key = project + spec->n_key, *value = key + spec->n_key;
    lane->m = m;
    for (int32_t a = 0; a < spec->n_key; a++) {
        float *row = lane->state + (int64_t)a * (nv + 1), strength = write * key[a];
        for (int32_t c = 0; c < nv; c++) row[c] = fade * row[c] + strength * value[c];
        row[nv] = fade * row[nv] + strength;
    }
}

/* a . silu(h) for the query of one token */
static float read_memory(const kv_scorer_lane *lane, const float *query) {
    const kv_net_spec *spec = &lane->s->spec;
    int32_t nv = spec->n_value;
    float *h = lane->scratch;
    const float *a = part(lane, KV_NET_READOUT);
    memset(h, 0, (size_t)(nv + 1) * sizeof *h);
    for (int32_t i = 0; i < spec->n_key; i++) {
        const float *row = lane->state + (int64_t)i * (nv + 1);
        for (int32_t c = 0; c <= nv; c++) h[c] += query[i] * row[c];
    }
    double scale = 1 / sqrt((double)spec->n_key), size = 0;
    for (int32_t c = 0; c < nv; c++) size += (scale * h[c]) * (scale * h[c]);
    double by = spec->norm ? sqrt(size / nv + 1e-6 * exp(-2 * lane->m))
                           : fmax(fabs(scale * h[nv]), exp(-lane->m));
    for (int32_t c = 0; c < nv; c++) h[c] = (float)(scale * h[c] / by);
    kv_silu_f32(nv, h, h, NULL);
    double score = 0;
    for (int32_t c = 0; c < nv; c++) score += (double)a[c] * h[c];
    return (float)score;
}

int32_t kv_scorer_lane_step(kv_scorer_lane *lane) {
    const kv_net_spec *spec = &lane->s->spec;
    int32_t u = lane->next++, i = lane->taken++, slot = u % (spec->window + 1);
    lane->ring_own[slot] = lane->own[i];
    if (!spec->recurrent) return u;
    const float *project = lane->project + (int64_t)i * lane->n_project;
    float *query = lane->ring_query + (int64_t)slot * spec->n_key;
    memcpy(query, project, (size_t)spec->n_key * sizeof *query);
    absorb(lane, project, lane->gate + 2 * i);
    if (!spec->delay) lane->ring_own[slot] += read_memory(lane, query);
    return u;
}

float kv_scorer_lane_score(const kv_scorer_lane *lane, int32_t t) {
    const kv_net_spec *spec = &lane->s->spec;
    int32_t slot = t % (spec->window + 1);
    float own = lane->ring_own[slot];
    if (!spec->recurrent || !spec->delay || t != lane->next - 1 - spec->window) return own;
    return own + read_memory(lane, lane->ring_query + (int64_t)slot * spec->n_key);
}
