/* Scorers: golden vectors maths.md 12.4, 12.5, 12.9; forward and every gradient against the naive form; chunk length; step form =
 * chunkwise form; batch = stream, bit for bit; weights that do not fit. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "policies/registry.h"
#include "reference/core/cpu.h"
#include "reference/core/rand.h"
#include "reference/gemm.h"
#include "reference/ops.h"
#include "reference/replay.h"
#include "reference/scorer.h"
#include "tests/naive/naive_case.h"
#include "tests/naive/naive_scorer.h"
#include "traces/safetensors.h"
#include "traces/scorer_file.h"

static double norm_of(int64_t n, const double *a) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * a[i];
    return sqrt(sum);
}

static double distance(int64_t n, const double *a, const double *b) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return sqrt(sum);
}

/* x of maths.md 12.5 and 12.9 */
enum { GOLDEN_S = 40, GOLDEN_IN = 6 };
static void golden_x(double *x) {
    for (int t = 0; t < GOLDEN_S; t++)
        for (int j = 0; j < GOLDEN_IN; j++)
            x[t * GOLDEN_IN + j] = sin(1.3 * t + .7 * j + .2 * t * j);
}

typedef struct golden {
    const char *name;
    kv_net_spec spec;
    kv_net_part order[KV_NET_PARTS]; /* of the parameters p_n */
    int n_order;
    double loss, rhat[4], bias; /* rhat of tokens 0, 1, `token`, 34; output bias, ours has none */
    int token;
    struct {
        kv_net_part part;
        int at;
        double value, tolerance;
    } grad[12];
} golden;

static void check_golden(const golden *g) {
    kv_net_layout l;
    kv_net_describe(&g->spec, &l);
    double *param = calloc((size_t)l.n_param, sizeof *param), x[GOLDEN_S * GOLDEN_IN];
    double *grad = calloc((size_t)l.n_param, sizeof *grad), e[GOLDEN_S], rhat[GOLDEN_S],
           naive[GOLDEN_S];
    int n = 0;
    golden_x(x);
    for (int i = 0; i < g->n_order; i++)
        for (int64_t j = 0; j < kv_net_part_size(&l, g->order[i]); j++, n++)
            param[l.part[g->order[i]].at + j] = .8 * sin(2.1 * n + .5);
    param[l.part[KV_NET_GATE_I_B].at] = .3;
    param[l.part[KV_NET_GATE_F_B].at] = 2;
    double bias = g->bias != 0 ? .8 * sin(2.1 * n + .5) : 0, d_bias = 0, loss = 0;
    const int64_t doc[2] = {0, GOLDEN_S};
    kv_net_input_f64 in = {.n_token = GOLDEN_S, .x = x, .n_doc = 1, .doc_first = doc, .chunk = 8};
    for (int t = 0; t < GOLDEN_S; t++) e[t] = t <= 34 ? cos(.9 * t + .3) : 0;
    naive_scorer(&g->spec, param, &in, naive);
    for (int t = 0; t < GOLDEN_S; t++) {
        loss += e[t] * (naive[t] + bias);
        d_bias += e[t];
    }
    const int at[4] = {0, 1, g->token, 34};
    for (int i = 0; i < 4; i++)
        cr_expect_float_eq(naive[at[i]] + bias, g->rhat[i], 1e-11, "%s: rhat[%d] = %.12f", g->name,
                           at[i], naive[at[i]] + bias);
    cr_expect_float_eq(loss, g->loss, 1e-11, "%s: L = %.12f", g->name, loss);
    if (g->bias != 0) cr_expect_float_eq(d_bias, g->bias, 1e-9, "%s: db = %.10f", g->name, d_bias);
    kv_net_tape_f64 *tape = NULL;
    cr_assert_eq(kv_net_forward_f64(&g->spec, param, &in, &tape, rhat), KV_OK);
    cr_assert_eq(kv_net_backward_f64(&g->spec, param, &in, tape, e, grad), KV_OK);
    cr_expect_lt(distance(GOLDEN_S, rhat, naive), 1e-12, "%s: forward", g->name);
    for (int i = 0; g->grad[i].value != 0; i++) {
        double got = grad[l.part[g->grad[i].part].at + g->grad[i].at];
        cr_expect_float_eq(got, g->grad[i].value, g->grad[i].tolerance, "%s: d %s[%d] = %.12f",
                           g->name, l.part[g->grad[i].part].name, g->grad[i].at, got);
    }
    kv_net_tape_free_f64(tape);
    free(param);
    free(grad);
}

Test(scorer, golden_vectors) {
    const golden plain = {
        .name = "12.5",
        .spec =
            {.recurrent = true, .delay = true, .n_input = 6, .n_key = 4, .n_value = 3, .window = 5},
        .order = {KV_NET_PHI_Q, KV_NET_PHI_K, KV_NET_PHI_V, KV_NET_GATE_I_W, KV_NET_GATE_I_B,
                  KV_NET_GATE_F_W, KV_NET_GATE_F_B, KV_NET_READOUT},
        .n_order = 8,
        .loss = -0.146201186385,
        .rhat = {-0.721396056757, -0.720442257506, -0.742293981092, -0.721997049599},
        .token = 17,
        .bias = 0.0960528316,
        .grad = {{KV_NET_PHI_Q, 0, 0.0197468921, 1e-9},
                 {KV_NET_PHI_K, 1 * 6 + 2, -0.0004132536, 1e-9},
                 {KV_NET_PHI_V, 2 * 6 + 5, 0.0569115389, 1e-9},
                 {KV_NET_GATE_I_B, 0, 0.0031739778, 1e-9},
                 {KV_NET_GATE_F_B, 0, 0.0544835874, 1e-9},
                 {KV_NET_READOUT, 0, -2.2806538392, 1e-9}},
    };
    const golden shipped = {
        .name = "12.9",
        .spec = {.recurrent = true,
                 .delay = true,
                 .norm = true,
                 .n_input = 6,
                 .n_feature = 5,
                 .n_key = 4,
                 .n_value = 3,
                 .n_mlp = 4,
                 .window = 5},
        .order = {KV_NET_FEATURE_W, KV_NET_FEATURE_B, KV_NET_PHI_Q, KV_NET_PHI_K, KV_NET_PHI_V,
                  KV_NET_GATE_I_W, KV_NET_GATE_I_B, KV_NET_GATE_F_W, KV_NET_GATE_F_B,
                  KV_NET_READOUT, KV_NET_MLP_W1, KV_NET_MLP_B1, KV_NET_MLP_W2},
        .n_order = 13,
        .loss = 2.995867041617,
        .rhat = {-0.975991525919, -1.069327928759, 0.584976483163, 0.846186016544},
        .token = 2,
        .grad = {{KV_NET_FEATURE_W, 0, 0.981725875, 1e-8},
                 {KV_NET_FEATURE_B, 0, 3.310549071, 1e-8},
                 {KV_NET_PHI_Q, 0, -2.565160410, 1e-8},
                 {KV_NET_PHI_K, 0, -3.012620016, 1e-8},
                 {KV_NET_PHI_V, 0, -0.041037772, 1e-8},
                 {KV_NET_GATE_I_W, 0, 0.223298465, 1e-8},
                 {KV_NET_GATE_F_W, 0, 0.005846482, 1e-8},
                 {KV_NET_GATE_F_B, 0, 0.065232832, 1e-8},
                 {KV_NET_READOUT, 0, 1.850633259, 1e-8},
                 {KV_NET_MLP_W1, 0, 0.115704949, 1e-8},
                 {KV_NET_MLP_B1, 0, 0.065784835, 1e-8}},
    };
    check_golden(&plain);
    check_golden(&shipped);
    /* 12.4, with b2 = .1 added by hand */
    const kv_net_spec spec = {.n_input = 4, .n_mlp = 3};
    double param[12 + 3 + 3], x[4], grad[18], rhat, e = 1;
    const int64_t doc[2] = {0, 1};
    for (int i = 0; i < 12; i++) param[i] = .5 * sin(1.1 * i + .2);
    for (int i = 0; i < 3; i++) {
        param[12 + i] = .1 * (i - 1);
        param[15 + i] = .7 * cos(.9 * i);
    }
    for (int i = 0; i < 4; i++) x[i] = cos(.6 * i + .1);
    kv_net_input_f64 in = {.n_token = 1, .x = x, .n_doc = 1, .doc_first = doc, .chunk = 1};
    kv_net_tape_f64 *tape = NULL;
    cr_assert_eq(kv_net_forward_f64(&spec, param, &in, &tape, &rhat), KV_OK);
    cr_assert_eq(kv_net_backward_f64(&spec, param, &in, tape, &e, grad), KV_OK);
    cr_expect_float_eq(rhat + .1, 0.219157170135, 1e-11, "12.4: rhat = %.12f", rhat + .1);
    cr_expect_float_eq(grad[1 * 4 + 2], 0.016152638781, 1e-11, "12.4: dW1[1][2] = %.12f", grad[6]);
    cr_expect_float_eq(grad[15], 0.321907208385, 1e-11, "12.4: dW2[0] = %.12f", grad[15]);
    kv_net_tape_free_f64(tape);
}

/* The settings that every combination is tested on. */
typedef struct setting {
    char name[96];
    kv_net_spec spec;
    double *param, *x, *hidden;
    int64_t n_param, doc[4];
    kv_net_input_f64 in;
} setting;

enum { CASE_TOKENS = 33, SETTINGS = 1 + 128 };

/* 0: the MLP; then 7 switches of the recurrent form. */
static setting make_setting(int which) {
    int bits = which - 1;
    setting s = {.spec = {.n_input = 5, .n_mlp = 3, .window = 4}};
    if (which > 0)
        s.spec = (kv_net_spec){.recurrent = true,
                               .delay = bits & 1,
                               .norm = bits & 2,
                               .n_feature = bits & 4 ? 4 : 0,
                               .n_mlp = bits & 8 ? 3 : 0,
                               .sigmoid_gate = bits & 16,
                               .hidden_gate = bits & 32,
                               .hidden_input = bits & 64,
                               .n_input = bits & 64 ? 7 : 5,
                               .n_hidden = 7,
                               .n_key = 3,
                               .n_value = 2,
                               .window = 4};
    snprintf(s.name, sizeof s.name,
             "recurrent %d delay %d norm %d feature %d mlp %d sigmoid %d hidden gate %d input %d",
             s.spec.recurrent, s.spec.delay, s.spec.norm, s.spec.n_feature, s.spec.n_mlp,
             s.spec.sigmoid_gate, s.spec.hidden_gate, s.spec.hidden_input);
    kv_net_layout l;
    kv_net_describe(&s.spec, &l);
    s.n_param = l.n_param;
    s.param = malloc((size_t)s.n_param * sizeof *s.param);
    s.x = malloc(CASE_TOKENS * (size_t)s.spec.n_input * sizeof *s.x);
    s.hidden = malloc(CASE_TOKENS * 7 * sizeof *s.hidden);
    uint32_t id = (uint32_t)which;
    for (int64_t i = 0; i < s.n_param; i++)
        s.param[i] = .4 * kv_rand_normal(5, id, (uint32_t)i, 0, 0);
    if (s.spec.recurrent) s.param[l.part[KV_NET_GATE_F_B].at] += 1;
    for (int64_t i = 0; i < CASE_TOKENS * s.spec.n_input; i++)
        s.x[i] = kv_rand_normal(5, id, (uint32_t)i, 1, 0);
    for (int64_t i = 0; i < CASE_TOKENS * 7; i++)
        s.hidden[i] = kv_rand_normal(5, id, (uint32_t)i, 2, 0);
    return s;
}

/* Documents of 20, 1 and 12 tokens: longer than the window, shorter, and cut by chunks in every way. */
static void wire(setting *s) {
    const int64_t doc[4] = {0, 20, 21, CASE_TOKENS};
    memcpy(s->doc, doc, sizeof doc);
    s->in = (kv_net_input_f64){.n_token = CASE_TOKENS,
                               .x = s->x,
                               .hidden = s->hidden,
                               .n_doc = 3,
                               .doc_first = s->doc,
                               .chunk = 8};
}

static void free_setting(setting *s) {
    free(s->param);
    free(s->x);
    free(s->hidden);
}

/* 1e-6 of the gradient's norm; the floor is the rounding of the differences themselves (with the norm, a common factor on all
 * writes cancels, so the input gate's bias has almost no gradient). */
Test(scorer, forward_and_gradients_of_every_setting) {
    const int32_t chunk[] = {1, 5, 8, CASE_TOKENS, 64};
    double e[CASE_TOKENS];
    for (int t = 0; t < CASE_TOKENS; t++) e[t] = cos(.9 * t + .3);
    for (int which = 0; which < SETTINGS; which++) {
        setting s = make_setting(which);
        wire(&s);
        kv_net_layout l;
        kv_net_describe(&s.spec, &l);
        double want[CASE_TOKENS], rhat[CASE_TOKENS];
        double *difference = malloc((size_t)s.n_param * sizeof *difference);
        double *grad = malloc((size_t)s.n_param * sizeof *grad);
        naive_scorer(&s.spec, s.param, &s.in, want);
        naive_scorer_gradient(&s.spec, s.param, &s.in, e, difference);
        for (int c = 0; c < 5; c++) {
            kv_net_tape_f64 *tape = NULL;
            s.in.chunk = chunk[c];
            cr_assert_eq(kv_net_forward_f64(&s.spec, s.param, &s.in, &tape, rhat), KV_OK);
            cr_assert_eq(kv_net_backward_f64(&s.spec, s.param, &s.in, tape, e, grad), KV_OK);
            kv_net_tape_free_f64(tape);
            cr_expect_lt(distance(CASE_TOKENS, rhat, want), 1e-11 * norm_of(CASE_TOKENS, want),
                         "%s, chunk %d: forward off by %g", s.name, chunk[c],
                         distance(CASE_TOKENS, rhat, want));
            for (int p = 0; p < KV_NET_PARTS; p++) {
                int64_t n = kv_net_part_size(&l, (kv_net_part)p), at = l.part[p].at;
                double off = distance(n, grad + at, difference + at);
                cr_expect_leq(off, 1e-6 * norm_of(n, difference + at) + 1e-10,
                              "%s, chunk %d: gradient of %s off by %g of %g", s.name, chunk[c],
                              l.part[p].name, off, norm_of(n, difference + at));
            }
        }
        free(difference);
        free(grad);
        free_setting(&s);
    }
}

/* fp32 rounds 24 bits; sums here have some hundred terms, and the readout divides small differences: 2e-5 of the norm. */
Test(scorer, single_precision_follows_double) {
    double e[CASE_TOKENS];
    float e32[CASE_TOKENS], rhat32[CASE_TOKENS];
    for (int t = 0; t < CASE_TOKENS; t++) e[t] = e32[t] = cosf(.9f * (float)t + .3f);
    for (int which = 0; which < SETTINGS; which++) {
        setting s = make_setting(which);
        wire(&s);
        int64_t nx = CASE_TOKENS * s.spec.n_input, nh = CASE_TOKENS * 7;
        float *param = malloc((size_t)s.n_param * sizeof *param), *x = malloc((size_t)nx * 4),
              *hidden = malloc((size_t)nh * 4), *grad32 = malloc((size_t)s.n_param * 4);
        double *grad = malloc((size_t)s.n_param * sizeof *grad), rhat[CASE_TOKENS], off = 0,
               off_grad = 0;
        for (int64_t i = 0; i < s.n_param; i++) s.param[i] = param[i] = (float)s.param[i];
        for (int64_t i = 0; i < nx; i++) s.x[i] = x[i] = (float)s.x[i];
        for (int64_t i = 0; i < nh; i++) s.hidden[i] = hidden[i] = (float)s.hidden[i];
        kv_net_input_f32 in = {.n_token = CASE_TOKENS,
                               .x = x,
                               .hidden = hidden,
                               .n_doc = 3,
                               .doc_first = s.doc,
                               .chunk = 8};
        kv_net_tape_f32 *tape32 = NULL;
        kv_net_tape_f64 *tape = NULL;
        cr_assert_eq(kv_net_forward_f32(&s.spec, param, &in, &tape32, rhat32), KV_OK);
        cr_assert_eq(kv_net_backward_f32(&s.spec, param, &in, tape32, e32, grad32), KV_OK);
        cr_assert_eq(kv_net_forward_f64(&s.spec, s.param, &s.in, &tape, rhat), KV_OK);
        cr_assert_eq(kv_net_backward_f64(&s.spec, s.param, &s.in, tape, e, grad), KV_OK);
        for (int t = 0; t < CASE_TOKENS; t++) off += pow(rhat32[t] - rhat[t], 2);
        for (int64_t i = 0; i < s.n_param; i++) off_grad += pow(grad32[i] - grad[i], 2);
        cr_expect_lt(sqrt(off), 2e-5 * norm_of(CASE_TOKENS, rhat), "%s: rhat off by %g", s.name,
                     sqrt(off) / norm_of(CASE_TOKENS, rhat));
        cr_expect_lt(sqrt(off_grad), 2e-5 * norm_of(s.n_param, grad), "%s: gradient off by %g",
                     s.name, sqrt(off_grad) / norm_of(s.n_param, grad));
        kv_net_tape_free_f32(tape32);
        kv_net_tape_free_f64(tape);
        free(param);
        free(x);
        free(hidden);
        free(grad32);
        free(grad);
        free_setting(&s);
    }
}

/* Random weights of `which` setting for two KV heads of layer 3, through a file. */
enum { HEADS = 2, LAYER = 3, DIM = 3, MODEL = 7 };
static kv_net_spec file_spec(int which) {
    setting s = make_setting(which);
    kv_net_spec spec = s.spec;
    free_setting(&s);
    spec.n_input = spec.hidden_input ? MODEL : 2 * DIM;
    return spec;
}

static kv_tensors write_and_open(const kv_net_spec *spec, const char *policy, const char *path,
                                 float **param) {
    kv_net_layout l;
    kv_net_describe(spec, &l);
    const int32_t layer_id[1] = {LAYER};
    const float theta[HEADS] = {4, -2};
    *param = malloc((size_t)(HEADS * l.n_param) * sizeof **param);
    for (int64_t i = 0; i < HEADS * l.n_param; i++)
        (*param)[i] = (float)(.7 * kv_rand_normal(9, (uint32_t)i, 0, 0, 0));
    kv_scorer_file f = {.policy = policy,
                        .spec = *spec,
                        .n_layer = 1,
                        .n_kv_head = HEADS,
                        .layer_id = layer_id,
                        .param = *param,
                        .theta = theta,
                        .budget = 20,
                        .sinks = 2,
                        .target_power = 2};
    kv_tensors set;
    cr_assert_eq(kv_scorer_file_write(path, &f), KV_OK, "%s", kv_error_message());
    cr_assert_eq(kv_safetensors_open(path, &set), KV_OK, "%s", kv_error_message());
    return set;
}

static char *scratch_file(void) {
    char *path = strdup("/tmp/kv_test_scorer_XXXXXX");
    int fd = mkstemp(path);
    cr_assert_geq(fd, 0);
    close(fd);
    return path;
}

typedef struct span_case {
    naive_case c;
    float hidden[200 * MODEL];
} span_case;

static span_case *make_span(int32_t n) {
    span_case *s = malloc(sizeof *s);
    s->c = naive_case_random(3, n, n + 3, HEADS, HEADS, DIM, 1);
    for (int i = 0; i < 200 * MODEL; i++)
        s->hidden[i] = (float)kv_rand_normal(4, (uint32_t)i, 0, 0, 0);
    s->c.span.layer_id = LAYER;
    s->c.span.n_layer = LAYER + 1;
    s->c.span.hidden = s->hidden;
    s->c.span.d_model = MODEL;
    return s;
}

/* The step form in use against the chunkwise form in training (fp32, other order of sums: 2e-5), then priority hooks against the
 * decode stream, bit for bit, and the whole replay against decoding over slots. */
Test(scorer, steps_chunks_and_streams_agree) {
    char *path = scratch_file();
    for (int which = 0; which < SETTINGS; which++) {
        kv_net_spec spec = file_spec(which);
        const char *name = which ? "kvpop" : "kvpop_mlp";
        const kv_policy *policy = kv_policy_find(name);
        float *param;
        kv_tensors set = write_and_open(&spec, name, path, &param);
        kv_net_layout l;
        kv_net_describe(&spec, &l);
        for (int round = 0; round < 2; round++) {
            span_case *sc = make_span(round ? 3 : 120);
            kv_span *span = &sc->c.span;
            kv_run run = {.budget = 20, .sinks = 2, .window = spec.window};
            kv_params params;
            cr_assert_eq(kv_params_init(&params, policy->params), KV_OK);
            kv_policy_input input = {
                .span = span, .run = &run, .params = &params, .weights = &set, .ops = &kv_ops_cpu};
            int64_t n = span->n_token, stride = span->stride;
            float *rhat = calloc((size_t)(HEADS * stride), sizeof *rhat),
                  *priority = calloc((size_t)(HEADS * stride), sizeof *priority),
                  *x = malloc((size_t)(n * spec.n_input) * sizeof *x),
                  *chunked = malloc((size_t)n * sizeof *chunked);
            kv_status st = which ? kv_mlstm_scores(&input, rhat) : kv_mlp_scores(&input, rhat);
            cr_assert_eq(st, KV_OK, "%s", kv_error_message());
            for (int h = 0; h < HEADS; h++) {
                for (int64_t t = 0; t < n; t++)
                    for (int j = 0; j < spec.n_input; j++)
                        x[t * spec.n_input + j] = spec.hidden_input ? sc->hidden[t * MODEL + j]
                                                  : j < DIM
                                                      ? span->k[(h * stride + t) * DIM + j]
                                                      : span->v[(h * stride + t) * DIM + j - DIM];
                const int64_t doc[2] = {0, n};
                kv_net_input_f32 in = {.n_token = n,
                                       .x = x,
                                       .hidden = sc->hidden,
                                       .n_doc = 1,
                                       .doc_first = doc,
                                       .chunk = 16};
                kv_net_tape_f32 *tape = NULL;
                cr_assert_eq(kv_net_forward_f32(&spec, param + h * l.n_param, &in, &tape, chunked),
                             KV_OK);
                double off = 0, size = 0;
                for (int64_t t = 0; t < n; t++) {
                    off += pow(chunked[t] - rhat[h * stride + t], 2);
                    size += pow(chunked[t], 2);
                }
                cr_expect_leq(sqrt(off), 2e-5 * sqrt(size) + 1e-6,
                              "setting %d, head %d: chunks and steps differ by %g of %g", which, h,
                              sqrt(off), sqrt(size));
                kv_net_tape_free_f32(tape);
            }
            void *state;
            float row_k[HEADS * DIM], row_v[HEADS * DIM], out[HEADS];
            cr_assert_eq(policy->priority(&input, priority), KV_OK);
            cr_assert_eq(policy->stream->open(&input, &state), KV_OK);
            for (int32_t u = 0; u < n; u++) {
                for (int h = 0; h < HEADS; h++) {
                    memcpy(row_k + h * DIM, span->k + (h * stride + u) * DIM, DIM * sizeof *row_k);
                    memcpy(row_v + h * DIM, span->v + (h * stride + u) * DIM, DIM * sizeof *row_v);
                }
                cr_assert_eq(policy->stream->push(state, u, row_k, row_v, sc->hidden + u * MODEL),
                             KV_OK);
                int32_t t = u - spec.window;
                if (t < 0) continue;
                cr_assert_eq(policy->stream->priority(state, t, out), KV_OK);
                for (int h = 0; h < HEADS; h++)
                    cr_assert_eq(kv_bits(out[h]), kv_bits(priority[h * stride + t]),
                                 "setting %d, head %d: token %d is %.9g decoding, %.9g at once",
                                 which, h, t, (double)out[h], (double)priority[h * stride + t]);
            }
            policy->stream->close(state);
            int32_t *mask = calloc((size_t)(HEADS * stride), sizeof *mask),
                    *slots = calloc((size_t)(HEADS * stride), sizeof *slots);
            uint64_t bytes;
            cr_assert_eq(kv_replay(policy, &input, mask), KV_OK);
            cr_assert_eq(kv_stream(policy, &input, 2, slots, &bytes), KV_OK);
            for (int h = 0; h < HEADS; h++)
                cr_assert_eq(
                    memcmp(mask + h * stride, slots + h * stride, (size_t)n * sizeof *mask), 0,
                    "setting %d, head %d: decoding keeps other tokens", which, h);
            free(rhat);
            free(priority);
            free(x);
            free(chunked);
            free(mask);
            free(slots);
            kv_params_free(&params);
            naive_case_free(&sc->c);
            free(sc);
        }
        free(param);
        kv_tensors_free(&set);
    }
    unlink(path);
    free(path);
}

Test(scorer, weights_that_do_not_fit) {
    char *path = scratch_file();
    float *param, out[HEADS * 40];
    kv_net_spec spec = file_spec(0);
    kv_tensors set = write_and_open(&spec, "kvpop_mlp", path, &param);
    span_case *sc = make_span(30);
    kv_run run = {.budget = 20, .sinks = 2, .window = spec.window};
    kv_policy_input input = {.span = &sc->c.span, .run = &run, .weights = &set, .ops = &kv_ops_cpu};
    const kv_span good = sc->c.span;
    kv_span bad = good;
    input.span = &bad;
#define REFUSED(code, word) \
    cr_expect_eq(kv_mlp_scores(&input, out), code, "%s", word); \
    cr_expect(strstr(kv_error_message(), word), "'%s' lacks '%s'", kv_error_message(), word); \
    bad = good
    run.window = 5;
    REFUSED(KV_E_DATA, "--window 4");
    run.window = spec.window;
    bad.n_layer = LAYER;
    REFUSED(KV_E_DATA, "another model");
    bad.layer_id = 1;
    REFUSED(KV_E_DATA, "layers.1.mlp.w1");
    bad.n_kv_head = 1;
    REFUSED(KV_E_DATA, "expected [1, 3, 6]");
    bad.head_dim = 4;
    REFUSED(KV_E_DATA, "expected [2, 3, 8]");
    cr_expect_eq(kv_mlstm_scores(&input, out), KV_E_DATA);
    cr_expect(strstr(kv_error_message(), "not kvpop"), "%s", kv_error_message());
    input.weights = NULL;
    REFUSED(KV_E_USAGE, "--weights kvpop_mlp=FILE");
    kv_tensors_free(&set);
    free(param);
    spec = file_spec(SETTINGS - 1);
    set = write_and_open(&spec, "kvpop", path, &param);
    input.weights = &set;
    bad.hidden = NULL;
    bad.d_model = 0;
    cr_expect_eq(kv_mlstm_scores(&input, out), KV_E_DATA);
    cr_expect(strstr(kv_error_message(), "hidden states"), "%s", kv_error_message());
    kv_tensors_free(&set);
    free(param);
    naive_case_free(&sc->c);
    free(sc);
    unlink(path);
    free(path);
}

/* The product against the definition, in all forms, with and without a start value, and the same bits for one row as for many. */
Test(scorer, matrix_product) {
    const int32_t sizes[][3] = {{1, 1, 1}, {7, 5, 3}, {13, 33, 17}, {6, 16, 600}, {25, 40, 1030}};
    for (int c = 0; c < 5; c++)
        for (int form = 0; form < 3; form++)
            for (int add = 0; add < 2; add++) {
                int32_t m = sizes[c][0], n = sizes[c][1], k = sizes[c][2];
                int64_t lda = (form == KV_TN ? m : k) + 2, ldb = (form == KV_NT ? k : n) + 1;
                int64_t na = lda * (form == KV_TN ? k : m), nb = ldb * (form == KV_NT ? n : k);
                float *a = malloc((size_t)na * 4), *b = malloc((size_t)nb * 4),
                      *y = malloc((size_t)(m * n) * 4), *one = malloc((size_t)n * 4);
                for (int64_t i = 0; i < na; i++)
                    a[i] = (float)kv_rand_normal(1, (uint32_t)i, 0, 0, 0);
                for (int64_t i = 0; i < nb; i++)
                    b[i] = (float)kv_rand_normal(2, (uint32_t)i, 0, 0, 0);
                for (int32_t i = 0; i < m * n; i++) y[i] = .01f * (float)i;
                kv_gemm_f32((kv_gemm_form)form, m, n, k, a, lda, b, ldb, add, y, n);
                for (int32_t i = 0; i < m; i++) {
                    for (int32_t j = 0; j < n; j++) {
                        double sum = add ? (double)(.01f * (float)(i * n + j)) : 0;
                        for (int32_t p = 0; p < k; p++)
                            sum += (double)(form == KV_TN ? a[p * lda + i] : a[i * lda + p]) *
                                   (double)(form == KV_NT ? b[j * ldb + p] : b[p * ldb + j]);
                        cr_assert_float_eq(y[i * n + j], sum, 1e-6 * k + 1e-6 * fabs(sum),
                                           "%dx%dx%d form %d add %d: [%d][%d] = %g", m, n, k, form,
                                           add, i, j, (double)y[i * n + j]);
                    }
                    for (int32_t j = 0; j < n; j++) one[j] = .01f * (float)(i * n + j);
                    kv_gemm_f32((kv_gemm_form)form, 1, n, k, a + (form == KV_TN ? i : i * lda), lda,
                                b, ldb, add, one, n);
                    cr_assert_eq(memcmp(one, y + i * n, (size_t)n * 4), 0,
                                 "%dx%dx%d form %d: row %d alone differs", m, n, k, form, i);
                }
                free(a);
                free(b);
                free(y);
                free(one);
            }
}
