/* Literal transcription of maths.md 1 and 3 and of contract.md 2 (knorm, keydiff, bounds). */
#include "tests/naive/naive_select.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/naive/naive_replay.h"

/* Larger priority first, equal priority smaller t first. */
static bool precedes(const float *priority, int32_t a, int32_t b) {
    return priority[a] > priority[b] || (priority[a] == priority[b] && a < b);
}

static int32_t slots_of(const kv_run *run) { return run->budget - run->sinks - run->window; }

bool naive_keep(const float *priority, const kv_run *run, int32_t q, int32_t t) {
    if (t > q) return false;
    if (t < run->sinks || t > q - run->window) return true;
    int32_t better = 0;
    for (int32_t x = run->sinks; x <= q - run->window; x++) better += precedes(priority, x, t);
    return better < slots_of(run);
}

void naive_evict_at(const float *priority, const kv_run *run, int32_t n, int32_t *evict_at) {
    for (int32_t t = 0; t < n; t++) {
        int32_t q = t;
        while (q < n && naive_keep(priority, run, q, t)) q++;
        evict_at[t] = q < n ? q : KV_NEVER;
    }
}

int32_t naive_rank(const float *priority, int32_t n, int32_t t) {
    int32_t better = 0;
    for (int32_t x = 0; x < n; x++) better += precedes(priority, x, t);
    return better;
}

int32_t naive_tau(const float *priority, const kv_run *run, int32_t n, int32_t q) {
    for (int32_t t = run->sinks; t <= q - run->window; t++) {
        int32_t better = 0;
        for (int32_t x = run->sinks; x <= q - run->window; x++) better += precedes(priority, x, t);
        if (better == slots_of(run) - 1) return naive_rank(priority, n, t);
    }
    return n;
}

void naive_group_mass(const kv_span *span, int32_t h, double *mass) {
    int32_t n = span->n_token, group = span->n_q_head / span->n_kv_head;
    uint8_t *held = malloc((size_t)n);
    double *p = calloc((size_t)n, sizeof *p);
    memset(held, 1, (size_t)n);
    memset(mass, 0, (size_t)(n * n) * sizeof *mass);
    for (int32_t u = 0; u < n; u++)
        for (int32_t g = 0; g < group; g++) {
            naive_softmax(span, h * group + g, u, held, p);
            for (int32_t t = 0; t <= u; t++) mass[u * n + t] += p[t] / group;
        }
    free(held);
    free(p);
}

double naive_retained(const double *mass, int32_t n, int32_t budget, const int32_t *evict_at) {
    double sum = 0;
    for (int32_t u = budget; u < n; u++)
        for (int32_t t = 0; t <= u; t++)
            if (u < evict_at[t]) sum += mass[u * n + t];
    return sum / (n - budget);
}

double naive_step_bound(const double *mass, int32_t n, const kv_run *run) {
    double sum = 0;
    for (int32_t u = run->budget; u < n; u++)
        for (int32_t t = 0; t <= u; t++) {
            bool kept = t < run->sinks || t > u - run->window;
            int32_t better = 0;
            for (int32_t x = run->sinks; x <= u - run->window; x++)
                better += mass[u * n + x] > mass[u * n + t] ||
                          (mass[u * n + x] == mass[u * n + t] && x < t);
            if (kept || better < slots_of(run)) sum += mass[u * n + t];
        }
    return sum / (n - run->budget);
}

static double assign_from(const double *cost, int32_t n_row, int32_t n_column, int32_t row,
                          uint32_t taken) {
    if (row == n_row) return 0;
    double best = INFINITY;
    for (int32_t j = 0; j < n_column; j++)
        if (!(taken >> j & 1u))
            best = fmin(best, cost[row * n_column + j] +
                                  assign_from(cost, n_row, n_column, row + 1, taken | 1u << j));
    return best;
}

double naive_assign(const double *cost, int32_t n_row, int32_t n_column) {
    return assign_from(cost, n_row, n_column, 0, 0);
}

static const float *key(const kv_span *span, int32_t h, int32_t t) {
    return span->k + (h * span->stride + t) * span->head_dim;
}

double naive_knorm(const kv_span *span, int32_t h, int32_t t) {
    double sum = 0;
    for (int32_t c = 0; c < span->head_dim; c++)
        sum += (double)key(span, h, t)[c] * (double)key(span, h, t)[c];
    return -sqrt(sum);
}

double naive_keydiff(const kv_span *span, int32_t window, bool all, int32_t h, int32_t t) {
    int32_t last = all || t + window > span->n_token - 1 ? span->n_token - 1 : t + window;
    double dot = 0, square = 0;
    for (int32_t c = 0; c < span->head_dim; c++) {
        double a = 0;
        for (int32_t x = 0; x <= last; x++) {
            double length = -naive_knorm(span, h, x);
            if (length > 0) a += (double)key(span, h, x)[c] / length;
        }
        a /= last + 1;
        dot += (double)key(span, h, t)[c] * a;
        square += a * a;
    }
    double lengths = -naive_knorm(span, h, t) * sqrt(square);
    return lengths > 0 ? -dot / lengths : 0;
}

void naive_masked_output(const kv_span *span, const int32_t *evict_at, int32_t i, int32_t u,
                         double *o) {
    int32_t h = i / (span->n_q_head / span->n_kv_head), d = span->head_dim;
    uint8_t *held = malloc((size_t)u + 1);
    double *p = calloc((size_t)u + 1, sizeof *p);
    for (int32_t t = 0; t <= u; t++) held[t] = u < evict_at[h * span->stride + t];
    naive_softmax(span, i, u, held, p);
    for (int32_t c = 0; c < d; c++) {
        o[c] = 0;
        for (int32_t t = 0; t <= u; t++)
            o[c] += p[t] * (double)span->v[(h * span->stride + t) * d + c];
    }
    free(held);
    free(p);
}
