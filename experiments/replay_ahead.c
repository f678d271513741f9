/* One unit per layer, document, row and set of decisions (replay_ahead.h); units share nothing but their input. */
#include "experiments/replay_ahead.h"

#include <math.h>
#include <stdlib.h>

#include "reference/core/cpu.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/replay.h"

typedef struct unit {
    size_t row;
    kv_span span; /* all KV heads, or one of them where each decides for itself */
    int32_t slot; /* layer within the batch */
    int32_t *evict_at;
    double cost; /* pairs to attend, to order units by */
    double seconds;
    kv_status st;
} unit;

struct kv_ahead {
    const kv_plan *plan;
    kv_trace *trace;
    const kv_trace_info *info;
    const kv_ops *ops;
    int32_t first, n_layer; /* layers at hand */
    size_t n_unit, most;
    unit *unit;
    /* [KV_AHEAD_LAYERS][n_row] arrays [n_kv_head][n_token], NULL for other rows */
    int32_t **evict_at;
    bool *failed; /* [KV_AHEAD_LAYERS][n_row] */
};

static bool has_rule(const kv_row *row) {
    return row->policy->kind == KV_ATTENTION && !row->policy->decide;
}

kv_status kv_ahead_open(const kv_plan *plan, kv_trace *trace, const kv_ops *ops, kv_ahead **out) {
    kv_status st = KV_OK;
    const kv_trace_info *info = kv_trace_get(trace);
    kv_ahead *a = NULL;
    size_t n = 0;
    *out = NULL;
    for (size_t i = 0; i < plan->n_row; i++) n += has_rule(&plan->row[i]);
    if (n == 0 || kv_threads() == 1 || ops->replay_attention != kv_ops_cpu.replay_attention)
        return KV_OK;
    KV_NEW(a, 1);
    *a = (kv_ahead){.plan = plan, .trace = trace, .info = info, .ops = ops};
    a->most = n * KV_AHEAD_LAYERS * (size_t)info->n_document * (size_t)info->n_kv_head;
    KV_NEW(a->unit, a->most);
    KV_NEW(a->failed, KV_AHEAD_LAYERS * plan->n_row);
    KV_NEW(a->evict_at, KV_AHEAD_LAYERS * plan->n_row);
    for (size_t i = 0; i < KV_AHEAD_LAYERS * plan->n_row; i++)
        if (has_rule(&plan->row[i % plan->n_row]))
            KV_NEW(a->evict_at[i], info->n_kv_head * info->n_token);
    *out = a;
    a = NULL;
out:
    kv_ahead_free(a);
    return st;
}

static kv_policy_input input_of(const kv_ahead *a, const unit *u) {
    const kv_row *row = &a->plan->row[u->row];
    return (kv_policy_input){
        .span = &u->span, .run = &row->run, .params = &row->params, .ops = a->ops};
}

/* The units of one row over one document of a layer. */
static kv_status add_units(kv_ahead *a, size_t row, const kv_span *span, int32_t slot) {
    kv_status st = KV_OK;
    kv_attention_rule rule = {0};
    unit u = {.row = row, .span = *span, .slot = slot};
    int32_t *base = a->evict_at[(size_t)slot * a->plan->n_row + row] + span->first;
    const kv_policy_input input = input_of(a, &u);
    KV_TRY(a->plan->row[row].policy->rule(&input, &rule));
    const int32_t n_set = rule.per_layer ? 1 : span->n_kv_head, n_query = span->n_q_head / n_set,
                  n_kv = span->n_kv_head / n_set;
    const double kept = fmin(a->plan->row[row].run.budget, span->n_token);
    /* without memory nothing happens before the cache is full */
    u.cost = n_query * kept * (span->n_token - (rule.decay == 0 ? kept : kept / 2));
    for (int32_t i = 0; i < n_set; i++) {
        const size_t rows = (size_t)span->stride * (size_t)span->head_dim;
        u.span.n_q_head = n_query;
        u.span.n_kv_head = n_kv;
        u.span.q = span->q + (size_t)(i * n_query) * rows;
        u.span.k = span->k + (size_t)(i * n_kv) * rows;
        u.span.v = span->v + (size_t)(i * n_kv) * rows;
        u.evict_at = base + i * n_kv * span->stride;
        a->unit[a->n_unit++] = u;
    }
out:
    return st;
}

static int longest_first(const void *a, const void *b) {
    const double x = ((const unit *)a)->cost, y = ((const unit *)b)->cost;
    return (x < y) - (x > y);
}

static void run_unit(const kv_ahead *a, unit *u) {
    const double start = kv_now();
    const kv_policy_input input = input_of(a, u);
    u->st = kv_replay(a->plan->row[u->row].policy, &input, u->evict_at);
    u->seconds = kv_now() - start;
}

kv_status kv_ahead_run(kv_ahead *a, const kv_trace_layer *layer, int32_t first, int32_t n_layer,
                       double *const *seconds) {
    kv_status st = KV_OK;
    kv_span span;
    double total = 0;
    a->n_unit = 0;
    a->first = first;
    a->n_layer = n_layer;
    for (int32_t l = 0; l < n_layer; l++)
        for (int32_t doc = 0; doc < a->info->n_document; doc++) {
            kv_trace_span(a->trace, &layer[l], first + l, doc, &span);
            for (size_t i = 0; i < a->plan->n_row; i++)
                if (has_rule(&a->plan->row[i])) KV_TRY(add_units(a, i, &span, l));
        }
    qsort(a->unit, a->n_unit, sizeof *a->unit, longest_first);
    const double start = kv_now();
#pragma omp parallel for schedule(dynamic, 1)
    for (size_t i = 0; i < a->n_unit; i++) run_unit(a, &a->unit[i]);
    const double wall = kv_now() - start;
    KV_TRY(kv_interrupt_poll());
    for (size_t i = 0; i < KV_AHEAD_LAYERS * a->plan->n_row; i++) a->failed[i] = false;
    for (size_t i = 0; i < a->n_unit; i++) total += a->unit[i].seconds;
    for (size_t i = 0; i < a->n_unit; i++) {
        const unit *u = &a->unit[i];
        if (total > 0) *seconds[u->row] += wall * u->seconds / total;
        a->failed[(size_t)u->slot * a->plan->n_row + u->row] |= u->st != KV_OK;
    }
out:
    return st;
}

const int32_t *kv_ahead_find(const kv_ahead *a, size_t row, const kv_span *span) {
    if (!a || span->layer_index < a->first || span->layer_index >= a->first + a->n_layer)
        return NULL;
    const size_t i = (size_t)(span->layer_index - a->first) * a->plan->n_row + row;
    return a->evict_at[i] && !a->failed[i] ? a->evict_at[i] + span->first : NULL;
}

void kv_ahead_free(kv_ahead *a) {
    if (!a) return;
    for (size_t i = 0; a->evict_at && i < KV_AHEAD_LAYERS * a->plan->n_row; i++)
        free(a->evict_at[i]);
    free(a->evict_at);
    free(a->failed);
    free(a->unit);
    free(a);
}
