/* Attention by definition. */
#include "tests/naive/naive_attention.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const float *key_row(const kv_span *s, int32_t i, int32_t t) {
    const int32_t h = i / (s->n_q_head / s->n_kv_head);
    return s->k + ((int64_t)h * s->stride + t) * s->head_dim;
}

static double cap(const kv_span *s, double l) {
    return s->softcap > 0 ? (double)s->softcap * tanh(l / (double)s->softcap) : l;
}

static double logit(const kv_span *s, int32_t i, int32_t u, int32_t t) {
    const float *q = s->q + ((int64_t)i * s->stride + u) * s->head_dim, *k = key_row(s, i, t);
    double sum = 0;
    for (int32_t c = 0; c < s->head_dim; c++) sum += (double)q[c] * (double)k[c];
    return cap(s, (double)s->scale * sum);
}

/* x [head_dim] turned by `angle` steps: pairs (c, c + head_dim / 2). */
static void turn(const kv_span *s, double angle, double *x) {
    const int32_t half = s->head_dim / 2;
    for (int32_t c = 0; c < half; c++) {
        const double a = angle * s->inv_freq[c], v = x[c], w = x[c + half];
        x[c] = v * cos(a) - w * sin(a);
        x[c + half] = w * cos(a) + v * sin(a);
    }
}

/* Query and key: rotation by `position` undone, then turned to their places in the cache. */
static double logit_in_cache(const kv_span *s, int32_t i, int32_t u, int32_t t, int32_t u_place,
                             int32_t t_place) {
    const float *q = s->q + ((int64_t)i * s->stride + u) * s->head_dim, *k = key_row(s, i, t);
    double *x = calloc((size_t)s->head_dim, sizeof *x), *y = calloc((size_t)s->head_dim, sizeof *y);
    for (int32_t c = 0; c < s->head_dim; c++) {
        x[c] = (double)q[c];
        y[c] = (double)k[c];
    }
    turn(s, -(s->position ? s->position[u] : u), x);
    turn(s, -(s->position ? s->position[t] : t), y);
    turn(s, u_place, x);
    turn(s, t_place, y);
    double sum = 0;
    for (int32_t c = 0; c < s->head_dim; c++) sum += x[c] * y[c];
    free(x);
    free(y);
    return cap(s, (double)s->scale * sum);
}

/* log of the sum of exp(l[t]) over t <= u with in[t] */
static double log_sum(const double *l, const bool *in, int32_t u) {
    double max = -INFINITY, sum = 0;
    for (int32_t t = 0; t <= u; t++)
        if (in[t] && l[t] > max) max = l[t];
    for (int32_t t = 0; t <= u; t++)
        if (in[t]) sum += exp(l[t] - max);
    return sum > 0 ? max + log(sum) : -INFINITY;
}

/* A probability below 2^-126 counts as 0. */
static double probability(double l, double lse) {
    const double p = exp(l - lse);
    return p < 0x1p-126 ? 0 : p;
}

static void mix(const kv_span *s, int32_t i, int32_t u, const double *l, const bool *in, double lse,
                double *o) {
    const int32_t h = i / (s->n_q_head / s->n_kv_head);
    for (int32_t t = 0; t <= u; t++) {
        if (!in[t]) continue;
        const double p = exp(l[t] - lse);
        const float *v = s->v + ((int64_t)h * s->stride + t) * s->head_dim;
        for (int32_t c = 0; c < s->head_dim; c++) o[c] += p * (double)v[c];
    }
}

static double *doubles(int64_t n) { return calloc((size_t)n + 1, sizeof(double)); }

void naive_dense_compute(const kv_span *s, const kv_dense_request *r, naive_dense *out) {
    const int64_t cells = s->n_q_head * s->stride;
    double *l = doubles(s->n_token);
    bool *in = calloc((size_t)s->n_token, sizeof *in);
    for (int32_t t = 0; t < s->n_token; t++) in[t] = true;
    *out = (naive_dense){.lse = doubles(cells),
                         .long_mass = doubles(cells),
                         .top_p = doubles(cells),
                         .o = doubles(cells * s->head_dim),
                         .top_t = calloc((size_t)cells, sizeof(int32_t))};
    for (int32_t a = 0; a < r->n_power; a++) out->column[a] = doubles(cells);
    for (int32_t i = 0; i < s->n_q_head; i++)
        for (int32_t u = 0; u < s->n_token; u++) {
            const int64_t at = i * s->stride + u;
            for (int32_t t = 0; t <= u; t++) l[t] = logit(s, i, u, t);
            out->lse[at] = log_sum(l, in, u);
            const double norm = r->lse ? (double)r->lse[at] : out->lse[at];
            for (int32_t a = 0; a < r->n_power; a++)
                for (int32_t t = 0; t + r->window <= u; t++) {
                    double *column = &out->column[a][i * s->stride + t];
                    const double p = probability(l[t], norm);
                    *column = isinf(r->power[a]) ? fmax(*column, p) : *column + pow(p, r->power[a]);
                }
            out->top_t[at] = -1;
            for (int32_t t = r->sinks; t + r->window <= u; t++) {
                const double p = probability(l[t], out->lse[at]);
                out->long_mass[at] += p;
                if (out->top_t[at] >= 0 && p <= out->top_p[at]) continue;
                out->top_p[at] = p;
                out->top_t[at] = t;
            }
            mix(s, i, u, l, in, out->lse[at], out->o + at * s->head_dim);
        }
    free(l);
    free(in);
}

void naive_dense_free(naive_dense *d) {
    free(d->lse);
    free(d->long_mass);
    free(d->top_p);
    free(d->o);
    free(d->top_t);
    for (int a = 0; a < KV_DENSE_POWERS; a++) free(d->column[a]);
}

void naive_masked_compute(const kv_span *s, const kv_masked_request *r, naive_masked *out) {
    const int64_t cells = s->n_q_head * s->stride;
    double *l = doubles(s->n_token);
    bool *in = calloc((size_t)s->n_token, sizeof *in),
         *far = calloc((size_t)s->n_token, sizeof *far);
    *out = (naive_masked){.o = doubles(cells * s->head_dim),
                          .lse = doubles(cells),
                          .lse_long = doubles(cells),
                          .lse_orig = doubles(cells)};
    for (int32_t i = 0; i < s->n_q_head; i++)
        for (int32_t u = 0; u < s->n_token; u++) {
            const int32_t *evict_at = r->evict_at + i / (s->n_q_head / s->n_kv_head) * s->stride;
            const int64_t at = i * s->stride + u;
            int32_t held = 0, place = 0;
            for (int32_t t = 0; t <= u; t++) {
                in[t] = u < evict_at[t];
                far[t] = in[t] && t >= r->sinks && t <= u - r->window;
                held += in[t];
                l[t] = logit(s, i, u, t);
            }
            out->lse_long[at] = log_sum(l, far, u);
            out->lse_orig[at] = log_sum(l, in, u);
            for (int32_t t = 0; t <= u && r->rerotate; t++)
                if (in[t]) l[t] = logit_in_cache(s, i, u, t, held - 1, place++);
            out->lse[at] = log_sum(l, in, u);
            mix(s, i, u, l, in, out->lse[at], out->o + at * s->head_dim);
        }
    free(l);
    free(in);
    free(far);
}

void naive_masked_free(naive_masked *m) {
    free(m->o);
    free(m->lse);
    free(m->lse_long);
    free(m->lse_orig);
}

double naive_target_mass(const kv_span *s, int32_t window, double power, bool mean, int32_t h,
                         int32_t t) {
    const int32_t group = s->n_q_head / s->n_kv_head, later = s->n_token - t - window;
    double *l = doubles(s->n_token), reduced = 0;
    bool *in = calloc((size_t)s->n_token, sizeof *in);
    for (int32_t x = 0; x < s->n_token; x++) in[x] = true;
    for (int32_t g = 0; g < group; g++) {
        double m = 0;
        for (int32_t u = t + window; u < s->n_token; u++) {
            for (int32_t x = 0; x <= u; x++) l[x] = logit(s, h * group + g, u, x);
            const double p = probability(l[t], log_sum(l, in, u));
            m = isinf(power) ? fmax(m, p) : m + pow(p, power);
        }
        if (!isinf(power)) m /= later > 1 ? later : 1;
        reduced = mean ? reduced + m / group : fmax(reduced, m);
    }
    free(l);
    free(in);
    return reduced;
}

double naive_target_log(const kv_span *s, int32_t window, double power, bool mean, double eps,
                        int32_t h, int32_t t) {
    const double floor_mass = power > 2 && !isinf(power) ? exp(power * log(1e-8)) : eps;
    return log(floor_mass + naive_target_mass(s, window, power, mean, h, t));
}
