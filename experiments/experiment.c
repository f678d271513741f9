/* The loop over layers, documents, policies and budgets. */
#include "experiments/experiment.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/decode_check.h"
#include "experiments/dense_cache.h"
#include "experiments/pattern.h"
#include "experiments/replay_ahead.h"
#include "experiments/timeline.h"
#include "policies/registry.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/core/progress.h"
#include "reference/replay.h"
#include "reference/target.h"

typedef struct work { /* state of one run */
    kv_experiment *e;
    const kv_trace_info *trace;
    kv_row_result *result;
    kv_metrics **metrics; /* [n_row] */
    kv_timeline *timeline;
    kv_pattern *pattern;
    kv_ahead *ahead;         /* NULL: every replay at its own turn */
    double *decoded;         /* [n_row] bytes of this layer's cache in its largest document */
    double **seconds;        /* [n_row] of the results */
    kv_params oracle_params; /* built-in defaults: KT is always the oracle of power 1 */
    /* [n_kv_head][n_token] scores recorded for this layer, NULL when no row uses them */
    float *score;
    double *delta; /* [n_kv_head] */
    kv_progress progress;
    double done;
} work;

typedef struct place { /* one document of one layer */
    kv_span span;
    kv_dense dense;
    const uint8_t *kind; /* [n_token] or NULL */
    /* [n_row] KT's evict_at, shared by the rows of one budget; owned by the first of them */
    int32_t **oracle;
    int32_t *evict_at, *own; /* [n_kv_head][stride] */
    float *priority;         /* [n_kv_head][stride] of the policy at work */
} place;

bool kv_row_rerotates(const kv_row *row) { return kv_params_int(&row->params, "pos") == 1; }

double kv_dense_bytes(const kv_trace_info *t) {
    return (double)t->n_layer * t->n_kv_head * t->longest * 2 * t->head_dim *
           (double)kv_dtype_size(t->type);
}

void kv_row_result_free(kv_row_result *r) {
    kv_metrics_result_free(&r->metrics);
    free(r->evict_at);
    memset(r, 0, sizeof *r);
}

static kv_policy_input input_of(const work *w, const place *p, const kv_row *row) {
    return (kv_policy_input){
        .span = &p->span,
        .run = &row->run,
        .params = &row->params,
        .weights = row->weights ? &row->weights->tensors : NULL,
        .dense = &p->dense,
        .ops = w->e->ops,
        .trace_score = w->score ? w->score + p->span.first : NULL,
        .trace_delta = w->delta,
    };
}

/* Recorded scores come without the target they were trained on. */
static bool has_own(const kv_row *row) { return row->policy->own_target && row->weights; }

static void want_power(kv_dense_request *r, double power) {
    for (int32_t i = 0; i < r->n_power; i++)
        if (r->power[i] == power) return;
    if (r->n_power < KV_DENSE_POWERS) r->power[r->n_power++] = power;
}

static bool has_param(const kv_row *row, const char *name) {
    for (size_t i = 0; i < row->params.n; i++)
        if (strcmp(row->params.spec[i].name, name) == 0) return true;
    return false;
}

/* Powers 1 and 2 always, so that the next run with another policy finds them; then what the rows ask for. A power that finds no room
 * is computed by the policy that wants it. */
static kv_status list_powers(const work *w, const place *p, kv_dense_request *r) {
    const kv_plan *plan = w->e->plan;
    want_power(r, 1);
    want_power(r, 2);
    for (size_t i = 0; i < plan->n_row; i++) {
        const kv_row *row = &plan->row[i];
        double power = 1;
        bool mean;
        if (has_own(row)) {
            kv_policy_input input = input_of(w, p, row);
            double log_gamma[w->trace->n_kv_head];
            kv_status st = row->policy->own_target(&input, &power, &mean, log_gamma);
            if (st != KV_OK) return st;
        } else if (has_param(row, "power")) {
            power = kv_params_real(&row->params, "power");
        }
        want_power(r, power);
    }
    return KV_OK;
}

/* Where in the run a message about numbers belongs. */
static kv_status locate(const work *w, const place *p, kv_status st, const char *policy) {
    if (st != KV_E_DATA) return st;
    return kv_error_context(st, "%s, layer %d%s%s", w->trace->path, p->span.layer_id,
                            policy[0] ? ", policy " : "", policy);
}

static kv_status compute_dense(work *w, place *p) {
    kv_status st = KV_OK;
    double start = kv_now();
    const kv_run *run = &w->e->plan->row[0].run; /* sinks and window are the same in every row */
    kv_dense_request request = {.sinks = run->sinks,
                                .window = run->window,
                                .want_output = !w->e->ops->resident,
                                .want_events = true};
    KV_TRY(list_powers(w, p, &request));
    KV_TRY(w->e->ops->hold(&p->span));
    st = kv_dense_cached(w->e->ops, &p->span, &request,
                         w->e->ops->resident ? NULL : w->e->cache_folder, &p->dense);
    KV_TRY(locate(w, p, st, ""));
    w->e->dense_seconds += kv_now() - start;
out:
    return st;
}

/* KT: the power-1 oracle at this row's budget. */
static kv_status find_oracle(work *w, place *p, size_t i) {
    kv_status st = KV_OK;
    const kv_row *row = &w->e->plan->row[i];
    for (size_t j = 0; j < i && !p->oracle[i]; j++)
        if (w->e->plan->row[j].run.budget == row->run.budget) p->oracle[i] = p->oracle[j];
    if (p->oracle[i]) return KV_OK;
    KV_NEW(p->oracle[i], p->span.n_kv_head * p->span.stride);
    kv_policy_input input = input_of(w, p, row);
    input.params = &w->oracle_params;
    input.weights = NULL;
    KV_TRY(kv_replay(kv_policy_find("oracle"), &input, p->oracle[i]));
out:
    return st;
}

/* recall_own's reference: the ranking that a learned policy was trained to reproduce, under its own decay. The decisions of the
 * policy (place's priorities) are compared with it. */
static kv_status find_own(place *p, const kv_policy *policy, const kv_policy_input *input,
                          kv_decisions *decisions) {
    kv_status st = KV_OK;
    double power, log_gamma[p->span.n_kv_head];
    bool mean;
    float *priority = NULL;
    const char *lse = kv_tensors_meta(input->weights, "lse");
    KV_NEW(priority, p->span.n_kv_head * p->span.stride);
    KV_TRY(policy->own_target(input, &power, &mean, log_gamma));
    KV_TRY(kv_target_of(input, power, mean, priority));
    if (lse && strcmp(lse, "sparse") == 0)
        KV_TRY(kv_target_sparse(input, power, mean, log_gamma, priority));
    KV_TRY(kv_decisions_add(decisions, &p->span, input->run, priority, log_gamma, p->priority));
    for (int32_t h = 0; h < p->span.n_kv_head; h++)
        for (int32_t t = 0; t < p->span.n_token; t++) {
            float *x = &priority[h * p->span.stride + t];
            *x = kv_static_priority((double)*x, t, log_gamma[h]);
        }
    KV_TRY(input->ops->select(&p->span, input->run, priority, p->own));
out:
    free(priority);
    return st;
}

static kv_status run_step_bound(work *w, place *p, size_t i) {
    kv_status st = KV_OK;
    double *mass = NULL; /* [n_kv_head][stride] */
    KV_NEW(mass, p->span.n_kv_head * p->span.stride);
    KV_TRY(w->e->ops->step_mass(&p->span, &w->e->plan->row[i].run, &p->dense, mass));
    KV_TRY(kv_metrics_add_step(w->metrics[i], &p->span, mass));
out:
    free(mass);
    return st;
}

/* Into [n_layer][n_kv_head][n_token], as absolute positions. */
static void keep_decisions(const work *w, const place *p, int32_t *out) {
    const kv_span *s = &p->span;
    for (int32_t h = 0; h < s->n_kv_head; h++) {
        int64_t lane = (int64_t)s->layer_index * w->trace->n_kv_head + h;
        for (int32_t t = 0; t < s->n_token; t++) {
            int32_t leaves = p->evict_at[h * s->stride + t];
            out[lane * w->trace->n_token + s->first + t] =
                leaves == KV_NEVER ? KV_NEVER : leaves + (int32_t)s->first;
        }
    }
}

/* Decisions of row i, from the replay of several layers where it ran. */
static kv_status decide(work *w, place *p, size_t i, const kv_policy_input *input) {
    const kv_span *s = &p->span;
    const kv_policy *policy = w->e->plan->row[i].policy;
    const int32_t *known = kv_ahead_find(w->ahead, i, s);
    if (!known)
        return locate(w, p, kv_replay_priority(policy, input, p->priority, p->evict_at),
                      policy->name);
    for (int32_t h = 0; h < s->n_kv_head; h++)
        memcpy(p->evict_at + h * s->stride, known + h * s->stride,
               (size_t)s->n_token * sizeof *known);
    return KV_OK;
}

static kv_status decode(work *w, const place *p, size_t i, const kv_policy_input *input) {
    double bytes = 0;
    kv_status st = kv_decode_check(&w->e->plan->row[i], input,
                                   (int32_t)kv_dtype_size(w->trace->type), p->evict_at, &bytes);
    w->decoded[i] = fmax(w->decoded[i], bytes);
    return st;
}

static kv_status run_policy(work *w, place *p, size_t i) {
    kv_status st = KV_OK;
    const kv_row *row = &w->e->plan->row[i];
    kv_policy_input input = input_of(w, p, row);
    KV_TRY(find_oracle(w, p, i));
    KV_TRY(decide(w, p, i, &input));
    if (has_own(row)) KV_TRY(find_own(p, row->policy, &input, &w->result[i].decisions));
    kv_metrics_item item = {.span = &p->span,
                            .dense = &p->dense,
                            .evict_at = p->evict_at,
                            .evict_oracle = p->oracle[i],
                            .evict_own = has_own(row) ? p->own : NULL,
                            .kind = p->kind,
                            .rerotate = kv_row_rerotates(row),
                            .ops = w->e->ops};
    KV_TRY(kv_metrics_add(w->metrics[i], &item));
    if (w->e->decode) KV_TRY(decode(w, p, i, &input));
    if (w->timeline) kv_timeline_add(w->timeline, i, &p->span, p->evict_at);
    if (w->pattern) kv_pattern_add(w->pattern, i, &p->span, p->evict_at);
    if (w->result[i].evict_at) keep_decisions(w, p, w->result[i].evict_at);
out:
    return st;
}

static kv_status run_document(work *w, const kv_trace_layer *layer, int32_t index, int32_t doc) {
    kv_status st = KV_OK;
    const kv_plan *plan = w->e->plan;
    place p = {0};
    kv_trace_span(w->e->trace, layer, index, doc, &p.span);
    if (w->trace->kind) p.kind = w->trace->kind + p.span.first;
    KV_NEW(p.oracle, plan->n_row);
    KV_NEW(p.evict_at, p.span.n_kv_head * p.span.stride);
    KV_NEW(p.own, p.span.n_kv_head * p.span.stride);
    KV_NEW(p.priority, p.span.n_kv_head * p.span.stride);
    KV_TRY(compute_dense(w, &p));
    for (size_t i = 0; i < plan->n_row; i++) {
        double start = kv_now();
        KV_TRY(kv_interrupt_poll());
        KV_TRY(plan->row[i].policy->no_evict_at ? run_step_bound(w, &p, i) : run_policy(w, &p, i));
        w->result[i].seconds += kv_now() - start;
        w->done += p.span.n_token;
        kv_progress_update(&w->progress, w->done);
    }
out:
    for (size_t i = 0; p.oracle && i < plan->n_row; i++) {
        bool shared = false;
        for (size_t j = 0; j < i; j++) shared |= p.oracle[j] == p.oracle[i];
        if (!shared) free(p.oracle[i]);
    }
    w->e->ops->release(&p.span);
    free(p.oracle);
    free(p.evict_at);
    free(p.own);
    free(p.priority);
    kv_dense_free(&p.dense);
    return st;
}

bool kv_plan_reads_hidden(const kv_plan *plan, const kv_trace_info *trace) {
    bool wanted = false;
    for (size_t i = 0; i < plan->n_row; i++)
        wanted |= plan->row[i].policy->needs_hidden || plan->row[i].policy->learned;
    return wanted && trace->has_hidden;
}

static kv_status read_layer(work *w, int32_t index, kv_trace_layer *layer) {
    const double start = kv_now();
    const kv_status st =
        w->e->reader ? kv_layer_reader_next(w->e->reader, layer)
                     : kv_trace_read_layer(w->e->trace, index,
                                           kv_plan_reads_hidden(w->e->plan, w->trace), layer);
    w->e->read_seconds += kv_now() - start;
    return st;
}

/* kvpop:scores=trace */
static kv_status read_scores(work *w, int32_t index) {
    kv_status st = KV_OK;
    const kv_row *wants = NULL;
    for (size_t i = 0; i < w->e->plan->n_row; i++)
        if (kv_row_reads_scores(&w->e->plan->row[i])) wants = &w->e->plan->row[i];
    if (!wants) return KV_OK;
    if (!w->score) {
        KV_NEW(w->score, w->trace->n_kv_head * w->trace->n_token);
        KV_NEW(w->delta, w->trace->n_kv_head);
    }
    KV_TRY(kv_trace_read_score(w->e->trace, wants->policy->name, index, w->score, w->delta));
out:
    return st;
}

static kv_status run_layer(work *w, const kv_trace_layer *layer, int32_t index) {
    kv_status st = KV_OK;
    kv_log(KV_LOG_INFO, "experiment", "layer %d of %d", index + 1, w->trace->n_layer);
    KV_TRY(read_scores(w, index));
    for (int32_t doc = 0; doc < w->trace->n_document; doc++)
        KV_TRY(run_document(w, layer, index, doc));
    for (size_t i = 0; i < w->e->plan->n_row; i++) {
        w->result[i].cache_bytes_allocated += w->decoded[i];
        w->decoded[i] = 0;
    }
    if (w->timeline) KV_TRY(kv_timeline_write_layer(w->timeline, w->trace->layer_id[index]));
    if (w->pattern) kv_pattern_write_layer(w->pattern, w->trace->layer_id[index]);
out:
    return st;
}

/* The layers from `first` on that are replayed together. */
static kv_status run_batch(work *w, int32_t first) {
    kv_status st = KV_OK;
    kv_trace_layer layer[KV_AHEAD_LAYERS] = {0};
    const int32_t left = w->trace->n_layer - first, most = w->ahead ? KV_AHEAD_LAYERS : 1,
                  n = left < most ? left : most;
    for (int32_t i = 0; i < n; i++) KV_TRY(read_layer(w, first + i, &layer[i]));
    if (w->ahead) KV_TRY(kv_ahead_run(w->ahead, layer, first, n, w->seconds));
    for (int32_t i = 0; i < n; i++) {
        KV_TRY(run_layer(w, &layer[i], first + i));
        kv_trace_layer_free(&layer[i]);
    }
out:
    for (int32_t i = 0; i < KV_AHEAD_LAYERS; i++) kv_trace_layer_free(&layer[i]);
    return st;
}

static kv_status open_metrics(work *w) {
    kv_status st = KV_OK;
    const kv_metrics_shape shape = {w->trace->n_layer, w->trace->n_q_head, w->trace->n_kv_head,
                                    w->trace->head_dim, (int32_t)kv_dtype_size(w->trace->type)};
    int64_t cells = (int64_t)w->trace->n_layer * w->trace->n_kv_head * w->trace->n_token;
    KV_NEW(w->metrics, w->e->plan->n_row);
    for (size_t i = 0; i < w->e->plan->n_row; i++) {
        const kv_row *row = &w->e->plan->row[i];
        KV_TRY(kv_metrics_open(&shape, &row->run, &w->metrics[i]));
        if (w->e->keep_evict_at && !row->policy->no_evict_at) KV_NEW(w->result[i].evict_at, cells);
    }
out:
    return st;
}

/* The first failure of st and the two closes. */
static kv_status close_tables(work *w, kv_status st) {
    const kv_status timeline = w->timeline ? kv_timeline_close(w->timeline) : KV_OK;
    const kv_status pattern = w->pattern ? kv_pattern_close(w->pattern) : KV_OK;
    if (st == KV_OK) st = timeline;
    return st == KV_OK ? pattern : st;
}

kv_status kv_experiment_run(kv_experiment *e, kv_row_result *result) {
    kv_status st = KV_OK;
    work w = {.e = e, .trace = kv_trace_get(e->trace), .result = result};
    KV_TRY(kv_params_init(&w.oracle_params, kv_policy_find("oracle")->params));
    KV_TRY(open_metrics(&w));
    KV_NEW(w.seconds, e->plan->n_row);
    KV_NEW(w.decoded, e->plan->n_row);
    for (size_t i = 0; i < e->plan->n_row; i++) w.seconds[i] = &result[i].seconds;
    KV_TRY(kv_ahead_open(e->plan, e->trace, e->ops, &w.ahead));
    if (e->timeline_folder) {
        KV_TRY(kv_timeline_open(e->timeline_folder, e->plan, w.trace, &w.timeline));
        KV_TRY(kv_pattern_open(e->timeline_folder, e->plan, w.trace, &w.pattern));
    }
    kv_progress_begin(&w.progress, "experiment",
                      (double)w.trace->n_layer * (double)w.trace->n_token * (double)e->plan->n_row);
    for (int32_t l = 0; l < w.trace->n_layer; l += w.ahead ? KV_AHEAD_LAYERS : 1)
        KV_TRY(run_batch(&w, l));
    for (size_t i = 0; i < e->plan->n_row; i++)
        KV_TRY(kv_metrics_finish(w.metrics[i], &result[i].metrics));
out:
    kv_progress_end(&w.progress);
    st = close_tables(&w, st);
    for (size_t i = 0; w.metrics && i < e->plan->n_row; i++) kv_metrics_free(w.metrics[i]);
    kv_ahead_free(w.ahead);
    free(w.seconds);
    free(w.decoded);
    free(w.metrics);
    free(w.score);
    free(w.delta);
    kv_params_free(&w.oracle_params);
    return st;
}
