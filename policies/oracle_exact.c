/* oracle_exact: the schedule of evictions that retains most attention mass, one victim per step, nothing returns. A distinct victim
 * t_u in [s, u-w] for each u in [B, S) minimises sum over u of the mass that t_u would still receive from u on; the mass is the
 * group mean of the dense softmax, per KV head. Source: policies.md A7; contract.md 2. */
#include "policies/policy.h"

#include <math.h>
#include <stdlib.h>

#include "reference/assignment.h"
#include "reference/core/mem.h"
#include "reference/logit.h"

/* mass [n_token][n_token]: group mean of p(u->t), 0 for t > u. row [n_token] is scratch. */
static void group_mass(const kv_span *span, int32_t h, double *mass, double *row) {
    int32_t n = span->n_token, d = span->head_dim, group = span->n_q_head / span->n_kv_head;
    const float *k = span->k + h * span->stride * d;
    for (int32_t i = h * group; i < (h + 1) * group; i++)
        for (int32_t u = 0; u < n; u++) {
            double max = -INFINITY, sum = 0;
            for (int32_t t = 0; t <= u; t++) {
                row[t] = kv_logit(span, span->q + (i * span->stride + u) * d, k + (int64_t)t * d);
                max = fmax(max, row[t]);
            }
            for (int32_t t = 0; t <= u; t++) sum += row[t] = exp(row[t] - max);
            for (int32_t t = 0; t <= u; t++) {
                double p = row[t] / sum;
                mass[(int64_t)u * n + t] += p < 0x1p-126 ? 0 : p / group;
            }
        }
}

static kv_status decide_head(const kv_policy_input *input, int32_t h, int32_t *evict_at) {
    kv_status st = KV_OK;
    const kv_span *span = input->span;
    const kv_run *run = input->run;
    int32_t n = span->n_token, n_row = n - run->budget, n_column = n - run->window - run->sinks;
    double *mass = NULL, *scratch = NULL, *cost = NULL; /* cost [n_row][n_column] */
    int32_t *victim = NULL;
    for (int32_t t = 0; t < n; t++) evict_at[t] = KV_NEVER;
    if (n_row <= 0) goto out;
    KV_NEW(mass, (int64_t)n * n);
    KV_NEW(scratch, n);
    KV_NEW(cost, (int64_t)n_row * n_column);
    KV_NEW(victim, n_row);
    group_mass(span, h, mass, scratch);
    for (int32_t j = 0; j < n_column; j++) {
        int32_t t = run->sinks + j;
        double later = 0;
        for (int32_t u = n - 1; u >= run->budget; u--) {
            later += mass[(int64_t)u * n + t];
            cost[(int64_t)(u - run->budget) * n_column + j] =
                t <= u - run->window ? later : INFINITY;
        }
    }
    KV_TRY(kv_assign(cost, n_row, n_column, victim));
    for (int32_t i = 0; i < n_row; i++) evict_at[run->sinks + victim[i]] = run->budget + i;
out:
    free(mass);
    free(scratch);
    free(cost);
    free(victim);
    return st;
}

static kv_status decide(const kv_policy_input *input, int32_t *evict_at) {
    kv_status st = KV_OK;
    for (int32_t h = 0; h < input->span->n_kv_head; h++) {
        KV_TRY(kv_interrupt_poll());
        KV_TRY(decide_head(input, h, evict_at + h * input->span->stride));
    }
out:
    return st;
}

const kv_policy kv_policy_oracle_exact = {
    .name = "oracle_exact",
    .summary = "eviction schedule of most retained mass, by min-cost assignment",
    .source = "policies.md A7; contract.md 2",
    .kind = KV_PRIORITY,
    .non_causal = true,
    .max_token = 1024,
    .decide = decide,
};
