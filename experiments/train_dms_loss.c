/* dms objective: lanes in parallel, queries in blocks. */
#include "experiments/train_dms_loss.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/train_dms_gpu.h"
#include "reference/core/cpu.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"

enum { BLOCK = 64 }; /* queries */

typedef struct workspace {                                  /* of one thread */
    float *x, *kv, *q, *hidden, *logit, *keep, *d_keep, *e; /* of a window */
    double *alpha;
    float *p, *scratch; /* [BLOCK][tokens] */
    float *o, *dense;   /* [BLOCK][head_dim] */
    kv_net_tape_f32 *tape;
} workspace;

struct kv_train_dms {
    const kv_train_set *set;
    kv_train_dms_options options;
    int64_t n_param;
    int32_t n_thread;
    workspace *thread;
    kv_train_dms_gpu *gpu; /* NULL: CPU */
};

typedef struct place { /* the window of a step */
    const kv_train_trace *t;
    kv_train_dms_window w;
} place;

static kv_status reserve(const kv_train_dms *o, workspace *w) {
    kv_status st = KV_OK;
    int64_t n = o->options.tokens, d = o->set->head_dim;
    bool hidden = o->options.spec.source == KV_DMS_HIDDEN;
    KV_NEW(w->x, n * o->options.spec.n_input);
    KV_NEW(w->kv, n * 2 * d);
    KV_NEW(w->q, n * d);
    KV_NEW(w->hidden, hidden ? n * o->set->d_model : 0);
    KV_NEW(w->logit, n);
    KV_NEW(w->keep, n);
    KV_NEW(w->d_keep, n);
    KV_NEW(w->e, n);
    KV_NEW(w->alpha, n);
    KV_NEW(w->p, BLOCK * n);
    KV_NEW(w->scratch, BLOCK * n);
    KV_NEW(w->o, BLOCK * d);
    KV_NEW(w->dense, BLOCK * d);
out:
    return st;
}

kv_status kv_train_dms_open(const kv_train_set *set, const kv_train_dms_options *options,
                            kv_train_dms **out) {
    kv_status st = KV_OK;
    kv_train_dms *o = NULL;
    KV_NEW(o, 1);
    o->set = set;
    o->options = *options;
    if (o->options.tokens > set->longest) o->options.tokens = set->longest;
    o->n_param = kv_dms_param(&options->spec);
    o->n_thread = kv_threads();
    KV_NEW(o->thread, o->n_thread);
    for (int32_t i = 0; i < o->n_thread; i++) KV_TRY(reserve(o, &o->thread[i]));
    *out = o;
out:
    if (st != KV_OK) kv_train_dms_close(o);
    return st;
}

void kv_train_dms_close(kv_train_dms *o) {
    if (!o) return;
    kv_train_dms_gpu_close(o->gpu);
    for (int32_t i = 0; o->thread && i < o->n_thread; i++) {
        workspace *w = &o->thread[i];
        void *owned[] = {w->x, w->kv,    w->q, w->hidden,  w->logit, w->keep, w->d_keep,
                         w->e, w->alpha, w->p, w->scratch, w->o,     w->dense};
        for (size_t j = 0; j < sizeof owned / sizeof *owned; j++) free(owned[j]);
        kv_net_tape_free_f32(w->tape);
    }
    free(o->thread);
    free(o);
}

kv_train_dms_window kv_train_dms_choose(const kv_train_dms_options *o, const kv_train_trace *t,
                                        int32_t trace, int64_t step) {
    kv_train_dms_window w = {.n = o->tokens, .every = 1, .step = (uint32_t)step};
    double u = kv_rand_uniform(o->seed, w.step, (uint32_t)trace, 0, 3);
    double v = kv_rand_uniform(o->seed, w.step, (uint32_t)trace, 1, 3);
    int64_t at = (int64_t)(u * (double)t->n_token);
    int32_t doc = 0;
    while (t->doc_first[doc + 1] <= at) doc++;
    int64_t length = t->doc_first[doc + 1] - t->doc_first[doc];
    if (w.n > length) w.n = (int32_t)length;
    w.first = t->doc_first[doc] + (int64_t)(v * (double)(length - w.n + 1));
    if (o->every >= (w.n + BLOCK - 1) / BLOCK) return w;
    w.every = o->every;
    w.from = (int32_t)(o->every * kv_rand_uniform(o->seed, w.step, (uint32_t)trace, 2, 3));
    return w;
}

/* Elements of a stored array, widened. */
static void widen(const kv_train_trace *t, const void *from, int64_t at, int64_t n, float *to) {
    kv_widen(t->type, (const char *)from + (size_t)at * kv_dtype_size(t->type), to, (size_t)n);
}

/* Inputs of the gate over tokens [first, first + n) of a lane: w->kv, w->x. */
static void load_inputs(const kv_train_dms *o, const kv_train_trace *t, int32_t lane, int64_t first,
                        int32_t n, workspace *w) {
    int64_t d = o->set->head_dim, layer = lane / o->set->n_kv_head;
    widen(t, t->kv, (lane * t->n_token + first) * 2 * d, n * 2 * d, w->kv);
    if (o->options.spec.source == KV_DMS_HIDDEN) {
        int64_t width = o->set->d_model;
        kv_widen(KV_BF16, (const uint16_t *)t->hidden + (layer * t->n_token + first) * width,
                 w->hidden, (size_t)(n * width));
    }
    kv_dms_input(&o->options.spec, n, (int32_t)d, w->kv, w->kv + d, 2 * d, w->hidden, w->x);
}

/* Relaxed decisions of the lane on this window: w->logit, alpha, keep. Returns how many tokens are marked. */
static kv_status decide(const kv_train_dms *o, const float *param, const place *p, int32_t lane,
                        workspace *w, int32_t *marked) {
    const kv_train_dms_options *opt = &o->options;
    load_inputs(o, p->t, lane, p->w.first, p->w.n, w);
    kv_status st =
        kv_dms_logits_f32(&opt->spec, param + lane * o->n_param, p->w.n, w->x, &w->tape, w->logit);
    *marked = 0;
    for (int32_t t = 0; st == KV_OK && t < p->w.n; t++) {
        double keep = 0;
        int32_t at = t + opt->shift; /* the gate that decides about t */
        w->alpha[t] = 0;
        if (at < p->w.n)
            w->alpha[t] = kv_dms_alpha(
                (double)w->logit[at],
                kv_dms_noise(opt->seed, p->w.step, (uint32_t)lane, (uint32_t)at), opt->temp, &keep);
        w->keep[t] = (float)keep;
        *marked += w->alpha[t] > 0.5;
    }
    return st;
}

/* Squared error of the lane's outputs relative to their size, mean over its query heads; w->d_keep gets its gradient. */
static double match(const kv_train_dms *o, const place *p, int32_t lane, workspace *w) {
    const kv_train_set *set = o->set;
    int32_t d = set->head_dim, group = set->n_q_head / set->n_kv_head;
    int32_t layer = lane / set->n_kv_head, head = lane % set->n_kv_head;
    int32_t blocks = (p->w.n + BLOCK - 1) / BLOCK;
    double loss = 0;
    memset(w->d_keep, 0, (size_t)p->w.n * sizeof *w->d_keep);
    for (int32_t g = 0; g < group; g++) {
        double off = 0, size = 0;
        int64_t row = (int64_t)layer * set->n_q_head + head * group + g;
        kv_dms_head_f32 h = {.n = p->w.n,
                             .dim = d,
                             .window = o->options.window,
                             .q = w->q,
                             .k = w->kv,
                             .v = w->kv + d,
                             .q_stride = d,
                             .kv_stride = 2 * d,
                             .scale = (double)set->scale,
                             .softcap = (double)set->softcap,
                             .log_keep = w->keep};
        widen(p->t, p->t->q, (row * p->t->n_token + p->w.first) * d, (int64_t)p->w.n * d, w->q);
        memset(w->e, 0, (size_t)p->w.n * sizeof *w->e);
        for (int32_t b = p->w.from; b < blocks; b += p->w.every) {
            int32_t first = b * BLOCK, rows = p->w.n - first < BLOCK ? p->w.n - first : BLOCK;
            kv_dms_rows_f32(&h, first, rows, w->o, w->dense, w->p, w->scratch);
            for (int32_t i = 0; i < rows * d; i++) { /* dense becomes d_o, up to the size */
                float apart = w->o[i] - w->dense[i];
                size += (double)w->dense[i] * (double)w->dense[i];
                off += (double)apart * (double)apart;
                w->dense[i] = 2 * apart;
            }
            kv_dms_rows_backward_f32(&h, first, rows, w->p, w->o, w->dense, w->scratch, w->e);
        }
        if (size == 0) continue;
        loss += off / size / group;
        for (int32_t t = 0; t < p->w.n; t++) w->d_keep[t] += w->e[t] / (float)(size * group);
    }
    return loss;
}

/* Gradients of the lane: attention through log(1 - alpha), ratio loss straight through the hard decision (maths.md 7.3, 7.5). */
static kv_status backward(const kv_train_dms *o, kv_train_state *s, const place *p, int32_t lane,
                          bool pushed, workspace *w) {
    const kv_train_dms_options *opt = &o->options;
    double push = pushed ? opt->pressure / ((double)s->n_lane * p->w.n) : 0;
    memset(w->e, 0, (size_t)p->w.n * sizeof *w->e);
    for (int32_t t = 0; t + opt->shift < p->w.n; t++) {
        double a = w->alpha[t] / opt->temp;
        w->e[t + opt->shift] =
            (float)(-a * (double)w->d_keep[t] / s->n_lane - push * a * (1 - w->alpha[t]));
    }
    return kv_dms_logits_backward_f32(&opt->spec, s->param + lane * s->n_param, p->w.n, w->x,
                                      w->tape, w->e, s->grad + lane * s->n_param);
}

static kv_status evaluate(void *context, kv_train_state *s, int32_t trace, int64_t step, bool train,
                          kv_train_figures *out) {
    kv_train_dms *o = context;
    kv_status st = KV_OK, *failed = NULL;
    double *loss = NULL, marked = 0;
    int32_t *count = NULL;
    const kv_train_trace *t = &o->set->trace[trace];
    place p = {t, kv_train_dms_choose(&o->options, t, trace, train ? step : -1)};
    double wanted =
        kv_dms_target(o->options.ratio, train ? step : o->options.ramp, o->options.ramp);
    KV_NEW(failed, s->n_lane);
    KV_NEW(loss, s->n_lane);
    KV_NEW(count, s->n_lane);
#pragma omp parallel for schedule(dynamic) num_threads(o->n_thread)
    for (int32_t lane = 0; lane < s->n_lane; lane++)
        failed[lane] =
            decide(o, s->param, &p, lane, &o->thread[omp_get_thread_num()], &count[lane]);
    for (int32_t lane = 0; lane < s->n_lane; lane++) {
        KV_TRY(failed[lane]);
        marked += (double)count[lane] / ((double)s->n_lane * p.w.n);
    }
    bool pushed = marked < wanted;
#pragma omp parallel for schedule(dynamic) num_threads(o->n_thread)
    for (int32_t lane = 0; lane < s->n_lane; lane++) {
        workspace *w = &o->thread[omp_get_thread_num()];
        failed[lane] = decide(o, s->param, &p, lane, w, &count[lane]);
        if (failed[lane] != KV_OK) continue;
        loss[lane] = match(o, &p, lane, w);
        if (train) failed[lane] = backward(o, s, &p, lane, pushed, w);
    }
    *out = (kv_train_figures){.right = NAN, .keep = 1 - marked};
    for (int32_t lane = 0; lane < s->n_lane; lane++) {
        KV_TRY(failed[lane]);
        out->loss += loss[lane] / s->n_lane;
    }
    out->loss += o->options.pressure * fmax(0, wanted - marked);
out:
    free(failed);
    free(loss);
    free(count);
    return st;
}

kv_status kv_train_dms_use_gpu(kv_train_dms *o) {
    return kv_train_dms_gpu_open(o->set, &o->options, &o->gpu);
}

kv_train_objective kv_train_dms_objective(kv_train_dms *o) {
    if (o->gpu) return kv_train_dms_gpu_objective(o->gpu);
    return (kv_train_objective){.context = o, .evaluate = evaluate};
}

kv_status kv_train_dms_logits(kv_train_dms *o, const float *param, int32_t trace, float *out) {
    if (o->gpu) return kv_train_dms_gpu_logits(o->gpu, param, trace, out);
    kv_status st = KV_OK, *failed = NULL;
    const kv_train_trace *t = &o->set->trace[trace];
    int32_t n_lane = o->set->n_layer * o->set->n_kv_head;
    KV_NEW(failed, n_lane);
#pragma omp parallel for schedule(dynamic) num_threads(o->n_thread)
    for (int32_t lane = 0; lane < n_lane; lane++) {
        workspace *w = &o->thread[omp_get_thread_num()];
        for (int64_t first = 0; first < t->n_token && failed[lane] == KV_OK;
             first += o->options.tokens) {
            int64_t n = t->n_token - first;
            if (n > o->options.tokens) n = o->options.tokens;
            load_inputs(o, t, lane, first, (int32_t)n, w);
            failed[lane] =
                kv_dms_logits_f32(&o->options.spec, param + lane * o->n_param, (int32_t)n, w->x,
                                  &w->tape, out + lane * t->n_token + first);
        }
    }
    for (int32_t lane = 0; lane < n_lane; lane++) KV_TRY(failed[lane]);
out:
    free(failed);
    return st;
}
