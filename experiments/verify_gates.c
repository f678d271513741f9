/* Verification of the gates of dms. In training: logits, relaxed decisions, gradients, against the CPU's double-precision functions. From
 * weights in a file, as `experiment` goes: logits and the decisions by them. */
#include "experiments/verify.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

#include "experiments/files.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "traces/dms_file.h"
#include "traces/safetensors.h"

typedef struct shape {
    const char *name;
    kv_dms_spec spec;
    int32_t n_token, first, n, lanes, group, queries, shift;
    double temp, push;
} shape;

static const shape shapes[] = {
    {"one token", {KV_DMS_KV, 8, 4, 0, 10}, 1, 0, 1, 1, 1, 1, 1, .1, 0},
    {"key and value", {KV_DMS_KV, 128, 256, 0, 10}, 500, 100, 333, 4, 2, 4, 1, .1, 1e-3},
    {"key and value, linear", {KV_DMS_KV, 33, 0, 0, 10}, 200, 0, 200, 3, 1, 2, 0, .5, 1e-3},
    {"hidden states", {KV_DMS_HIDDEN, 40, 24, 0, 1}, 300, 7, 257, 4, 2, 1, 1, .1, 0},
    {"hidden states, linear", {KV_DMS_HIDDEN, 40, 0, 0, 1}, 300, 7, 257, 6, 3, 8, 1, .1, 1e-2},
    {"one channel", {KV_DMS_CHANNEL, 1, 0, 5, 100}, 90, 0, 90, 2, 1, 2, 1, 1, 0},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

typedef struct problem {
    int64_t n_param;
    float *param, *x; /* [lanes][n_param], [inputs][n_token][n_input] */
    float *d_keep;    /* [lanes][queries][n] */
    double *off;      /* [lanes][queries][2] */
    float *logit, *log_keep, *grad, *want, *want_grad; /* [lanes][n], grads [lanes][n_param] */
    int32_t *marked, *want_marked;                     /* [lanes] */
} problem;

static void problem_free(problem *p) {
    void *owned[] = {p->param, p->x,    p->d_keep,    p->off,    p->logit,      p->log_keep,
                     p->grad,  p->want, p->want_grad, p->marked, p->want_marked};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    *p = (problem){.param = NULL};
}

static void normal(float *x, size_t n, uint32_t stream, double size) {
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(size * kv_rand_normal(21, (uint32_t)i, stream, 0, 0));
}

static int32_t lane_input(const shape *s, int32_t lane) {
    return s->spec.source == KV_DMS_HIDDEN ? lane / s->group : lane;
}

static kv_status problem_make(const shape *s, problem *p) {
    kv_status st = KV_OK;
    p->n_param = kv_dms_param(&s->spec);
    const size_t lanes = (size_t)s->lanes, n = (size_t)s->n, count = lanes * (size_t)p->n_param,
                 inputs = (size_t)(lane_input(s, s->lanes - 1) + 1) * (size_t)s->n_token *
                          (size_t)s->spec.n_input,
                 heads = lanes * (size_t)s->queries;
    KV_NEW(p->param, count);
    KV_NEW(p->x, inputs);
    KV_NEW(p->d_keep, heads * n);
    KV_NEW(p->off, 2 * heads);
    KV_NEW(p->logit, lanes * n);
    KV_NEW(p->log_keep, lanes * n);
    KV_NEW(p->grad, count);
    KV_NEW(p->want, lanes * n);
    KV_NEW(p->want_grad, count);
    KV_NEW(p->marked, lanes);
    KV_NEW(p->want_marked, lanes);
    normal(p->param, count, 1, 1 / (4 * sqrt((double)s->spec.n_input)));
    normal(p->x, inputs, 2, 1);
    normal(p->d_keep, heads * n, 3, 1);
    for (size_t i = 0; i < heads; i++) { /* one head whose outputs are all zero */
        p->off[2 * i] = 1;
        p->off[2 * i + 1] = i == 1 ? 0 : 3 + (double)i;
    }
out:
    return st;
}

static kv_status gpu_passes(kv_verify *v, const shape *s, problem *p) {
    kv_status st = KV_OK;
    enum { PARAM, X, D_KEEP, OFF, LOGIT, KEEP, MARKED, GRAD, BUFFERS };
    kv_gpu *g = kv_verify_gpu(v);
    kv_gpu_buffer *b[BUFFERS] = {NULL};
    kv_gpu_gates *gates = NULL;
    const size_t lanes = (size_t)s->lanes, n = (size_t)s->n, count = lanes * (size_t)p->n_param,
                 inputs = (size_t)(lane_input(s, s->lanes - 1) + 1) * (size_t)s->n_token *
                          (size_t)s->spec.n_input,
                 heads = lanes * (size_t)s->queries;
    KV_TRY(kv_verify_send(g, p->param, count * 4, &b[PARAM]));
    KV_TRY(kv_verify_send(g, p->x, inputs * 4, &b[X]));
    KV_TRY(kv_verify_send(g, p->d_keep, heads * n * 4, &b[D_KEEP]));
    KV_TRY(kv_verify_send(g, p->off, 2 * heads * 8, &b[OFF]));
    KV_TRY(kv_verify_send(g, NULL, lanes * n * 4, &b[LOGIT]));
    KV_TRY(kv_verify_send(g, NULL, lanes * n * 4, &b[KEEP]));
    KV_TRY(kv_verify_send(g, NULL, lanes * 4, &b[MARKED]));
    KV_TRY(kv_verify_send(g, NULL, count * 4, &b[GRAD]));
    KV_TRY(kv_gpu_gates_new(g, &s->spec, s->lanes, s->group, &gates));
    /* Twice: first another step and all tokens, whose numbers must not remain. */
    for (uint32_t step = 0; step < 2; step++) {
        const kv_gpu_draw draw = {.seed = 9, .step = step, .shift = s->shift, .temp = s->temp};
        KV_TRY(kv_gpu_gates_input(gates, b[X], s->n_token, step ? s->first : 0, s->n));
        KV_TRY(kv_gpu_gates_logits(gates, b[PARAM], b[LOGIT]));
        KV_TRY(kv_gpu_gates_decide(gates, &draw, b[LOGIT], b[KEEP], b[MARKED]));
        KV_TRY(kv_gpu_gates_backward(gates, s->queries, b[D_KEEP], b[OFF], s->push, b[GRAD]));
    }
    KV_TRY(kv_gpu_get(b[LOGIT], p->logit, lanes * n * 4));
    KV_TRY(kv_gpu_get(b[KEEP], p->log_keep, lanes * n * 4));
    KV_TRY(kv_gpu_get(b[MARKED], p->marked, lanes * 4));
    KV_TRY(kv_gpu_get(b[GRAD], p->grad, count * 4));
out:
    kv_gpu_gates_free(gates);
    for (int i = 0; i < BUFFERS; i++) {
        const kv_status freed = kv_gpu_free(b[i]);
        if (st == KV_OK) st = freed;
    }
    return st;
}

/* Decisions follow the GPU's own logits, which were compared before; e [n] = dL/dlogit as in training. */
static void decide_lane(kv_verify *v, const shape *s, problem *p, int32_t lane, double *e) {
    const size_t own = (size_t)lane * (size_t)s->n;
    memset(e, 0, (size_t)s->n * sizeof *e);
    for (int32_t t = 0; t < s->n; t++) {
        const int32_t at = t + s->shift;
        double keep = 0, alpha = 0, d_keep = 0;
        if (at < s->n)
            alpha = kv_dms_alpha((double)p->logit[own + (size_t)at],
                                 kv_dms_noise(9, 1, (uint32_t)lane, (uint32_t)at), s->temp, &keep);
        const float want = (float)keep;
        kv_verify_f32(v, "log keep", (kv_verify_shape){1, 1, 1}, &p->log_keep[own + (size_t)t],
                      &want, 3e-7, 1e-30);
        p->want_marked[lane] += alpha > .5;
        for (int32_t q = 0; q < s->queries; q++) {
            const size_t head = (size_t)(lane * s->queries + q);
            const double size = p->off[2 * head + 1];
            if (size > 0)
                d_keep += (double)p->d_keep[head * (size_t)s->n + (size_t)t] / (size * s->queries);
        }
        const double a = alpha / s->temp;
        if (at < s->n) e[at] = (float)(-a * d_keep / s->lanes - s->push * a * (1 - alpha));
    }
}

static kv_status compare_lane(kv_verify *v, const shape *s, problem *p, int32_t lane) {
    kv_status st = KV_OK;
    const size_t n = (size_t)s->n, np = (size_t)p->n_param, ni = (size_t)s->spec.n_input;
    const float *from =
        p->x + ((size_t)lane_input(s, lane) * (size_t)s->n_token + (size_t)s->first) * ni;
    double *param = NULL, *x = NULL, *logit = NULL, *e = NULL, *grad = NULL, top = 0;
    kv_net_tape_f64 *tape = NULL;
    KV_NEW(param, np);
    KV_NEW(x, n * ni);
    KV_NEW(logit, n);
    KV_NEW(e, n);
    KV_NEW(grad, np);
    for (size_t i = 0; i < np; i++) param[i] = (double)p->param[(size_t)lane * np + i];
    for (size_t i = 0; i < n * ni; i++) x[i] = (double)from[i];
    KV_TRY(kv_dms_logits_f64(&s->spec, param, s->n, x, &tape, logit));
    for (size_t t = 0; t < n; t++) {
        p->want[(size_t)lane * n + t] = (float)logit[t];
        top = fmax(top, fabs(logit[t]));
    }
    kv_verify_f32(v, "logit", (kv_verify_shape){1, s->n, s->n}, p->logit + (size_t)lane * n,
                  p->want + (size_t)lane * n, 1e-6, 1e-5 * top);
    decide_lane(v, s, p, lane, e);
    kv_verify_i32(v, "marked", (kv_verify_shape){1, 1, 1}, &p->marked[lane], &p->want_marked[lane]);
    KV_TRY(kv_dms_logits_backward_f64(&s->spec, param, s->n, x, tape, e, grad));
    top = 1e-12;
    for (size_t i = 0; i < np; i++) {
        p->want_grad[(size_t)lane * np + i] = (float)grad[i];
        top = fmax(top, fabs(grad[i]));
    }
    kv_verify_f32(v, "gradient", (kv_verify_shape){1, (int32_t)np, p->n_param},
                  p->grad + (size_t)lane * np, p->want_grad + (size_t)lane * np, 1e-6, 1e-5 * top);
out:
    kv_net_tape_free_f64(tape);
    free(param);
    free(x);
    free(logit);
    free(e);
    free(grad);
    return st;
}

/* Marked tokens are those above 0: within the error of 0 either answer is right. */
static void compare_marks(kv_verify *v, const kv_span *span, const float *got, const float *want,
                          double error) {
    int64_t near = 0, wrong = 0;
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) {
            const int64_t at = h * span->stride + t;
            if ((got[at] > 0) == (want[at] > 0)) continue;
            const bool tie = fabs((double)want[at]) <= error;
            near += tie;
            wrong += !tie;
        }
    kv_verify_decisions(v, "marks", (int64_t)span->n_kv_head * span->n_token, near, wrong);
}

/* Keys, values and hidden states of `heads` KV heads, whose gates stand in a file. */
static kv_status check_file(kv_verify *v, const char *name, kv_dms_spec spec, int32_t n,
                            int32_t heads, int32_t d, bool hold) {
    enum { D_MODEL = 40, PAD = 3 };
    kv_status st = KV_OK;
    const kv_ops *ops = kv_verify_ops(v);
    const int64_t stride = n + PAD;
    const int32_t layer = 3, width[] = {2 * d, D_MODEL, 1};
    float *k = NULL, *value = NULL, *hidden = NULL, *param = NULL, *got = NULL, *want = NULL;
    kv_tensors weights = {0};
    char path[PATH_MAX];
    int fd;
    int32_t shift[2] = {-1, -1};
    spec.n_input = width[spec.source];
    const size_t count = (size_t)(heads * kv_dms_param(&spec)),
                 cells = (size_t)(heads * stride * d);
    kv_span span = {.n_token = n,
                    .stride = stride,
                    .n_q_head = heads,
                    .n_kv_head = heads,
                    .head_dim = d,
                    .d_model = D_MODEL,
                    .scale = 1,
                    .layer_id = layer,
                    .n_layer = layer + 1};
    st = kv_temporary_file(NULL, path, &fd);
    if (st != KV_OK) return st;
    close(fd);
    kv_verify_case(v, "%s, from a file", name);
    KV_NEW(k, cells);
    KV_NEW(value, cells);
    KV_NEW(hidden, n * D_MODEL);
    KV_NEW(param, count);
    KV_NEW(got, heads * stride);
    KV_NEW(want, heads * stride);
    normal(k, cells, 11, 1);
    normal(value, cells, 12, 1);
    normal(hidden, (size_t)n * D_MODEL, 13, 1);
    normal(param, count, 14, 1 / (2 * sqrt((double)spec.n_input)));
    span.q = span.k = k;
    span.v = value;
    span.hidden = hidden;
    const kv_run run = {.budget = 512, .sinks = 4, .window = 16};
    const kv_dms_file file = {.spec = spec,
                              .n_layer = 1,
                              .n_kv_head = heads,
                              .layer_id = &layer,
                              .param = param,
                              .window = run.window,
                              .shift = 0,
                              .budget = run.budget,
                              .sinks = run.sinks};
    KV_TRY(kv_dms_file_write(path, &file));
    KV_TRY(kv_safetensors_open(path, &weights));
    const kv_policy_input input = {.span = &span, .run = &run, .weights = &weights};
    KV_TRY(kv_dms_gate(&input, want, &shift[0]));
    if (hold) KV_TRY(ops->hold(&span));
    KV_TRY(ops->gate_logits(&input, got, &shift[1]));
    double top = 0;
    for (int64_t i = 0; i < heads * stride; i++) top = fmax(top, fabs((double)want[i]));
    kv_verify_f32(v, "logit", (kv_verify_shape){heads, n, stride}, got, want, 1e-6, 1e-5 * top);
    kv_verify_i32(v, "shift", (kv_verify_shape){1, 1, 1}, &shift[1], &shift[0]);
    compare_marks(v, &span, got, want, 1e-5 * top);
out:
    ops->release(&span);
    unlink(path);
    kv_tensors_free(&weights);
    free(k);
    free(value);
    free(hidden);
    free(param);
    free(got);
    free(want);
    return st;
}

static kv_status check_files(kv_verify *v) {
    kv_status st = KV_OK;
    KV_TRY(check_file(v, "one token", (kv_dms_spec){KV_DMS_KV, 0, 4, 0, 10}, 1, 1, 64, false));
    KV_TRY(
        check_file(v, "key and value", (kv_dms_spec){KV_DMS_KV, 0, 256, 0, 10}, 250, 3, 64, true));
    KV_TRY(check_file(v, "linear", (kv_dms_spec){KV_DMS_KV, 0, 0, 0, 10}, 65, 8, 21, true));
    KV_TRY(check_file(v, "hidden", (kv_dms_spec){KV_DMS_HIDDEN, 0, 24, 0, 1}, 200, 2, 64, false));
    KV_TRY(check_file(v, "channel", (kv_dms_spec){KV_DMS_CHANNEL, 0, 0, 5, 100}, 129, 4, 80, true));
out:
    return st;
}

kv_status kv_verify_gates(kv_verify *v) {
    kv_status st = KV_OK;
    problem p = {.param = NULL};
    for (int i = 0; i < SHAPES; i++) {
        if (kv_verify_skips(v, shapes[i].n_token)) continue;
        kv_verify_case(v, "%s", shapes[i].name);
        KV_TRY(problem_make(&shapes[i], &p));
        KV_TRY(gpu_passes(v, &shapes[i], &p));
        for (int32_t lane = 0; lane < shapes[i].lanes; lane++)
            KV_TRY(compare_lane(v, &shapes[i], &p, lane));
        problem_free(&p);
        KV_TRY(kv_interrupt_poll());
    }
    KV_TRY(check_files(v));
out:
    problem_free(&p);
    return st;
}
