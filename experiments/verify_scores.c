/* Verification of the learned scorers: the GPU's chunkwise form against the CPU's step form. */
#include "experiments/verify.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "experiments/files.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "reference/scorer.h"
#include "traces/safetensors.h"
#include "traces/scorer_file.h"

enum { D_MODEL = 48 };

typedef struct shape {
    const char *name;
    int32_t n, heads, d;
    kv_net_spec spec; /* n_input and n_hidden are filled in */
} shape;

#define MLP(m) .spec = {.n_mlp = (m), .window = 256}
#define MLSTM(f, k, v, m, w) \
    .spec = {.recurrent = true, \
             .delay = true, \
             .norm = true, \
             .n_feature = (f), \
             .n_key = (k), \
             .n_value = (v), \
             .n_mlp = (m), \
             .window = (w)}

static const shape mlp_shapes[] = {
    {"one token", 1, 1, 64, MLP(256)},
    {"hidden 1", 33, 2, 16, MLP(1)},
    {"hidden 3, odd head size", 77, 3, 5, MLP(3)},
    {"hidden 100", 300, 2, 128, MLP(100)},
    {"hidden 256", 1000, 8, 64, MLP(256)},
    {"hidden states as input", 200, 2, 64,
     .spec = {.n_mlp = 31, .window = 16, .hidden_input = true}},
};
static const shape mlstm_shapes[] = {
    {"one token", 1, 1, 64, MLSTM(128, 64, 64, 256, 256)},
    {"window over all", 200, 2, 64, MLSTM(128, 64, 64, 256, 256)},
    {"63", 63, 2, 64, MLSTM(128, 64, 64, 256, 1)},
    {"64", 64, 1, 64, MLSTM(128, 64, 64, 256, 2)},
    {"65", 65, 1, 64, MLSTM(128, 64, 64, 0, 3)},
    {"contract's shape", 1500, 2, 64, MLSTM(128, 64, 64, 256, 256)},
    {"128 x 128", 700, 2, 128, MLSTM(128, 128, 128, 32, 64)},
    {"odd sizes", 500, 3, 20, MLSTM(17, 5, 7, 9, 31)},
    {"linear features", 400, 2, 32, MLSTM(0, 16, 8, 0, 64)},
    {"no norm", 400, 2, 32,
     .spec =
         {.recurrent = true, .delay = true, .n_key = 16, .n_value = 12, .n_mlp = 8, .window = 64}},
    {"sigmoid gate, no delay", 400, 2, 32,
     .spec = {.recurrent = true,
              .norm = true,
              .sigmoid_gate = true,
              .n_feature = 24,
              .n_key = 16,
              .n_value = 16,
              .window = 64}},
    {"gates from hidden states", 333, 2, 32,
     .spec = {.recurrent = true,
              .delay = true,
              .norm = true,
              .hidden_gate = true,
              .n_feature = 32,
              .n_key = 8,
              .n_value = 8,
              .n_mlp = 16,
              .window = 50}},
};
#undef MLP
#undef MLSTM

typedef struct problem {
    kv_span span;
    kv_scorer scorer;
    float *k, *v, *hidden; /* [heads][n][d], [n][D_MODEL] */
    float *got, *want;     /* [heads][n] */
} problem;

static void problem_free(problem *p) {
    kv_scorer_close(&p->scorer);
    free(p->k);
    free(p->v);
    free(p->hidden);
    free(p->got);
    free(p->want);
    memset(p, 0, sizeof *p);
}

static float normal(uint32_t array, size_t i) {
    return (float)kv_rand_normal(71, array, (uint32_t)(i >> 32), (uint32_t)i, 0);
}

/* Weights of the size that training gives, forget gates from 50 tokens to 3000. */
static kv_status fill_weights(kv_scorer *s) {
    kv_status st = KV_OK;
    const kv_net_spec *spec = &s->spec;
    const double phi = 2 / sqrt((double)kv_net_feature_width(spec));
    const double fan = 1 / sqrt((double)spec->n_input);
    const double spread[KV_NET_PARTS] = {
        [KV_NET_FEATURE_W] = fan,
        [KV_NET_FEATURE_B] = 0.1,
        [KV_NET_PHI_Q] = phi,
        [KV_NET_PHI_K] = phi,
        [KV_NET_PHI_V] = phi,
        [KV_NET_GATE_I_W] = 0.5 * phi,
        [KV_NET_GATE_F_W] = 0.5 * phi,
        [KV_NET_GATE_I_B] = 1,
        [KV_NET_READOUT] = 0.2,
        [KV_NET_MLP_W1] = fan,
        [KV_NET_MLP_B1] = 0.2,
        [KV_NET_MLP_W2] = spec->n_mlp ? 1 / sqrt((double)spec->n_mlp) : 0,
    };
    const int64_t n = s->layout.n_param;
    KV_NEW(s->param, s->n_kv_head * n);
    KV_NEW(s->log_gamma, s->n_kv_head);
    for (int32_t h = 0; h < s->n_kv_head; h++)
        for (int i = 0; i < KV_NET_PARTS; i++)
            for (int64_t j = 0; j < kv_net_part_size(&s->layout, (kv_net_part)i); j++) {
                float *to = s->param + h * n + s->layout.part[i].at + j;
                *to = (float)spread[i] * normal((uint32_t)i, (size_t)h << 32 | (size_t)j);
                if (i == KV_NET_GATE_F_B) *to = 4 + (float)h;
            }
out:
    return st;
}

static kv_status problem_make(const shape *s, problem *p) {
    kv_status st = KV_OK;
    const size_t cells = (size_t)s->heads * (size_t)s->n * (size_t)s->d,
                 rows = (size_t)s->heads * (size_t)s->n;
    p->scorer.spec = s->spec;
    p->scorer.spec.n_input = s->spec.hidden_input ? D_MODEL : 2 * s->d;
    p->scorer.spec.n_hidden = s->spec.hidden_input || s->spec.hidden_gate ? D_MODEL : 0;
    p->scorer.n_kv_head = s->heads;
    p->scorer.head_dim = s->d;
    kv_net_describe(&p->scorer.spec, &p->scorer.layout);
    KV_TRY(fill_weights(&p->scorer));
    KV_NEW(p->k, cells);
    KV_NEW(p->v, cells);
    KV_NEW(p->hidden, (size_t)s->n * D_MODEL);
    KV_NEW(p->got, rows);
    KV_NEW(p->want, rows);
    for (size_t i = 0; i < cells; i++) {
        p->k[i] = normal(101, i);
        p->v[i] = normal(102, i);
    }
    for (size_t i = 0; i < (size_t)s->n * D_MODEL; i++) p->hidden[i] = normal(103, i);
    p->span = (kv_span){.n_token = s->n,
                        .stride = s->n,
                        .n_q_head = s->heads,
                        .n_kv_head = s->heads,
                        .head_dim = s->d,
                        .k = p->k,
                        .v = p->v,
                        .hidden = p->hidden,
                        .d_model = D_MODEL,
                        .n_layer = 1};
out:
    return st;
}

/* Token by token, as a decoder would. */
static kv_status step_scores(const problem *p, int32_t head, float *rhat) {
    kv_status st = KV_OK;
    kv_scorer_lane *lane = NULL;
    const int32_t n = p->span.n_token, window = p->scorer.spec.window, d = p->span.head_dim;
    KV_TRY(kv_scorer_lane_open(&p->scorer, head, &lane));
    for (int32_t u = 0; u < n; u++) {
        const size_t at = ((size_t)head * (size_t)n + (size_t)u) * (size_t)d;
        kv_scorer_lane_rows(lane, 1, p->k + at, p->v + at, p->hidden + (size_t)u * D_MODEL);
        (void)kv_scorer_lane_step(lane);
        if (u >= window) rhat[u - window] = kv_scorer_lane_score(lane, u - window);
    }
    for (int32_t t = n > window ? n - window : 0; t < n; t++)
        rhat[t] = kv_scorer_lane_score(lane, t);
out:
    kv_scorer_lane_close(lane);
    return st;
}

static kv_status gpu_scores(kv_verify *v, const problem *p) {
    kv_status st = KV_OK;
    enum { K, V, HIDDEN, RHAT, BUFFERS };
    kv_gpu *g = kv_verify_gpu(v);
    kv_gpu_buffer *b[BUFFERS] = {NULL};
    const size_t rows = (size_t)p->span.n_kv_head * (size_t)p->span.n_token,
                 cells = rows * (size_t)p->span.head_dim,
                 hidden = (size_t)p->span.n_token * D_MODEL;
    KV_TRY(kv_gpu_new(g, cells * 4, &b[K]));
    KV_TRY(kv_gpu_new(g, cells * 4, &b[V]));
    KV_TRY(kv_gpu_new(g, hidden * 4, &b[HIDDEN]));
    KV_TRY(kv_gpu_new(g, rows * 4, &b[RHAT]));
    KV_TRY(kv_gpu_put(b[K], p->k, cells * 4));
    KV_TRY(kv_gpu_put(b[V], p->v, cells * 4));
    KV_TRY(kv_gpu_put(b[HIDDEN], p->hidden, hidden * 4));
    KV_TRY(kv_gpu_scores(g, &p->scorer, p->span.n_token, b[K], b[V], b[HIDDEN], b[RHAT]));
    KV_TRY(kv_gpu_get(b[RHAT], p->got, rows * 4));
out:
    for (int i = 0; i < BUFFERS; i++) {
        const kv_status freed = kv_gpu_free(b[i]);
        if (st == KV_OK) st = freed;
    }
    return st;
}

static kv_status check(kv_verify *v, const shape *s) {
    kv_status st = KV_OK;
    problem p = {.span = {0}};
    const kv_verify_shape rows = {s->heads, s->n, s->n};
    KV_TRY(problem_make(s, &p));
    kv_verify_case(v, "%s", s->name);
    for (int32_t h = 0; h < s->heads; h++)
        KV_TRY(step_scores(&p, h, p.want + (size_t)h * (size_t)s->n));
    KV_TRY(gpu_scores(v, &p));
    /* Scores are of order 1; the chunkwise memory rounds once where the step form rounds at every token. Without a norm the readout
     * divides by a sum that may nearly cancel. */
    const double tolerance = s->spec.recurrent && !s->spec.norm ? 3e-4 : 3e-5;
    kv_verify_f32(v, "rhat", rows, p.got, p.want, tolerance, tolerance);
out:
    problem_free(&p);
    return st;
}

/* Through weights in a file and the device table, as `experiment` goes. */
static kv_status check_file(kv_verify *v, const shape *s, const char *policy) {
    kv_status st = KV_OK;
    problem p = {.span = {0}};
    kv_tensors weights = {0};
    float *theta = NULL;
    char path[PATH_MAX];
    int fd;
    const int32_t layer = 0;
    const kv_run run = {.budget = 512, .sinks = 4, .window = s->spec.window};
    st = kv_temporary_file(NULL, path, &fd);
    if (st != KV_OK) return st;
    close(fd);
    KV_TRY(problem_make(s, &p));
    KV_NEW(theta, s->heads);
    const kv_scorer_file file = {.policy = policy,
                                 .spec = p.scorer.spec,
                                 .n_layer = 1,
                                 .n_kv_head = s->heads,
                                 .layer_id = &layer,
                                 .param = p.scorer.param,
                                 .theta = theta,
                                 .budget = run.budget,
                                 .sinks = run.sinks,
                                 .target_power = 2};
    KV_TRY(kv_scorer_file_write(path, &file));
    KV_TRY(kv_safetensors_open(path, &weights));
    const kv_policy_input input = {.span = &p.span, .run = &run, .weights = &weights};
    const kv_ops *gpu = kv_verify_ops(v), *cpu = &kv_ops_cpu;
    kv_verify_case(v, "%s, from a file", s->name);
    KV_TRY((s->spec.recurrent ? cpu->mlstm_scores : cpu->mlp_scores)(&input, p.want));
    KV_TRY((s->spec.recurrent ? gpu->mlstm_scores : gpu->mlp_scores)(&input, p.got));
    kv_verify_f32(v, "rhat", (kv_verify_shape){s->heads, s->n, s->n}, p.got, p.want, 1e-5, 3e-5);
out:
    unlink(path);
    kv_tensors_free(&weights);
    free(theta);
    problem_free(&p);
    return st;
}

kv_status kv_verify_mlp(kv_verify *v) {
    kv_status st = KV_OK;
    for (size_t i = 0; i < sizeof mlp_shapes / sizeof *mlp_shapes; i++)
        if (!kv_verify_skips(v, mlp_shapes[i].n)) KV_TRY(check(v, &mlp_shapes[i]));
    if (!kv_verify_skips(v, mlp_shapes[4].n)) KV_TRY(check_file(v, &mlp_shapes[4], "kvpop_mlp"));
out:
    return st;
}

kv_status kv_verify_mlstm(kv_verify *v) {
    kv_status st = KV_OK;
    for (size_t i = 0; i < sizeof mlstm_shapes / sizeof *mlstm_shapes; i++)
        if (!kv_verify_skips(v, mlstm_shapes[i].n)) KV_TRY(check(v, &mlstm_shapes[i]));
    if (!kv_verify_skips(v, mlstm_shapes[5].n)) KV_TRY(check_file(v, &mlstm_shapes[5], "kvpop"));
out:
    return st;
}
