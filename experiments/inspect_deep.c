/* Reads a whole trace and compares what it says twice: the content hash with the content, the recorded log-sum-exp with q and k. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/inspect.h"
#include "reference/core/mem.h"
#include "traces/trace_file.h"

enum { SAMPLES = 16 }; /* queries per document, layer and head */

typedef struct verdict { /* the first disagreement becomes the status; the rest is printed */
    kv_status st;
    char first[1024];
    FILE *out;
} verdict;

static void disagree(verdict *v, kv_status st) {
    fprintf(v->out, "WRONG      %s\n", kv_error_message());
    if (v->st != KV_OK) return;
    v->st = st;
    snprintf(v->first, sizeof v->first, "%s", kv_error_message());
}

static void compare_hash(kv_trace *trace, verdict *v) {
    const kv_trace_info *info = kv_trace_get(trace);
    char hash[33];
    kv_status st = kv_trace_content_hash(trace, hash);
    if (st == KV_OK && info->content_hash[0] && strcmp(hash, info->content_hash) != 0)
        st = KV_FAIL(KV_E_DATA,
                     "%s: / attribute content_xxh3 is %s, but the content has %s; the trace was "
                     "changed after it was written",
                     info->path, info->content_hash, hash);
    if (st != KV_OK)
        disagree(v, st);
    else
        fprintf(v->out, "content    xxh3 %s%s\n", hash,
                info->content_hash[0] ? ", as recorded" : " (none is recorded)");
}

static void check_positions(const kv_trace_info *info, verdict *v) {
    const int64_t t = kv_trace_falling_position(info);
    if (t >= 0)
        disagree(v, KV_FAIL(KV_E_DATA,
                            "%s: position is %d at token %lld and %d before it; expected strictly "
                            "rising positions within a document",
                            info->path, info->position[t], (long long)t, info->position[t - 1]));
    else
        fprintf(v->out, "positions  rise within every document\n");
}

static double unit_roundoff(kv_element e) {
    return e == KV_EL_F16 ? 0x1p-11 : e == KV_EL_BF16 ? 0x1p-8 : 0x1p-24;
}

/* Recomputes the log-sum-exp of query u of head h; *bound is how far the recorded value may lie from it: the logits of the unrounded q
 * and k differ by up to (u_q + u_k) sum |q_i k_i|, plus the recorder's own fp32 sums. */
static double recompute(const kv_span *s, int32_t h, int32_t u, double roundoff, double *bound) {
    const int32_t d = s->head_dim, group = s->n_q_head / s->n_kv_head;
    const float *q = s->q + ((int64_t)h * s->stride + u) * d;
    double top = -INFINITY, sum = 0, worst = 0;
    for (int32_t t = 0; t <= u; t++) {
        const float *k = s->k + ((int64_t)(h / group) * s->stride + t) * d;
        double dot = 0, size = 0;
        for (int32_t c = 0; c < d; c++) {
            dot += (double)q[c] * k[c];
            size += fabs((double)q[c] * k[c]);
        }
        double l = s->scale * dot;
        if (s->softcap > 0) l = s->softcap * tanh(l / s->softcap);
        if (l > top) {
            sum *= exp(top - l);
            top = l;
        }
        sum += exp(l - top);
        worst = fmax(worst, size);
    }
    double lse = top + log(sum);
    *bound = s->scale * worst * (1.01 * roundoff + (d + 8) * 0x1p-24) + 1e-4 + 1e-5 * fabs(lse);
    return lse;
}

typedef struct lse_check {
    int64_t n;
    double largest, allowed; /* the difference nearest to its bound, and that bound */
} lse_check;

static kv_status compare_lse(const kv_trace *trace, const kv_trace_layer *l, int32_t layer,
                             lse_check *c) {
    const kv_trace_info *info = kv_trace_get(trace);
    const kv_found *item = trace->desc.request[0].item;
    double roundoff =
        unit_roundoff(item[KV_ITEM_Q].element) + unit_roundoff(item[KV_ITEM_K].element);
    for (int32_t doc = 0; doc < info->n_document; doc++) {
        kv_span s;
        kv_trace_span(trace, l, layer, doc, &s);
        for (int32_t h = 0; h < s.n_q_head; h++)
            for (int32_t i = 0; i < SAMPLES; i++) {
                int32_t u = (int32_t)((int64_t)(s.n_token - 1) * i / (SAMPLES - 1));
                double bound, lse = recompute(&s, h, u, roundoff, &bound);
                double recorded = (double)l->lse[h * l->n_token + s.first + u];
                double off = fabs(recorded - lse);
                if (!(off <= bound))
                    return KV_FAIL(
                        KV_E_DATA,
                        "%s: lse is %.7g at layer %d, query head %d, token %lld, but q and "
                        "k give %.7g (allowed difference %.2g): it belongs to other tensors",
                        info->path, recorded, s.layer_id, h, (long long)(s.first + u), lse, bound);
                if (off * c->allowed >= c->largest * bound) {
                    c->largest = off;
                    c->allowed = bound;
                }
                c->n++;
            }
    }
    return KV_OK;
}

static float largest(const float *x, int64_t n) {
    float m = 0;
    for (int64_t i = 0; i < n; i++) m = fmaxf(m, fabsf(x[i]));
    return m;
}

/* kv_trace_read_layer refuses values that are not finite. */
static void check_layers(kv_trace *trace, verdict *v) {
    const kv_trace_info *info = kv_trace_get(trace);
    lse_check lse = {.allowed = 1e-300};
    float q = 0, k = 0, w = 0;
    bool finite = true, same = true;
    for (int32_t i = 0; i < info->n_layer; i++) {
        kv_trace_layer l = {0};
        kv_status st = kv_interrupt_poll();
        if (st == KV_OK) st = kv_trace_read_layer(trace, i, true, &l);
        if (st != KV_OK) {
            disagree(v, st);
            finite = false;
            if (st == KV_E_INTERRUPTED || st == KV_E_INTERNAL) return;
            continue;
        }
        int64_t n = l.n_token * info->head_dim;
        q = fmaxf(q, largest(l.q, n * info->n_q_head));
        k = fmaxf(k, largest(l.k, n * info->n_kv_head));
        w = fmaxf(w, largest(l.v, n * info->n_kv_head));
        if (l.lse && same) st = compare_lse(trace, &l, i, &lse);
        if (st != KV_OK) {
            disagree(v, st);
            same = false;
        }
        kv_trace_layer_free(&l);
    }
    if (finite)
        fprintf(v->out, "values     finite in all layers; largest |q| %.4g, |k| %.4g, |v| %.4g\n",
                (double)q, (double)k, (double)w);
    if (lse.n && same)
        fprintf(v->out,
                "lse        agrees with q and k at %lld queries; off by %.2g where %.2g is "
                "allowed\n",
                (long long)lse.n, lse.largest, lse.allowed);
}

static bool in_all_requests(const kv_trace *trace, const char *score) {
    bool all = true;
    for (int32_t r = 0; r < trace->desc.n_request; r++) {
        const kv_found_request *q = &trace->desc.request[r];
        bool found = false;
        for (int32_t i = 0; i < q->n_score; i++)
            found = found || strcmp(strrchr(q->score[i].path, '/') + 1, score) == 0;
        all = all && found;
    }
    return all;
}

static void check_scores(kv_trace *trace, verdict *v) {
    const kv_trace_info *info = kv_trace_get(trace);
    const kv_found_request *r = &trace->desc.request[0];
    float *score = kv_mem_new((size_t)info->n_kv_head * (size_t)info->n_token, sizeof *score);
    for (int32_t i = 0; score && i < r->n_score; i++) {
        const char *name = strrchr(r->score[i].path, '/') + 1;
        kv_status st = KV_OK;
        if (!in_all_requests(trace, name)) {
            fprintf(v->out, "score      %s is not in all requests; it cannot be used\n", name);
            continue;
        }
        for (int32_t l = 0; l < info->n_layer && st == KV_OK; l++)
            st = kv_trace_read_score(trace, name, l, score, NULL);
        if (st != KV_OK)
            disagree(v, st);
        else
            fprintf(v->out, "score      %s is finite\n", name);
    }
    if (!score) disagree(v, KV_E_INTERNAL);
    free(score);
}

kv_status kv_inspect_deep(kv_trace *trace, FILE *out) {
    verdict v = {.st = KV_OK, .out = out};
    compare_hash(trace, &v);
    check_positions(kv_trace_get(trace), &v);
    check_layers(trace, &v);
    check_scores(trace, &v);
    return v.st == KV_OK ? KV_OK : KV_FAIL(v.st, "%s", v.first);
}
