/* Future-attention targets (maths.md 2.1, 2.2, 2.6): column sums of the dense sweep -> mean mass per KV head -> log score. */
#include "reference/target.h"

#include <math.h>
#include <stdlib.h>

#include "reference/core/mem.h"
#include "reference/core/num.h"
#include "reference/ops.h"

/* Index of `power` in the sweep, -1 if it was not asked for. */
static int32_t power_index(const kv_dense *dense, double power) {
    for (int32_t i = 0; i < dense->request.n_power; i++)
        if (dense->request.power[i] == power) return i;
    return -1;
}

kv_status kv_target_mass(const kv_span *span, const kv_dense *dense, double power, bool mean,
                         double *m) {
    const int32_t i = power_index(dense, power), group = span->n_q_head / span->n_kv_head;
    if (i < 0)
        return KV_FAIL(KV_E_INTERNAL, "the dense sweep holds no column sums of power %g", power);
    if (dense->stride != span->stride)
        return KV_FAIL(KV_E_INTERNAL, "the dense sweep has stride %lld, the span %lld",
                       (long long)dense->stride, (long long)span->stride);
    const int32_t window = dense->request.window;
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) {
            const int32_t later = span->n_token - t - window;
            const double n = isinf(power) || later < 1 ? 1 : later;
            double reduced = 0;
            for (int32_t g = 0; g < group; g++) {
                const size_t row = (size_t)(h * group + g) * (size_t)span->stride;
                const double mass = dense->column[i][row + (size_t)t] / n;
                reduced = mean ? reduced + mass : fmax(reduced, mass);
            }
            m[(size_t)h * (size_t)span->stride + (size_t)t] = mean ? reduced / group : reduced;
        }
    return KV_OK;
}

kv_status kv_target_log(const kv_span *span, const kv_dense *dense, double power, bool mean,
                        double eps, float *r) {
    kv_status st = KV_OK;
    double *m = NULL;
    /* p^power of a typical long-range key sinks below 1e-8 once power > 2 (maths.md 2.6). */
    const double floor_mass = power > 2 && !isinf(power) ? exp(power * log(1e-8)) : eps;
    KV_NEW(m, (size_t)span->n_kv_head * (size_t)span->stride);
    KV_TRY(kv_target_mass(span, dense, power, mean, m));
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) {
            const size_t at = (size_t)h * (size_t)span->stride + (size_t)t;
            r[at] = (float)log(floor_mass + m[at]);
        }
out:
    free(m);
    return st;
}

kv_status kv_target_of(const kv_policy_input *input, double power, bool mean, float *r) {
    kv_status st = KV_OK;
    const kv_run *run = input->run;
    const kv_dense *dense = input->dense;
    kv_dense own = {0};
    const bool known = dense && !dense->request.lse && dense->request.window == run->window &&
                       power_index(dense, power) >= 0;
    if (!known) {
        const kv_dense_request request = {
            .sinks = run->sinks, .window = run->window, .n_power = 1, .power = {power}};
        KV_TRY((input->ops ? input->ops->dense : kv_dense_compute)(input->span, &request, &own));
        dense = &own;
    }
    KV_TRY(kv_target_log(input->span, dense, power, mean, run->eps, r));
out:
    kv_dense_free(&own);
    return st;
}

kv_status kv_target_sparse(const kv_policy_input *input, double power, bool mean,
                           const double *log_gamma, float *r) {
    kv_status st = KV_OK;
    const kv_span *span = input->span;
    const kv_run *run = input->run;
    kv_dense dense = {0};
    kv_masked masked = {0};
    float *priority = NULL;   /* [n_kv_head][stride] */
    int32_t *evict_at = NULL; /* [n_kv_head][stride] */
    KV_NEW(priority, span->n_kv_head * span->stride);
    KV_NEW(evict_at, span->n_kv_head * span->stride);
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) {
            const int64_t at = h * span->stride + t;
            priority[at] = kv_static_priority(r[at], t, log_gamma[h]);
        }
    KV_TRY(input->ops->select(span, run, priority, evict_at));
    const kv_masked_request kept = {
        .evict_at = evict_at, .sinks = run->sinks, .window = run->window};
    KV_TRY(input->ops->masked(span, &kept, &masked));
    const kv_dense_request request = {.sinks = run->sinks,
                                      .window = run->window,
                                      .n_power = 1,
                                      .power = {power},
                                      .lse = masked.lse};
    KV_TRY(input->ops->dense(span, &request, &dense));
    KV_TRY(kv_target_log(span, &dense, power, mean, run->eps, r));
out:
    free(priority);
    free(evict_at);
    kv_masked_free(&masked);
    kv_dense_free(&dense);
    return st;
}
