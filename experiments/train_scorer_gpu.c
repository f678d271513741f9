/* Boundary loss on a trace, all lanes at once on the GPU, in fp32 as on the CPU. */
#include "experiments/train_scorer_gpu.h"

#include <stdlib.h>

#include "experiments/train_device.h"
#include "reference/core/mem.h"

typedef struct on_device { /* one trace; fp32 */
    kv_gpu_buffer *x;      /* [n_lane][n_token][2 head_dim], NULL with hidden input */
    kv_gpu_buffer *hidden; /* [n_layer][n_token][d_model] or NULL */
    kv_gpu_boundary *boundary;
} on_device;

struct kv_train_scorer_gpu {
    const kv_train_set *set;
    const kv_run *run;
    kv_net_spec spec;
    kv_loss_options options;
    int32_t n_lane;
    kv_train_device device;
    kv_train_shelf shelf;
    kv_gpu_net *net;
    on_device *trace;                     /* [n_trace] */
    kv_gpu_buffer *rhat, *e, *loss_there; /* [n_lane][tokens of the longest trace], [n_lane] */
    kv_loss *loss;                        /* [n_lane] */
    double *log_gamma, *slope;            /* [n_lane] */
};

static void drop(void *context, int32_t trace) {
    on_device *d = &((kv_train_scorer_gpu *)context)->trace[trace];
    (void)kv_gpu_free(d->x);
    (void)kv_gpu_free(d->hidden);
    kv_gpu_boundary_free(d->boundary);
    *d = (on_device){0};
}

void kv_train_scorer_gpu_close(kv_train_scorer_gpu *o) {
    if (!o) return;
    kv_train_shelf_close(&o->shelf);
    free(o->trace);
    (void)kv_gpu_free(o->rhat);
    (void)kv_gpu_free(o->e);
    (void)kv_gpu_free(o->loss_there);
    kv_gpu_net_free(o->net);
    kv_train_device_close(&o->device);
    free(o->loss);
    free(o->log_gamma);
    free(o->slope);
    free(o);
}

kv_status kv_train_scorer_gpu_open(const kv_train_set *set, const kv_run *run,
                                   const kv_net_spec *spec, const kv_loss_options *loss,
                                   kv_train_scorer_gpu **out) {
    kv_status st = KV_OK;
    kv_net_layout layout;
    int64_t longest = 0;
    kv_train_scorer_gpu *o = NULL;
    KV_NEW(o, 1);
    o->set = set;
    o->run = run;
    o->spec = *spec;
    o->options = *loss;
    o->n_lane = set->n_layer * set->n_kv_head;
    kv_net_describe(spec, &layout);
    KV_NEW(o->trace, set->n_trace);
    KV_NEW(o->loss, o->n_lane);
    KV_NEW(o->log_gamma, o->n_lane);
    KV_NEW(o->slope, o->n_lane);
    KV_TRY(kv_train_device_open(&o->device, o->n_lane * layout.n_param));
    kv_gpu *g = o->device.gpu;
    KV_TRY(kv_gpu_net_new(g, spec, o->n_lane, set->n_kv_head, true, &o->net));
    for (int32_t i = 0; i < set->n_trace; i++)
        if (set->trace[i].n_token > longest) longest = set->trace[i].n_token;
    const size_t scores = (size_t)(o->n_lane * longest) * sizeof(float);
    KV_TRY(kv_gpu_new(g, scores, &o->rhat));
    KV_TRY(kv_gpu_new(g, scores, &o->e));
    KV_TRY(kv_gpu_new(g, (size_t)o->n_lane * sizeof(kv_loss), &o->loss_there));
    KV_TRY(kv_train_shelf_open(&o->shelf, g, set->n_trace, o, drop));
    *out = o;
out:
    if (st != KV_OK) kv_train_scorer_gpu_close(o);
    return st;
}

/* Host rows of all lanes or layers -> device, [count][size]. */
static kv_status bring(kv_gpu *g, int64_t count, int64_t size, float **here,
                       kv_gpu_buffer **there) {
    kv_status st = KV_OK;
    KV_NEW(*here, count * size);
    KV_TRY(kv_gpu_new(g, (size_t)(count * size) * sizeof(float), there));
out:
    return st;
}

/* Inputs and targets of a trace to the device. */
static kv_status upload(kv_train_scorer_gpu *o, int32_t trace) {
    kv_status st = KV_OK;
    on_device *d = &o->trace[trace];
    const kv_train_set *set = o->set;
    const kv_train_trace *t = &set->trace[trace];
    const int64_t wide = t->n_token * 2 * set->head_dim, state = t->n_token * o->spec.n_hidden;
    float *x = NULL, *hidden = NULL;
    if (!o->spec.hidden_input) {
        KV_TRY(bring(o->device.gpu, o->n_lane, wide, &x, &d->x));
#pragma omp parallel for schedule(dynamic)
        for (int32_t lane = 0; lane < o->n_lane; lane++)
            kv_train_lane_kv(set, t, lane / set->n_kv_head, lane % set->n_kv_head, x + lane * wide);
        KV_TRY(kv_gpu_put(d->x, x, kv_gpu_bytes(d->x)));
    }
    if (state) {
        KV_TRY(bring(o->device.gpu, set->n_layer, state, &hidden, &d->hidden));
        kv_widen(KV_BF16, t->hidden, hidden, (size_t)(set->n_layer * state));
        KV_TRY(kv_gpu_put(d->hidden, hidden, kv_gpu_bytes(d->hidden)));
    }
    KV_TRY(kv_gpu_boundary_new(o->device.gpu, o->run, &o->options, o->n_lane, (int32_t)t->n_token,
                               t->n_doc, t->doc_first, t->target, &d->boundary));
out:
    free(x);
    free(hidden);
    return st == KV_OK ? st : kv_error_context(st, "%s", t->path);
}

/* The network's input becomes this trace. */
static kv_status use_trace(kv_train_scorer_gpu *o, int32_t trace) {
    kv_status st = KV_OK;
    const kv_train_trace *t = &o->set->trace[trace];
    const int64_t wide = o->spec.hidden_input ? 0 : (int64_t)o->n_lane * 2 * o->set->head_dim,
                  hidden = (int64_t)o->set->n_layer * o->spec.n_hidden,
                  pairs = (int64_t)o->n_lane * 16;
    if (o->shelf.newest == trace) return KV_OK;
    if (!kv_train_shelf_take(&o->shelf, trace,
                             t->n_token * (wide + hidden + pairs) * (int64_t)sizeof(float)))
        KV_TRY(upload(o, trace));
    KV_TRY(kv_gpu_net_input(o->net, (int32_t)t->n_token, t->n_doc, t->doc_first, o->trace[trace].x,
                            NULL, o->trace[trace].hidden));
out:
    return st;
}

static kv_status evaluate(void *context, kv_train_state *s, int32_t trace, int64_t step, bool train,
                          kv_train_figures *out) {
    kv_status st = KV_OK;
    kv_train_scorer_gpu *o = context;
    KV_TRY(use_trace(o, trace));
    kv_gpu_boundary *boundary = o->trace[trace].boundary;
    for (int32_t lane = 0; lane < o->n_lane; lane++)
        o->log_gamma[lane] = kv_net_log_gamma((double)s->theta[lane], &o->slope[lane]);
    KV_TRY(kv_gpu_boundary_pairs(boundary, (int32_t)step, o->log_gamma));
    KV_TRY(kv_gpu_net_forward(o->net, o->device.param, o->rhat));
    KV_TRY(kv_gpu_boundary_loss(boundary, o->rhat, train ? o->e : NULL, o->loss_there));
    if (train) KV_TRY(kv_gpu_net_backward(o->net, o->device.param, o->e, o->device.grad));
    KV_TRY(kv_gpu_get(o->loss_there, o->loss, (size_t)o->n_lane * sizeof *o->loss));
    *out = (kv_train_figures){0};
    for (int32_t lane = 0; lane < o->n_lane; lane++) {
        const kv_loss *loss = &o->loss[lane];
        if (train) s->d_theta[lane] = (float)(loss->log_gamma * o->slope[lane] / o->n_lane);
        out->loss += loss->loss / o->n_lane;
        out->right += loss->right / o->n_lane;
        out->keep += loss->keep / o->n_lane;
    }
out:
    return st;
}

static kv_status load(void *context, const kv_train_state *s) {
    return kv_train_device_load(&((kv_train_scorer_gpu *)context)->device, s);
}

static kv_status fetch(void *context, kv_train_state *s) {
    return kv_train_device_fetch(&((kv_train_scorer_gpu *)context)->device, s);
}

static kv_status update(void *context, const kv_adamw *group, int64_t step, double clip,
                        double *sum) {
    return kv_train_device_update(&((kv_train_scorer_gpu *)context)->device, group, step, clip,
                                  sum);
}

kv_train_objective kv_train_scorer_gpu_objective(kv_train_scorer_gpu *o) {
    return (kv_train_objective){
        .context = o, .evaluate = evaluate, .load = load, .fetch = fetch, .update = update};
}
