/* Fit of the gates' offset (train_dms_offset.h): logits of every trace once, then bisection on counts. Counts are whole numbers, so
 * both devices find the same offset for the same logits. */
#include "experiments/train_dms_offset.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/kernels.h"
#include "reference/core/mem.h"

/* Gate logits of all training traces (and the held-out one, last). */
typedef struct gates {
    const kv_train_job *job;
    int64_t n_lane;
    int32_t shift;
    kv_gpu *gpu;           /* NULL: the CPU counts */
    float **logit;         /* [n_trace] -> [n_lane][n_token] */
    kv_gpu_buffer **there; /* the same on the GPU */
} gates;

static kv_status mean_kept(const gates *g, int32_t first, int32_t end, double offset, double *out) {
    kv_status st = KV_OK;
    double kept = 0, queries = 0;
    for (int32_t i = first; i < end; i++) {
        const kv_train_trace *t = &g->job->set.trace[i];
        const kv_dms_cache cache = {.n_doc = t->n_doc,
                                    .budget = g->job->run.budget,
                                    .window = g->job->run.window,
                                    .shift = g->shift,
                                    .doc_first = t->doc_first};
        int64_t seen = 0;
        if (g->gpu)
            KV_TRY(kv_gpu_gate_kept(g->gpu, &cache, g->n_lane, g->there[i], offset, &seen));
        else
            seen = kv_dms_kept(&cache, g->n_lane, g->logit[i], offset);
        kept += (double)seen;
        queries += (double)kv_dms_counted(&cache, g->n_lane);
    }
    *out = queries > 0 ? kept / queries : NAN;
out:
    return st;
}

/* The middle of the gap between logits in which -offset lies: rounding of the biased gate cannot then move a token across. */
static kv_status centre(const gates *g, double *offset) {
    kv_status st = KV_OK;
    float below = -INFINITY, above = INFINITY;
    for (int32_t i = 0; i < g->job->plan.n_trace; i++) {
        const int64_t n = g->n_lane * g->job->set.trace[i].n_token;
        if (g->gpu)
            KV_TRY(kv_gpu_gate_gap(g->gpu, n, g->there[i], *offset, &below, &above));
        else
            kv_dms_gap(n, g->logit[i], *offset, &below, &above);
    }
    if (!isinf(below) && !isinf(above)) *offset = -((double)below + (double)above) / 2;
out:
    return st;
}

static kv_status fit(const gates *g, kv_train_dms_fit *out) {
    kv_status st = KV_OK;
    double low = -1e4, high = 1e4, budget = g->job->run.budget, kept;
    int32_t n = g->job->plan.n_trace, held_out = g->job->plan.held_out;
    for (int i = 0; i < 60; i++) {
        double middle = (low + high) / 2;
        KV_TRY(mean_kept(g, 0, n, middle, &kept));
        if (kept > budget)
            low = middle;
        else
            high = middle;
    }
    out->offset = high;
    out->held_out = NAN;
    KV_TRY(centre(g, &out->offset));
    KV_TRY(mean_kept(g, 0, n, out->offset, &out->kept));
    if (!(fabs(out->kept - budget) <= 0.01 * budget))
        KV_RAISE(
            KV_E_DATA,
            "no gate offset gives a mean cache of %.0f: the nearest is %.1f; the gate tells too "
            "few tokens apart, train it longer or with more hidden units",
            budget, out->kept);
    if (held_out >= 0) KV_TRY(mean_kept(g, held_out, held_out + 1, out->offset, &out->held_out));
out:
    return st;
}

kv_status kv_train_dms_fit_offset(const kv_train_job *job, kv_train_dms *loss, const float *param,
                                  int32_t shift, kv_train_dms_fit *out) {
    kv_status st = KV_OK;
    const kv_train_set *set = &job->set;
    gates g = {.job = job, .n_lane = (int64_t)set->n_layer * set->n_kv_head, .shift = shift};
    if (job->options->ops != &kv_ops_cpu) KV_TRY(kv_gpu_shared(&g.gpu));
    KV_NEW(g.logit, set->n_trace);
    KV_NEW(g.there, set->n_trace);
    for (int32_t i = 0; i < set->n_trace; i++) {
        const size_t n = (size_t)(g.n_lane * set->trace[i].n_token);
        KV_NEW(g.logit[i], n);
        KV_TRY(kv_train_dms_logits(loss, param, i, g.logit[i]));
        if (!g.gpu) continue;
        KV_TRY(kv_gpu_new(g.gpu, n * sizeof(float), &g.there[i]));
        KV_TRY(kv_gpu_put(g.there[i], g.logit[i], n * sizeof(float)));
    }
    KV_TRY(fit(&g, out));
out:
    for (int32_t i = 0; i < set->n_trace; i++) {
        if (g.logit) free(g.logit[i]);
        const kv_status freed = g.gpu && g.there ? kv_gpu_free(g.there[i]) : KV_OK;
        if (st == KV_OK) st = freed;
    }
    free(g.logit);
    free(g.there);
    return st;
}
