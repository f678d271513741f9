/* Verification of the scorers' training passes: scores and gradients against the CPU's double-precision passes. */
#include "experiments/verify.h"

#include <math.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "reference/scorer_net.h"

typedef struct shape {
    const char *name;
    int32_t n, lanes, group, docs;
    kv_net_spec spec;
} shape;

#define MLSTM(i, f, k, v, m, w) \
    { \
        .recurrent = true, .delay = true, .norm = true, .n_input = (i), .n_feature = (f), \
        .n_key = (k), .n_value = (v), .n_mlp = (m), .window = (w) \
    }

static const shape shapes[] = {
    {"mlp, one token", 1, 1, 1, 1, {.n_input = 8, .n_mlp = 4}},
    {"mlp 256", 300, 3, 1, 1, {.n_input = 128, .n_mlp = 256}},
    {"mlp, hidden states",
     150,
     4,
     2,
     2,
     {.n_input = 40, .n_hidden = 40, .n_mlp = 24, .hidden_input = true}},
    {"contract's shape", 500, 2, 1, 1, MLSTM(128, 128, 64, 64, 256, 100)},
    {"128 x 128", 300, 2, 1, 1, MLSTM(256, 128, 128, 128, 0, 64)},
    {"mlp 256, wide input", 700, 2, 1, 2, {.n_input = 256, .n_mlp = 256}},
    {"128 x 128, three documents", 517, 2, 1, 3, MLSTM(256, 0, 128, 128, 256, 100)},
    {"128 x 128, features, three documents", 1000, 2, 1, 3, MLSTM(256, 128, 128, 128, 256, 100)},
    {"128 x 128, many chunks", 2600, 1, 1, 1, MLSTM(256, 0, 128, 128, 0, 256)},
    {"128 x 128, gates from hidden states",
     300,
     2,
     2,
     1,
     {.recurrent = true,
      .norm = true,
      .sigmoid_gate = true,
      .hidden_gate = true,
      .n_input = 128,
      .n_hidden = 20,
      .n_key = 128,
      .n_value = 128,
      .window = 40}},
    {"three documents", 517, 2, 1, 3, MLSTM(32, 16, 8, 8, 8, 33)},
    {"odd sizes", 200, 3, 1, 2, MLSTM(14, 9, 5, 7, 3, 17)},
    {"window over all", 90, 2, 1, 1, MLSTM(32, 16, 8, 8, 8, 100)},
    {"no norm, linear features",
     260,
     2,
     1,
     2,
     {.recurrent = true, .delay = true, .n_input = 24, .n_key = 8, .n_value = 6, .window = 40}},
    {"sigmoid gate, no delay",
     260,
     2,
     1,
     1,
     {.recurrent = true,
      .norm = true,
      .sigmoid_gate = true,
      .n_input = 24,
      .n_feature = 16,
      .n_key = 8,
      .n_value = 8,
      .n_mlp = 8,
      .window = 40}},
    {"gates from hidden states",
     260,
     4,
     2,
     1,
     {.recurrent = true,
      .delay = true,
      .norm = true,
      .hidden_gate = true,
      .n_input = 24,
      .n_hidden = 20,
      .n_feature = 16,
      .n_key = 8,
      .n_value = 8,
      .n_mlp = 8,
      .window = 40}},
};
#undef MLSTM
enum { SHAPES = sizeof shapes / sizeof *shapes };

typedef struct problem {
    kv_net_layout layout;
    int64_t doc_first[8];
    /* [lanes][n_param], [lanes or groups][n][n_input], [groups][n][n_hidden], [lanes][n] */
    float *param, *x, *hidden, *e;
    float *rhat, *grad, *want, *wanted; /* [lanes][n], [lanes][n_param], of the CPU */
} problem;

static void problem_free(problem *p) {
    float *owned[] = {p->param, p->x, p->hidden, p->e, p->rhat, p->grad, p->want, p->wanted};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    memset(p, 0, sizeof *p);
}

static void normal(float *x, size_t n, uint32_t array, double spread) {
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(spread * kv_rand_normal(81, array, (uint32_t)i, 0, 0));
}

/* Starting values, with zero weights replaced so that every part has a gradient. */
static void start(const shape *s, problem *p) {
    const int64_t n = p->layout.n_param;
    for (int32_t lane = 0; lane < s->lanes; lane++) {
        float *param = p->param + lane * n;
        kv_net_init(&s->spec, 5, lane, s->lanes, param);
        for (int64_t i = 0; i < n; i++)
            if (param[i] == 0.0f)
                param[i] = (float)(0.1 * kv_rand_normal(82, (uint32_t)lane, (uint32_t)i, 0, 0));
        for (int64_t i = 0; i < kv_net_part_size(&p->layout, KV_NET_READOUT); i++)
            param[p->layout.part[KV_NET_READOUT].at + i] *= 10;
    }
}

static kv_status problem_make(const shape *s, problem *p) {
    kv_status st = KV_OK;
    kv_net_describe(&s->spec, &p->layout);
    const size_t n = (size_t)s->n, lanes = (size_t)s->lanes, groups = lanes / (size_t)s->group,
                 count = lanes * (size_t)p->layout.n_param,
                 inputs = (s->spec.hidden_input ? groups : lanes) * n * (size_t)s->spec.n_input,
                 hidden = groups * n * (size_t)s->spec.n_hidden;
    KV_NEW(p->param, count);
    KV_NEW(p->x, inputs);
    KV_NEW(p->hidden, hidden);
    KV_NEW(p->e, lanes * n);
    KV_NEW(p->rhat, lanes * n);
    KV_NEW(p->grad, count);
    KV_NEW(p->want, lanes * n);
    KV_NEW(p->wanted, count);
    start(s, p);
    normal(p->x, inputs, 1, 1);
    normal(p->hidden, hidden, 2, 1);
    normal(p->e, lanes * n, 3, 1);
    if (s->spec.hidden_input) memcpy(p->hidden, p->x, inputs * sizeof *p->x);
    for (int32_t i = 0; i <= s->docs; i++) p->doc_first[i] = (int64_t)s->n * i / s->docs;
out:
    return st;
}

static kv_status widen(const float *x, size_t n, double **out) {
    kv_status st = KV_OK;
    KV_NEW(*out, n);
    for (size_t i = 0; i < n; i++) (*out)[i] = (double)x[i];
out:
    return st;
}

static kv_status reference_lane(const shape *s, problem *p, int32_t lane) {
    kv_status st = KV_OK;
    const size_t n = (size_t)s->n, np = (size_t)p->layout.n_param, at = (size_t)lane,
                 shared = (size_t)(lane / s->group), ni = (size_t)s->spec.n_input,
                 nh = (size_t)s->spec.n_hidden;
    double *param = NULL, *x = NULL, *hidden = NULL, *e = NULL, *rhat = NULL, *grad = NULL;
    kv_net_tape_f64 *tape = NULL;
    KV_TRY(widen(p->param + at * np, np, &param));
    KV_TRY(widen(p->x + (s->spec.hidden_input ? shared : at) * n * ni, n * ni, &x));
    KV_TRY(widen(p->hidden + shared * n * nh, n * nh, &hidden));
    KV_TRY(widen(p->e + at * n, n, &e));
    KV_NEW(rhat, n);
    KV_NEW(grad, np);
    const kv_net_input_f64 in = {.n_token = s->n,
                                 .x = x,
                                 .hidden = hidden,
                                 .n_doc = s->docs,
                                 .doc_first = p->doc_first,
                                 .chunk = 32};
    KV_TRY(kv_net_forward_f64(&s->spec, param, &in, &tape, rhat));
    KV_TRY(kv_net_backward_f64(&s->spec, param, &in, tape, e, grad));
    for (size_t i = 0; i < n; i++) p->want[at * n + i] = (float)rhat[i];
    for (size_t i = 0; i < np; i++) p->wanted[at * np + i] = (float)grad[i];
out:
    kv_net_tape_free_f64(tape);
    free(param);
    free(x);
    free(hidden);
    free(e);
    free(rhat);
    free(grad);
    return st;
}

static kv_status send(kv_gpu *g, const float *x, size_t n, kv_gpu_buffer **out) {
    const kv_status st = kv_gpu_new(g, n * 4, out);
    return st == KV_OK && n ? kv_gpu_put(*out, x, n * 4) : st;
}

static kv_status gpu_passes(kv_verify *v, const shape *s, problem *p, bool exact) {
    kv_status st = KV_OK;
    enum { PARAM, X, HIDDEN, E, RHAT, GRAD, BUFFERS };
    kv_gpu *g = kv_verify_gpu(v);
    kv_gpu_buffer *b[BUFFERS] = {NULL};
    kv_gpu_net *net = NULL;
    const size_t n = (size_t)s->n, lanes = (size_t)s->lanes, groups = lanes / (size_t)s->group,
                 count = lanes * (size_t)p->layout.n_param;
    KV_TRY(send(g, p->param, count, &b[PARAM]));
    KV_TRY(send(g, p->x, (s->spec.hidden_input ? groups : lanes) * n * (size_t)s->spec.n_input,
                &b[X]));
    KV_TRY(send(g, p->hidden, groups * n * (size_t)s->spec.n_hidden, &b[HIDDEN]));
    KV_TRY(send(g, p->e, lanes * n, &b[E]));
    KV_TRY(kv_gpu_new(g, lanes * n * 4, &b[RHAT]));
    for (size_t i = 0; i < count; i++) p->grad[i] = NAN; /* every component must be written */
    KV_TRY(send(g, p->grad, count, &b[GRAD]));
    KV_TRY(kv_gpu_net_new(g, &s->spec, s->lanes, s->group, exact, &net));
    KV_TRY(kv_gpu_net_input(net, s->n, s->docs, p->doc_first, b[X], NULL, b[HIDDEN]));
    /* Twice: the second time in arrays that hold the first one's numbers. */
    for (int i = 0; i < 2; i++) {
        KV_TRY(kv_gpu_net_forward(net, b[PARAM], b[RHAT]));
        KV_TRY(kv_gpu_net_backward(net, b[PARAM], b[E], b[GRAD]));
    }
    KV_TRY(kv_gpu_get(b[RHAT], p->rhat, lanes * n * 4));
    KV_TRY(kv_gpu_get(b[GRAD], p->grad, count * 4));
out:
    kv_gpu_net_free(net);
    for (int i = 0; i < BUFFERS; i++) {
        const kv_status freed = kv_gpu_free(b[i]);
        if (st == KV_OK) st = freed;
    }
    return st;
}

/* Gradients are judged part by part: a component's error relative to the largest of its part and lane. The parts of the gates are one
 * part: a bias' gradient is a sum that nearly cancels (the memory's scale is a gauge). Gates get theirs through a sum over all later
 * rows of differences of products, in which rounding adds up: beyond 1000 tokens the bound grows with their number (over 2600 the CPU's
 * own fp32 pass is off by 2.3e-5). */
static void compare(kv_verify *v, const shape *s, const problem *p, bool exact) {
    const double score = exact ? 2e-5 : 6e-2, slope = exact ? 2e-5 : 6e-2,
                 gates = exact ? 2e-5 * fmax(1, s->n / 1e3) : 2e-1;
    const int32_t n_param = (int32_t)p->layout.n_param;
    kv_verify_f32(v, "rhat", (kv_verify_shape){s->lanes, s->n, s->n}, p->rhat, p->want, score,
                  score);
    for (int i = 0; i < KV_NET_PARTS; i++) {
        const bool gate = i == KV_NET_GATE_I_W;
        const int last = gate ? KV_NET_GATE_F_B : i;
        const int64_t at = p->layout.part[i].at,
                      end =
                          p->layout.part[last].at + kv_net_part_size(&p->layout, (kv_net_part)last);
        for (int32_t lane = 0; end > at && lane < s->lanes; lane++) {
            const float *want = p->wanted + (int64_t)lane * n_param + at;
            double top = 1e-6;
            for (int64_t j = 0; j < end - at; j++) top = fmax(top, fabs((double)want[j]));
            kv_verify_f32(v, gate ? "gates" : p->layout.part[i].name,
                          (kv_verify_shape){1, (int32_t)(end - at), end - at},
                          p->grad + (int64_t)lane * n_param + at, want, 0,
                          (gate ? gates : slope) * top);
        }
        i = last;
    }
}

kv_status kv_verify_gradients(kv_verify *v) {
    kv_status st = KV_OK;
    problem p = {.x = NULL};
    for (int i = 0; i < SHAPES; i++) {
        const shape *s = &shapes[i];
        if (kv_verify_skips(v, s->n)) continue;
        KV_TRY(problem_make(s, &p));
        for (int32_t lane = 0; lane < s->lanes; lane++) KV_TRY(reference_lane(s, &p, lane));
        /* Without a norm the readout divides by a sum that may nearly cancel: nothing for bfloat16. */
        const int least = s->spec.recurrent && !s->spec.norm ? 1 : 0;
        for (int exact = 1; exact >= least; exact--) {
            kv_verify_case(v, "%s, %s", s->name, exact ? "fp32" : "bfloat16 operands");
            KV_TRY(gpu_passes(v, s, &p, exact));
            compare(v, s, &p, exact);
        }
        problem_free(&p);
        KV_TRY(kv_interrupt_poll());
    }
out:
    problem_free(&p);
    return st;
}
