/* Dense sweep and masked attention, plain form: one query at a time, in double. */
#include "reference/attention.h"

#include <math.h>
#include <string.h>

#include "reference/core/mem.h"

static double logit(const kv_span *s, int32_t h, int32_t u, int32_t t) {
    const int32_t g = s->n_q_head / s->n_kv_head, d = s->head_dim;
    const float *q = s->q + ((size_t)h * (size_t)s->stride + (size_t)u) * (size_t)d;
    const float *k = s->k + ((size_t)(h / g) * (size_t)s->stride + (size_t)t) * (size_t)d;
    double a = 0;
    for (int32_t c = 0; c < d; c++) a += (double)q[c] * (double)k[c];
    a *= (double)s->scale;
    return s->softcap > 0 ? (double)s->softcap * tanh(a / (double)s->softcap) : a;
}

/* The logit after a further rotation of the key by `delta` positions. */
static double logit_rotated(const kv_span *s, int32_t h, int32_t u, int32_t t, double delta) {
    const int32_t g = s->n_q_head / s->n_kv_head, d = s->head_dim;
    const float *q = s->q + ((size_t)h * (size_t)s->stride + (size_t)u) * (size_t)d;
    const float *k = s->k + ((size_t)(h / g) * (size_t)s->stride + (size_t)t) * (size_t)d;
    double a = 0;
    for (int32_t c = 0; c < d / 2; c++) {
        const double x = q[c], y = q[c + d / 2], v = k[c], w = k[c + d / 2];
        a += cos(delta * s->inv_freq[c]) * (x * v + y * w);
        a += sin(delta * s->inv_freq[c]) * (y * v - x * w);
    }
    a *= (double)s->scale;
    return s->softcap > 0 ? (double)s->softcap * tanh(a / (double)s->softcap) : a;
}

static double log_sum_exp(const double *l, const uint8_t *seen, int32_t n) {
    double max = -INFINITY, sum = 0;
    for (int32_t t = 0; t < n; t++)
        if (seen[t]) max = fmax(max, l[t]);
    if (max == -INFINITY) return -INFINITY;
    for (int32_t t = 0; t < n; t++)
        if (seen[t]) sum += exp(l[t] - max);
    return max + log(sum);
}

static void mix(const kv_span *s, int32_t h, const double *l, const uint8_t *seen, double lse,
                int32_t n, float *o) {
    const int32_t d = s->head_dim, g = s->n_q_head / s->n_kv_head;
    for (int32_t c = 0; c < d; c++) {
        double a = 0;
        for (int32_t t = 0; t < n; t++)
            if (seen[t])
                a += exp(l[t] - lse) *
                     (double)s->v[((size_t)(h / g) * (size_t)s->stride + (size_t)t) * (size_t)d +
                                  (size_t)c];
        o[c] = (float)a;
    }
}

kv_status kv_dense_compute(const kv_span *s, const kv_dense_request *r, kv_dense *out) {
    kv_status st = KV_OK;
    const int32_t n = s->n_token, d = s->head_dim;
    const size_t cells = (size_t)s->n_q_head * (size_t)s->stride;
    double *l = NULL;
    uint8_t *seen = NULL;
    memset(out, 0, sizeof *out);
    out->request = *r;
    out->stride = s->stride;
    KV_NEW(l, n);
    KV_NEW(seen, n);
    memset(seen, 1, (size_t)n);
    KV_NEW(out->lse, cells);
    for (int32_t i = 0; i < r->n_power; i++) KV_NEW(out->column[i], cells);
    if (r->want_events) {
        KV_NEW(out->long_mass, cells);
        KV_NEW(out->top_p, cells);
        KV_NEW(out->top_t, cells);
    }
    if (r->want_output) KV_NEW(out->o, cells * (size_t)d);
    for (int32_t h = 0; h < s->n_q_head; h++)
        for (int32_t u = 0; u < n; u++) {
            const size_t at = (size_t)h * (size_t)s->stride + (size_t)u, row = at - (size_t)u;
            for (int32_t t = 0; t <= u; t++) l[t] = logit(s, h, u, t);
            const double lse = log_sum_exp(l, seen, u + 1);
            const double norm = r->lse ? (double)r->lse[at] : lse;
            out->lse[at] = (float)lse;
            for (int32_t i = 0; i < r->n_power; i++)
                for (int32_t t = 0; t <= u - r->window; t++) {
                    const double p = l[t] - norm < log(0x1p-126) ? 0 : exp(l[t] - norm);
                    double *c = &out->column[i][row + (size_t)t];
                    if (isinf(r->power[i]))
                        *c = fmax(*c, p);
                    else
                        *c += pow(p, r->power[i]);
                }
            if (r->want_events) {
                double sum = 0, top = -1;
                out->top_t[at] = -1;
                for (int32_t t = r->sinks; t <= u - r->window; t++) {
                    const double p = l[t] - lse < log(0x1p-126) ? 0 : exp(l[t] - lse);
                    sum += p;
                    if (p > top) top = p, out->top_t[at] = t;
                }
                out->long_mass[at] = (float)sum;
                out->top_p[at] = (float)fmax(top, 0);
            }
            if (r->want_output) mix(s, h, l, seen, lse, u + 1, out->o + at * (size_t)d);
        }
out:
    free(l);
    free(seen);
    if (st != KV_OK) kv_dense_free(out);
    return st;
}

void kv_dense_free(kv_dense *m) {
    if (!m) return;
    free(m->lse);
    for (int i = 0; i < KV_DENSE_POWERS; i++) free(m->column[i]);
    free(m->long_mass);
    free(m->top_p);
    free(m->top_t);
    free(m->o);
    memset(m, 0, sizeof *m);
}

kv_status kv_masked_compute(const kv_span *s, const kv_masked_request *r, kv_masked *out) {
    kv_status st = KV_OK;
    const int32_t n = s->n_token, d = s->head_dim;
    const size_t cells = (size_t)s->n_q_head * (size_t)s->stride;
    double *l = NULL;
    uint8_t *seen = NULL, *far = NULL;
    memset(out, 0, sizeof *out);
    if (r->rerotate && (!s->inv_freq || d % 2))
        KV_RAISE(KV_E_DATA, "re-rotation needs RoPE frequencies and an even head size");
    KV_NEW(l, n);
    KV_NEW(seen, n);
    KV_NEW(far, n);
    KV_NEW(out->lse, cells);
    if (r->rerotate) KV_NEW(out->lse_orig, cells);
    if (r->want_long) KV_NEW(out->lse_long, cells);
    if (r->want_output) KV_NEW(out->o, cells * (size_t)d);
    for (int32_t h = 0; h < s->n_q_head; h++)
        for (int32_t u = 0; u < n; u++) {
            const size_t at = (size_t)h * (size_t)s->stride + (size_t)u;
            const int32_t *evict_at =
                r->evict_at + (size_t)(h / (s->n_q_head / s->n_kv_head)) * (size_t)s->stride;
            int32_t held = 0, i = 0;
            for (int32_t t = 0; t <= u; t++) {
                seen[t] = u < evict_at[t];
                far[t] = seen[t] && t >= r->sinks && t <= u - r->window;
                held += seen[t];
                l[t] = seen[t] ? logit(s, h, u, t) : 0;
            }
            if (r->want_long) out->lse_long[at] = (float)log_sum_exp(l, far, u + 1);
            if (r->rerotate) {
                out->lse_orig[at] = (float)log_sum_exp(l, seen, u + 1);
                for (int32_t t = 0; t <= u; t++)
                    if (seen[t]) {
                        const int32_t pu = s->position ? s->position[u] : u;
                        const int32_t pt = s->position ? s->position[t] : t;
                        l[t] = logit_rotated(s, h, u, t, (double)(pu - pt - (held - 1 - i++)));
                    }
            }
            const double lse = log_sum_exp(l, seen, u + 1);
            out->lse[at] = (float)lse;
            if (r->want_output) mix(s, h, l, seen, lse, u + 1, out->o + at * (size_t)d);
        }
out:
    free(l);
    free(seen);
    free(far);
    if (st != KV_OK) kv_masked_free(out);
    return st;
}

void kv_masked_free(kv_masked *m) {
    if (!m) return;
    free(m->o);
    free(m->lse);
    free(m->lse_long);
    free(m->lse_orig);
    memset(m, 0, sizeof *m);
}

kv_status kv_attend(const kv_span *s, float *o, float *lse) {
    kv_status st = KV_OK;
    kv_dense dense = {0};
    const size_t cells = (size_t)s->n_q_head * (size_t)s->stride;
    KV_TRY(kv_dense_compute(s, &(kv_dense_request){.window = 1, .want_output = true}, &dense));
    memcpy(o, dense.o, cells * (size_t)s->head_dim * sizeof *o);
    if (lse) memcpy(lse, dense.lse, cells * sizeof *lse);
out:
    kv_dense_free(&dense);
    return st;
}
