/* Literal transcription of contract.md 1 (steps) and 2 (tova, h2o, cumulative, oracle). */
#include "tests/naive/naive_replay.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/num.h"

double naive_logit(const kv_span *span, int32_t i, int32_t u, int32_t t) {
    const int32_t h = i / (span->n_q_head / span->n_kv_head);
    const float *q = span->q +
                     ((size_t)i * (size_t)span->stride + (size_t)u) * (size_t)span->head_dim,
                *k = span->k +
                     ((size_t)h * (size_t)span->stride + (size_t)t) * (size_t)span->head_dim;
    double l = 0;
    for (int32_t c = 0; c < span->head_dim; c++) l += (double)q[c] * (double)k[c];
    l *= (double)span->scale;
    return span->softcap > 0 ? (double)span->softcap * tanh(l / (double)span->softcap) : l;
}

double naive_softmax(const kv_span *span, int32_t i, int32_t u, const uint8_t *held, double *p) {
    double top = -INFINITY, sum = 0;
    for (int32_t t = 0; t <= u; t++) {
        p[t] = held[t] ? naive_logit(span, i, u, t) : -INFINITY;
        top = fmax(top, p[t]);
    }
    for (int32_t t = 0; t <= u; t++) sum += held[t] ? exp(p[t] - top) : 0;
    for (int32_t t = 0; t <= u; t++) {
        p[t] = held[t] ? exp(p[t] - top) / sum : 0;
        if (p[t] < 0x1p-126) p[t] = 0;
    }
    return sum > 0 ? top + log(sum) : -INFINITY;
}

static double reduce(kv_reduce how, const double *x, int32_t n) {
    double sum = 0, most = x[0];
    for (int32_t i = 0; i < n; i++) {
        sum += x[i];
        most = fmax(most, x[i]);
    }
    return how == KV_REDUCE_MAX ? most : how == KV_REDUCE_MEAN ? sum / n : sum;
}

/* One set of decisions for the query heads first .. first + n - 1. out [n_token] */
static void one_set(const kv_span *span, const kv_attention_rule *rule, int32_t budget,
                    int32_t first, int32_t n, int32_t *out) {
    const int32_t size = span->n_token;
    uint8_t *held = calloc((size_t)size, 1);
    double *a = calloc((size_t)size, sizeof *a), *p = calloc((size_t)(n * size), sizeof *p),
           *x = calloc((size_t)n, sizeof *x);
    int32_t n_held = 0;
    for (int32_t t = 0; t < size; t++) out[t] = KV_NEVER;
    for (int32_t u = 0; u < size; u++) {
        held[u] = 1;
        a[u] = 0;
        n_held++;
        for (int32_t i = 0; i < n; i++) naive_softmax(span, first + i, u, held, p + i * size);
        for (int32_t t = 0; t <= u; t++) {
            if (!held[t]) continue;
            for (int32_t i = 0; i < n; i++) x[i] = p[i * size + t];
            a[t] = rule->decay * a[t] + reduce(rule->reduce, x, n);
        }
        if (n_held <= budget) continue;
        int32_t victim = -1;
        for (int32_t t = 0; t <= u - rule->protect_recent; t++)
            if (held[t] && (victim < 0 || a[t] <= a[victim])) victim = t;
        held[victim] = 0;
        n_held--;
        if (u + 1 < size) out[victim] = u + 1;
    }
    free(held);
    free(a);
    free(p);
    free(x);
}

void naive_closed_loop(const kv_span *span, const kv_attention_rule *rule, int32_t budget,
                       int32_t *evict_at) {
    const int32_t group = span->n_q_head / span->n_kv_head;
    for (int32_t h = 0; h < span->n_kv_head; h++)
        one_set(span, rule, budget, rule->per_layer ? 0 : h * group,
                rule->per_layer ? span->n_q_head : group, evict_at + h * span->stride);
}

void naive_priority_loop(const kv_span *span, const kv_run *run, const float *priority,
                         int32_t *evict_at) {
    for (int32_t h = 0; h < span->n_kv_head; h++) {
        const float *r = priority + h * span->stride;
        int32_t *out = evict_at + h * span->stride, n_held = 0;
        for (int32_t t = 0; t < span->n_token; t++) out[t] = KV_NEVER;
        for (int32_t u = 0; u < span->n_token; u++) {
            n_held++;
            if (n_held <= run->budget) continue;
            int32_t victim = -1;
            for (int32_t t = run->sinks; t <= u - run->window; t++)
                if (out[t] == KV_NEVER && (victim < 0 || r[t] <= r[victim])) victim = t;
            out[victim] = u;
            n_held--;
        }
    }
}

void naive_future_mass(const kv_span *span, int32_t window, double power, bool mean, double *m) {
    const int32_t size = span->n_token, group = span->n_q_head / span->n_kv_head;
    uint8_t *held = calloc((size_t)size, 1);
    double *p = calloc((size_t)size, sizeof *p);
    memset(held, 1, (size_t)size);
    for (int32_t i = 0; i < span->n_q_head; i++) {
        double *out = m + (i / group) * span->stride, *sum = calloc((size_t)size, sizeof *sum);
        for (int32_t u = 0; u < size; u++) {
            naive_softmax(span, i, u, held, p);
            for (int32_t t = 0; t <= u - window; t++) sum[t] += p[t] > 0 ? pow(p[t], power) : 0;
        }
        for (int32_t t = 0; t < size; t++) {
            const double x = sum[t] / fmax(1, size - t - window);
            if (i % group == 0) out[t] = 0;
            out[t] = mean ? out[t] + x / group : fmax(out[t], x);
        }
        free(sum);
    }
    free(held);
    free(p);
}

void naive_oracle(const kv_span *span, const kv_run *run, double power, int32_t *evict_at) {
    const size_t n = (size_t)span->n_kv_head * (size_t)span->stride;
    double *m = calloc(n, sizeof *m);
    float *priority = calloc(n, sizeof *priority);
    const double eps = power > 2 ? exp(power * log(1e-8)) : run->eps;
    naive_future_mass(span, run->window, power, run->target_mean, m);
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++)
            priority[h * span->stride + t] = kv_static_priority(log(eps + m[h * span->stride + t]),
                                                                t, log1p(-run->oracle_delta));
    naive_priority_loop(span, run, priority, evict_at);
    free(m);
    free(priority);
}
