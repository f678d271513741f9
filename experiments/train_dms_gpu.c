/* dms objective, all lanes at once on the GPU. */
#include "experiments/train_dms_gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/train_device.h"
#include "reference/core/mem.h"

typedef struct on_device { /* one trace */
    kv_gpu_span *span;     /* heads of all layers */
    kv_gpu_buffer *x;      /* [n_lane or n_layer][n_token][n_input] */
} on_device;

struct kv_train_dms_gpu {
    const kv_train_set *set;
    const kv_train_dms_options *options;
    int32_t n_lane, n_query; /* query heads of all layers */
    kv_train_device device;
    kv_train_shelf shelf;
    kv_gpu_gates *gates;
    on_device *trace;                               /* [n_trace] */
    kv_gpu_buffer *logit, *log_keep, *marked_there; /* [n_lane][tokens], [n_lane] */
    kv_gpu_buffer *o, *dense, *lse, *d_keep;        /* [n_query][tokens] (o, dense: [head_dim]) */
    kv_gpu_buffer *off_there;                       /* double [n_query][2] */
    int32_t *marked;                                /* [n_lane] */
    double *off;                                    /* [n_query][2] */
};

static void drop(void *context, int32_t trace) {
    on_device *d = &((kv_train_dms_gpu *)context)->trace[trace];
    kv_gpu_span_free(d->span);
    (void)kv_gpu_free(d->x);
    *d = (on_device){0};
}

void kv_train_dms_gpu_close(kv_train_dms_gpu *o) {
    if (!o) return;
    kv_train_shelf_close(&o->shelf);
    kv_gpu_buffer *owned[] = {o->logit, o->log_keep, o->marked_there, o->o,
                              o->dense, o->lse,      o->d_keep,       o->off_there};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) (void)kv_gpu_free(owned[i]);
    kv_gpu_gates_free(o->gates);
    kv_train_device_close(&o->device);
    free(o->trace);
    free(o->marked);
    free(o->off);
    free(o);
}

kv_status kv_train_dms_gpu_open(const kv_train_set *set, const kv_train_dms_options *options,
                                kv_train_dms_gpu **out) {
    kv_status st = KV_OK;
    kv_train_dms_gpu *o = NULL;
    KV_NEW(o, 1);
    o->set = set;
    o->options = options;
    o->n_lane = set->n_layer * set->n_kv_head;
    o->n_query = set->n_layer * set->n_q_head;
    const size_t lanes = (size_t)o->n_lane, heads = (size_t)o->n_query, n = (size_t)options->tokens,
                 word = sizeof(float), d = (size_t)set->head_dim;
    KV_NEW(o->trace, set->n_trace);
    KV_NEW(o->marked, lanes);
    KV_NEW(o->off, 2 * heads);
    KV_TRY(kv_train_device_open(&o->device, o->n_lane * kv_dms_param(&options->spec)));
    kv_gpu *g = o->device.gpu;
    KV_TRY(kv_gpu_gates_new(g, &options->spec, o->n_lane, set->n_kv_head, &o->gates));
    KV_TRY(kv_gpu_new(g, lanes * n * word, &o->logit));
    KV_TRY(kv_gpu_new(g, lanes * n * word, &o->log_keep));
    KV_TRY(kv_gpu_new(g, lanes * sizeof *o->marked, &o->marked_there));
    KV_TRY(kv_gpu_new(g, heads * n * d * word, &o->o));
    KV_TRY(kv_gpu_new(g, heads * n * d * word, &o->dense));
    KV_TRY(kv_gpu_new(g, heads * n * word, &o->lse));
    KV_TRY(kv_gpu_new(g, heads * n * word, &o->d_keep));
    KV_TRY(kv_gpu_new(g, 2 * heads * sizeof *o->off, &o->off_there));
    KV_TRY(kv_train_shelf_open(&o->shelf, g, set->n_trace, o, drop));
    *out = o;
out:
    if (st != KV_OK) kv_train_dms_gpu_close(o);
    return st;
}

/* Inputs of the gates of a trace: x [n_lane or n_layer][n_token][n_input]; k, v [n_lane][n_token][head_dim]. */
static kv_status lay_out(const kv_train_dms_gpu *o, const kv_train_trace *t, float *k, float *v,
                         float *x) {
    kv_status st = KV_OK;
    const kv_train_set *set = o->set;
    const kv_dms_spec *spec = &o->options->spec;
    const int64_t n = t->n_token, d = set->head_dim, wide = spec->n_input;
    const bool shared = spec->source == KV_DMS_HIDDEN;
    float *kv = NULL, *hidden = NULL;
    KV_NEW(kv, n * 2 * d);
    KV_NEW(hidden, shared ? n * wide : 0);
    for (int32_t lane = 0; lane < o->n_lane; lane++) {
        const int32_t layer = lane / set->n_kv_head, head = lane % set->n_kv_head;
        kv_train_lane_kv(set, t, layer, head, kv);
        for (int64_t i = 0; i < n; i++) {
            memcpy(k + (lane * n + i) * d, kv + i * 2 * d, (size_t)d * sizeof *k);
            memcpy(v + (lane * n + i) * d, kv + i * 2 * d + d, (size_t)d * sizeof *v);
        }
        if (shared && head > 0) continue;
        if (shared)
            kv_widen(KV_BF16, (const uint16_t *)t->hidden + layer * n * wide, hidden,
                     (size_t)(n * wide));
        kv_dms_input(spec, (int32_t)n, (int32_t)d, kv, kv + d, 2 * d, hidden,
                     x + (shared ? layer : lane) * n * wide);
    }
out:
    free(kv);
    free(hidden);
    return st;
}

static kv_status upload(kv_train_dms_gpu *o, int32_t trace) {
    kv_status st = KV_OK;
    on_device *device = &o->trace[trace];
    const kv_train_set *set = o->set;
    const kv_train_trace *t = &set->trace[trace];
    const int64_t n = t->n_token, d = set->head_dim, queries = o->n_query * n * d;
    const int64_t inputs = (o->options->spec.source == KV_DMS_HIDDEN ? set->n_layer : o->n_lane) *
                           n * o->options->spec.n_input;
    float *q = NULL, *k = NULL, *v = NULL, *x = NULL;
    KV_NEW(q, queries);
    KV_NEW(k, o->n_lane * n * d);
    KV_NEW(v, o->n_lane * n * d);
    KV_NEW(x, inputs);
    kv_widen(t->type, t->q, q, (size_t)queries);
    KV_TRY(lay_out(o, t, k, v, x));
    const kv_span span = {.n_token = (int32_t)n,
                          .stride = n,
                          .n_q_head = o->n_query,
                          .n_kv_head = o->n_lane,
                          .head_dim = set->head_dim,
                          .q = q,
                          .k = k,
                          .v = v,
                          .scale = set->scale,
                          .softcap = set->softcap};
    KV_TRY(kv_gpu_span_upload(o->device.gpu, &span, true, &device->span));
    KV_TRY(kv_gpu_new(o->device.gpu, (size_t)inputs * sizeof *x, &device->x));
    KV_TRY(kv_gpu_put(device->x, x, (size_t)inputs * sizeof *x));
out:
    free(q);
    free(k);
    free(v);
    free(x);
    return st == KV_OK ? st : kv_error_context(st, "%s", t->path);
}

static kv_status use_trace(kv_train_dms_gpu *o, int32_t trace) {
    const int64_t n = o->set->trace[trace].n_token;
    const int64_t span = (o->n_query + 2 * (int64_t)o->n_lane) * n * 128 * (int64_t)sizeof(float),
                  x = o->n_lane * n * o->options->spec.n_input * (int64_t)sizeof(float);
    if (kv_train_shelf_take(&o->shelf, trace, span + x)) return KV_OK;
    return upload(o, trace);
}

/* Decisions, attention and errors of a window; with `train` the gradients by every query head. */
static kv_status attend(kv_train_dms_gpu *o, const on_device *d, int32_t n_token,
                        const kv_train_dms_window *w, bool train) {
    kv_status st = KV_OK;
    const kv_train_dms_options *opt = o->options;
    const kv_gpu_draw draw = {
        .seed = opt->seed, .step = w->step, .shift = opt->shift, .temp = opt->temp};
    const kv_gpu_window window = {.first = (int32_t)w->first,
                                  .n = w->n,
                                  .window = opt->window,
                                  .from = w->from,
                                  .every = w->every};
    KV_TRY(kv_gpu_gates_input(o->gates, d->x, n_token, window.first, w->n));
    KV_TRY(kv_gpu_gates_logits(o->gates, o->device.param, o->logit));
    KV_TRY(kv_gpu_gates_decide(o->gates, &draw, o->logit, o->log_keep, o->marked_there));
    KV_TRY(kv_gpu_soft_attend(d->span, &window, o->log_keep, o->o, o->dense, o->lse));
    KV_TRY(kv_gpu_soft_match(d->span, &window, o->o, o->dense, o->off_there));
    if (train)
        KV_TRY(
            kv_gpu_soft_backward(d->span, &window, o->log_keep, o->o, o->lse, o->dense, o->d_keep));
    KV_TRY(kv_gpu_get(o->marked_there, o->marked, (size_t)o->n_lane * sizeof *o->marked));
    KV_TRY(kv_gpu_get(o->off_there, o->off, 2 * (size_t)o->n_query * sizeof *o->off));
out:
    return st;
}

static kv_status evaluate(void *context, kv_train_state *s, int32_t trace, int64_t step, bool train,
                          kv_train_figures *out) {
    kv_status st = KV_OK;
    kv_train_dms_gpu *o = context;
    const kv_train_trace *t = &o->set->trace[trace];
    const kv_train_dms_options *opt = o->options;
    const kv_train_dms_window w = kv_train_dms_choose(opt, t, trace, train ? step : -1);
    const int32_t group = o->n_query / o->n_lane;
    const double wanted = kv_dms_target(opt->ratio, train ? step : opt->ramp, opt->ramp);
    double marked = 0;
    KV_TRY(use_trace(o, trace));
    KV_TRY(attend(o, &o->trace[trace], (int32_t)t->n_token, &w, train));
    for (int32_t lane = 0; lane < s->n_lane; lane++)
        marked += (double)o->marked[lane] / ((double)s->n_lane * w.n);
    if (train)
        KV_TRY(kv_gpu_gates_backward(
            o->gates, group, o->d_keep, o->off_there,
            marked < wanted ? opt->pressure / ((double)s->n_lane * w.n) : 0, o->device.grad));
    *out = (kv_train_figures){.right = NAN, .keep = 1 - marked};
    for (int32_t head = 0; head < o->n_query; head++) {
        const double off = o->off[2 * head], size = o->off[2 * head + 1];
        if (size != 0) out->loss += off / size / group / s->n_lane;
    }
    out->loss += opt->pressure * fmax(0, wanted - marked);
out:
    return st;
}

kv_status kv_train_dms_gpu_logits(kv_train_dms_gpu *o, const float *param, int32_t trace,
                                  float *out) {
    kv_status st = KV_OK;
    const int64_t n_token = o->set->trace[trace].n_token;
    float *part = NULL; /* [n_lane][tokens] */
    KV_NEW(part, (int64_t)o->n_lane * o->options->tokens);
    KV_TRY(kv_gpu_put(o->device.param, param, (size_t)o->device.n * sizeof *param));
    KV_TRY(use_trace(o, trace));
    for (int64_t first = 0; first < n_token; first += o->options->tokens) {
        const int64_t left = n_token - first,
                      n = left < o->options->tokens ? left : o->options->tokens;
        KV_TRY(kv_gpu_gates_input(o->gates, o->trace[trace].x, (int32_t)n_token, (int32_t)first,
                                  (int32_t)n));
        KV_TRY(kv_gpu_gates_logits(o->gates, o->device.param, o->logit));
        KV_TRY(kv_gpu_get(o->logit, part, (size_t)(o->n_lane * n) * sizeof *part));
        for (int64_t lane = 0; lane < o->n_lane; lane++)
            memcpy(out + lane * n_token + first, part + lane * n, (size_t)n * sizeof *part);
    }
out:
    free(part);
    return st;
}

static kv_status load(void *context, const kv_train_state *s) {
    return kv_train_device_load(&((kv_train_dms_gpu *)context)->device, s);
}

static kv_status fetch(void *context, kv_train_state *s) {
    return kv_train_device_fetch(&((kv_train_dms_gpu *)context)->device, s);
}

static kv_status update(void *context, const kv_adamw *group, int64_t step, double clip,
                        double *sum) {
    return kv_train_device_update(&((kv_train_dms_gpu *)context)->device, group, step, clip, sum);
}

kv_train_objective kv_train_dms_gpu_objective(kv_train_dms_gpu *o) {
    return (kv_train_objective){
        .context = o, .evaluate = evaluate, .load = load, .fetch = fetch, .update = update};
}
