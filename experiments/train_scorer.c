/* Boundary loss on a trace: lanes in parallel, each forward, loss and backward in one go, so memory holds one lane a thread. */
#include "experiments/train_scorer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/train_scorer_gpu.h"
#include "reference/core/cpu.h"
#include "reference/core/mem.h"

#include <omp.h>

enum {
    CHUNK = 64
}; /* tokens a chunk of the recurrence: pairs and state then cost about the same */

typedef struct workspace { /* of one thread, for traces of up to `capacity` tokens */
    int64_t capacity;
    float *x, *hidden, *rhat, *e;
    double *rhat64, *d_rhat;
    int32_t *query;
    kv_pair *pair;
    kv_net_tape_f32 *tape;
} workspace;

struct kv_train_scorer {
    const kv_train_set *set;
    const kv_run *run;
    kv_net_spec spec;
    kv_net_layout layout;
    kv_loss_options loss;
    int32_t n_thread;
    workspace *thread;
    kv_train_scorer_gpu *gpu; /* NULL: CPU */
};

static void release(workspace *w) {
    void *owned[] = {w->x, w->hidden, w->rhat, w->e, w->rhat64, w->d_rhat, w->query, w->pair};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    kv_net_tape_free_f32(w->tape);
    memset(w, 0, sizeof *w);
}

static kv_status reserve(const kv_train_scorer *o, int64_t n, workspace *w) {
    kv_status st = KV_OK;
    bool hidden = o->spec.hidden_input || o->spec.hidden_gate;
    if (w->capacity >= n) return KV_OK;
    release(w);
    KV_NEW(w->x, n * 2 * o->set->head_dim);
    KV_NEW(w->hidden, hidden ? n * o->set->d_model : 0);
    KV_NEW(w->rhat, n);
    KV_NEW(w->e, n);
    KV_NEW(w->rhat64, n);
    KV_NEW(w->d_rhat, n);
    KV_NEW(w->query, n);
    KV_NEW(w->pair, n);
    w->capacity = n;
out:
    return st;
}

void kv_train_scorer_close(kv_train_scorer *o) {
    if (!o) return;
    kv_train_scorer_gpu_close(o->gpu);
    for (int32_t i = 0; o->thread && i < o->n_thread; i++) release(&o->thread[i]);
    free(o->thread);
    free(o);
}

kv_status kv_train_scorer_open(const kv_train_set *set, const kv_run *run, const kv_net_spec *spec,
                               const kv_loss_options *loss, kv_train_scorer **out) {
    kv_status st = KV_OK;
    kv_train_scorer *o = NULL;
    for (int32_t i = 0; i < set->n_trace; i++) {
        bool decides = false;
        const kv_train_trace *t = &set->trace[i];
        for (int32_t doc = 0; doc < t->n_doc; doc++)
            decides |= t->doc_first[doc + 1] - t->doc_first[doc] > run->budget + loss->tail;
        if (!decides)
            KV_RAISE(KV_E_USAGE,
                     "%s: no document is longer than budget %d + %d tokens, so there is nothing to "
                     "learn from; use longer traces or a smaller budget",
                     t->path, run->budget, loss->tail);
    }
    KV_NEW(o, 1);
    o->set = set;
    o->run = run;
    o->spec = *spec;
    o->loss = *loss;
    kv_net_describe(spec, &o->layout);
    o->n_thread = kv_threads();
    KV_NEW(o->thread, o->n_thread);
    *out = o;
out:
    if (st != KV_OK) kv_train_scorer_close(o);
    return st;
}

/* The pairs of one lane, all documents. */
static kv_status pairs_of(const kv_train_scorer *o, const kv_train_trace *t, int32_t lane,
                          double log_gamma, uint64_t seed, int64_t step, workspace *w,
                          int32_t *n_pair) {
    *n_pair = 0;
    for (int32_t doc = 0; doc < t->n_doc; doc++) {
        int64_t first = t->doc_first[doc];
        int32_t n = (int32_t)(t->doc_first[doc + 1] - first);
        int32_t nq = kv_boundary_queries(n, o->run, &o->loss, seed, (int32_t)step, doc, w->query);
        if (nq == 0) continue;
        kv_status st =
            kv_boundary_pairs(t->target + lane * t->n_token + first, n, o->run, log_gamma, w->query,
                              nq, (int32_t)first, w->pair + *n_pair);
        if (st != KV_OK) return st;
        *n_pair += nq;
    }
    return KV_OK;
}

/* Loss of one lane from its scores, and with `train` the gradients of score (e [n_token]) and decay. */
static kv_status lane_loss(const kv_train_scorer *o, kv_train_state *s, const kv_train_trace *t,
                           int32_t lane, int64_t step, bool train, const float *rhat, float *e,
                           workspace *w, kv_loss *loss) {
    int32_t n_pair;
    double slope, log_gamma = kv_net_log_gamma((double)s->theta[lane], &slope);
    for (int64_t i = 0; i < t->n_token; i++) w->rhat64[i] = (double)rhat[i];
    kv_status st = pairs_of(o, t, lane, log_gamma, o->run->seed, step, w, &n_pair);
    if (st != KV_OK) return st;
    *loss =
        kv_boundary_loss(w->pair, n_pair, &o->loss, w->rhat64, t->n_token, log_gamma, w->d_rhat);
    if (!train) return KV_OK;
    for (int64_t i = 0; i < t->n_token; i++) e[i] = (float)(w->d_rhat[i] / s->n_lane);
    s->d_theta[lane] = (float)(loss->log_gamma * slope / s->n_lane);
    return KV_OK;
}

static void layer_hidden(const kv_train_scorer *o, const kv_train_trace *t, int32_t layer,
                         float *out) {
    size_t n = (size_t)(t->n_token * o->set->d_model);
    kv_widen(KV_BF16, (const uint16_t *)t->hidden + (size_t)layer * n, out, n);
}

static kv_status lane_step(const kv_train_scorer *o, kv_train_state *s, const kv_train_trace *t,
                           int32_t lane, int64_t step, bool train, workspace *w, kv_loss *loss) {
    kv_status st = KV_OK;
    int32_t layer = lane / o->set->n_kv_head, head = lane % o->set->n_kv_head;
    float *param = s->param + lane * s->n_param;
    KV_TRY(reserve(o, t->n_token, w));
    if (!o->spec.hidden_input) kv_train_lane_kv(o->set, t, layer, head, w->x);
    if (o->spec.hidden_input || o->spec.hidden_gate) layer_hidden(o, t, layer, w->hidden);
    kv_net_input_f32 in = {
        .n_token = t->n_token,
        .x = o->spec.hidden_input ? w->hidden : w->x,
        .hidden = w->hidden,
        .n_doc = t->n_doc,
        .doc_first = t->doc_first,
        .chunk = CHUNK,
    };
    KV_TRY(kv_net_forward_f32(&o->spec, param, &in, &w->tape, w->rhat));
    KV_TRY(lane_loss(o, s, t, lane, step, train, w->rhat, w->e, w, loss));
    if (train)
        KV_TRY(
            kv_net_backward_f32(&o->spec, param, &in, w->tape, w->e, s->grad + lane * s->n_param));
out:
    return st;
}

kv_status kv_train_scorer_use_gpu(kv_train_scorer *o) {
    return kv_train_scorer_gpu_open(o->set, o->run, &o->spec, &o->loss, &o->gpu);
}

static kv_status evaluate(void *context, kv_train_state *s, int32_t trace, int64_t step, bool train,
                          kv_train_figures *out) {
    kv_train_scorer *o = context;
    kv_status st = KV_OK;
    kv_loss *loss = NULL;
    kv_status *failed = NULL;
    KV_NEW(loss, s->n_lane);
    KV_NEW(failed, s->n_lane);
#pragma omp parallel for schedule(dynamic) num_threads(o->n_thread)
    for (int32_t lane = 0; lane < s->n_lane; lane++)
        failed[lane] = lane_step(o, s, &o->set->trace[trace], lane, step, train,
                                 &o->thread[omp_get_thread_num()], &loss[lane]);
    *out = (kv_train_figures){0};
    for (int32_t lane = 0; lane < s->n_lane; lane++) {
        if (failed[lane] != KV_OK)
            KV_RAISE(failed[lane],
                     "%s, layer %d, head %d: a target is not a number, or memory is short",
                     o->set->trace[trace].path, lane / o->set->n_kv_head, lane % o->set->n_kv_head);
        out->loss += loss[lane].loss / s->n_lane;
        out->right += loss[lane].right / s->n_lane;
        out->keep += loss[lane].keep / s->n_lane;
    }
out:
    free(loss);
    free(failed);
    return st;
}

kv_train_objective kv_train_scorer_objective(kv_train_scorer *o) {
    if (o->gpu) return kv_train_scorer_gpu_objective(o->gpu);
    return (kv_train_objective){.context = o, .evaluate = evaluate};
}
