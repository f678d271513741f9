/* Accuracy through a model, document by document (contract.md 3). */
#include "experiments/accuracy.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "experiments/cache.h"
#include "experiments/experiment.h"
#include "experiments/version.h"
#include "policies/registry.h"
#include "reference/core/cpu.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/core/progress.h"
#include "reference/replay.h"
#include "traces/corpus.h"

enum { NO_PROBLEM = -1 };
enum { MOST_WAITING = 2048, WAITING_LOGITS = 1 << 22 }; /* rows, floats */

struct kv_accuracy_bench {
    const kv_model *model;
    const kv_trace_info *trace;
    const kv_ops *ops;
    uint8_t *want;     /* [n_token] the logits of this row are needed */
    uint8_t *counted;  /* [n_token] the token is counted: scored, x-1 > S/4 */
    int32_t *problem;  /* [n_token] the counted problem whose answer digit this is, or NO_PROBLEM */
    int32_t n_problem; /* counted problems */
    int64_t n_row;     /* counted tokens */
    int32_t *argmax;   /* [n_row] of the full run */
    float *logits;     /* [n_row][vocab] of the full run */
    double *lse;       /* [n_row] of the full run */
    kv_accuracy full;
};

/* A row of logits. */
typedef struct waiting {
    /* the token that it predicts; its place among the counted rows, negative: not counted */
    int64_t token, at;
    int32_t best;
    double lse, kl;
} waiting;

/* One run over all documents. */
typedef struct walk {
    kv_accuracy_bench *bench;
    const kv_row *row;           /* NULL: the full run, which fills the bench */
    const kv_recorded *recorded; /* NULL: the row does not read the recording */
    int32_t document;
    int64_t first;    /* of the document */
    int64_t next;     /* counted rows seen so far */
    float *logits;    /* [most_waiting][vocab] rows to be looked at */
    waiting *waiting; /* [most_waiting] */
    int32_t n_waiting, most_waiting;
    int64_t seen[4], right[4]; /* by `scored` */
    int64_t agreed;
    double kl;
    uint8_t *wrong; /* [n_problem] */
    kv_progress progress;
    double done;
} walk;

/* contract.md 3: counted from a quarter of the document on, whatever the budget. x is relative to the document. */
static bool is_counted(int64_t x, int64_t n_token) { return x > 0 && 4 * (x - 1) > n_token; }

/* Problems of one document: the result digits between `answer` and `<eos>`. */
static void find_problems(kv_accuracy_bench *b, int64_t first, int64_t end) {
    const kv_trace_info *t = b->trace;
    for (int64_t x = first; x < end; x++) {
        if (t->token[x] != KV_TOKEN_ANSWER) continue;
        int64_t stop = x + 1, digits = 0;
        while (stop < end && t->token[stop] != KV_TOKEN_EOS && t->token[stop] != KV_TOKEN_ANSWER)
            digits += t->scored[stop++] == KV_SCORED_RESULT;
        if (stop == end || t->token[stop] != KV_TOKEN_EOS || digits == 0 ||
            !is_counted(stop - first, end - first))
            continue;
        for (int64_t y = x + 1; y < stop; y++)
            if (t->scored[y] == KV_SCORED_RESULT) {
                b->problem[y] = b->n_problem;
                b->want[y - 1] = 1;
            }
        b->n_problem++;
    }
}

static kv_status prepare(kv_accuracy_bench *b) {
    const kv_trace_info *t = b->trace;
    kv_status st = KV_OK;
    KV_NEW(b->want, t->n_token);
    KV_NEW(b->counted, t->n_token);
    KV_NEW(b->problem, t->n_token);
    for (int64_t x = 0; x < t->n_token; x++) b->problem[x] = NO_PROBLEM;
    for (int32_t doc = 0; doc < t->n_document; doc++) {
        int64_t first = t->doc_first[doc], end = t->doc_first[doc + 1];
        find_problems(b, first, end);
        for (int64_t x = first + 1; x < end; x++) {
            b->counted[x] = is_counted(x - first, end - first) && t->scored[x] != KV_SCORED_NONE;
            b->want[x - 1] |= b->counted[x];
            b->n_row += b->counted[x];
        }
    }
out:
    return st;
}

static int32_t argmax_of(const float *logits, int32_t vocab) {
    int32_t best = 0;
    for (int32_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static double lse_of(const float *logits, int32_t vocab, int32_t best) {
    double sum = 0, top = (double)logits[best];
    for (int32_t i = 0; i < vocab; i++) sum += exp((double)logits[i] - top);
    return top + log(sum);
}

/* KL(full || policy) = sum p_full (log p_full - log p_policy) */
static double kl_of(const float *full, double full_lse, const float *logits, double lse,
                    int32_t vocab) {
    double sum = 0;
    for (int32_t i = 0; i < vocab; i++) {
        double log_full = (double)full[i] - full_lse;
        sum += exp(log_full) * (log_full - ((double)logits[i] - lse));
    }
    return sum;
}

static const float *logits_of(const walk *w, int32_t i) {
    return w->logits + (size_t)i * (size_t)w->bench->model->config.vocab;
}

static void look(const walk *w, int32_t i) {
    const kv_accuracy_bench *b = w->bench;
    const int32_t vocab = b->model->config.vocab;
    const float *logits = logits_of(w, i);
    waiting *r = &w->waiting[i];
    r->best = argmax_of(logits, vocab);
    if (r->at < 0) return;
    r->lse = lse_of(logits, vocab, r->best);
    if (w->row)
        r->kl =
            kl_of(b->logits + (size_t)r->at * (size_t)vocab, b->lse[r->at], logits, r->lse, vocab);
}

static void count(walk *w, int32_t i) {
    kv_accuracy_bench *b = w->bench;
    const size_t vocab = (size_t)b->model->config.vocab;
    const waiting *r = &w->waiting[i];
    const bool right = r->best == b->trace->token[r->token];
    if (b->problem[r->token] != NO_PROBLEM && !right) w->wrong[b->problem[r->token]] = 1;
    if (r->at < 0) return;
    w->next++;
    w->seen[b->trace->scored[r->token] & 3]++;
    w->right[b->trace->scored[r->token] & 3] += right;
    if (!w->row) {
        b->argmax[r->at] = r->best;
        b->lse[r->at] = r->lse;
        memcpy(b->logits + (size_t)r->at * vocab, logits_of(w, i), vocab * sizeof *b->logits);
    }
    w->agreed += r->best == b->argmax[r->at];
    w->kl += r->kl;
}

/* Rows are looked at in parallel and counted in order: no sum depends on the number of threads. */
static void look_at_waiting(walk *w) {
    int64_t next = w->next;
    for (int32_t i = 0; i < w->n_waiting; i++)
        w->waiting[i].at = w->bench->counted[w->waiting[i].token] ? next++ : -1;
#pragma omp parallel for schedule(static)
    for (int32_t i = 0; i < w->n_waiting; i++) look(w, i);
    for (int32_t i = 0; i < w->n_waiting; i++) count(w, i);
    w->n_waiting = 0;
}

static kv_status take_logits(void *context, int32_t first, int32_t n, const float *logits) {
    walk *w = context;
    const size_t vocab = (size_t)w->bench->model->config.vocab;
    for (int32_t i = 0; i < n; i++) {
        if (w->n_waiting == w->most_waiting) look_at_waiting(w);
        memcpy(w->logits + (size_t)w->n_waiting * vocab, logits + (size_t)i * vocab,
               vocab * sizeof *logits);
        /* row x-1 predicts token x */
        w->waiting[w->n_waiting++] = (waiting){.token = w->first + first + i + 1};
    }
    return KV_OK;
}

static kv_status open_waiting(walk *w) {
    kv_status st = KV_OK;
    const int32_t vocab = w->bench->model->config.vocab, rows = WAITING_LOGITS / vocab;
    w->most_waiting = rows < 1 ? 1 : rows > MOST_WAITING ? MOST_WAITING : rows;
    KV_NEW(w->logits, (size_t)w->most_waiting * (size_t)vocab);
    KV_NEW(w->waiting, w->most_waiting);
out:
    return st;
}

/* Index of a model layer in the trace; -1 when the trace lacks it. */
static int32_t index_in_trace(const kv_trace_info *t, int32_t layer) {
    for (int32_t i = 0; i < t->n_layer; i++)
        if (t->layer_id[i] == layer) return i;
    return -1;
}

bool kv_accuracy_covers_model(const kv_accuracy_bench *b) {
    bool all = b->trace->n_kv_head == b->model->config.n_kv_head;
    for (int32_t layer = 0; layer < b->model->config.n_layer; layer++)
        all = all && index_in_trace(b->trace, layer) >= 0;
    return all;
}

static bool evicts(const kv_span *s, const int32_t *evict_at) {
    for (int32_t h = 0; h < s->n_kv_head; h++)
        for (int32_t t = 0; t < s->n_token; t++)
            if (evict_at[h * s->stride + t] != KV_NEVER) return true;
    return false;
}

static kv_status attend(void *context, const kv_span *given, float *o) {
    walk *w = context;
    const kv_ops *ops = w->bench->ops;
    const kv_trace_info *trace = w->bench->trace;
    kv_status st = KV_OK;
    int32_t *evict_at = NULL; /* [n_kv_head][stride] */
    float *gate = NULL, *score = NULL;
    kv_masked masked = {0};
    kv_span span = *given;
    const kv_recorded *recorded = w->recorded;
    span.layer_index = index_in_trace(trace, span.layer_id);
    span.request = trace->doc_request[w->document];
    span.document = trace->doc_in_request[w->document];
    span.first = w->first;
    w->done++;
    kv_progress_update(&w->progress, w->done);
    if (!w->row) return ops->attend(&span, o, NULL);
    KV_NEW(evict_at, span.n_kv_head * span.stride);
    if (recorded) KV_TRY(kv_recorded_cut(recorded, trace, &span, &gate, &score));
    span.gate = gate;
    const kv_policy_input input = {
        .span = &span,
        .run = &w->row->run,
        .params = &w->row->params,
        .weights = w->row->weights ? &w->row->weights->tensors : NULL,
        .trace_score = score,
        .trace_delta = score ? recorded->delta + span.layer_index * span.n_kv_head : NULL,
        .ops = ops};
    KV_TRY(kv_replay(w->row->policy, &input, evict_at));
    const kv_masked_request request = {.evict_at = evict_at,
                                       .sinks = w->row->run.sinks,
                                       .window = w->row->run.window,
                                       .rerotate = kv_row_rerotates(w->row),
                                       .want_output = true,
                                       .o = o};
    /* With nothing evicted this layer is the full run's to the last bit, and so is what follows from it. */
    if (!request.rerotate && !evicts(&span, evict_at)) {
        KV_TRY(ops->attend(&span, o, NULL));
        goto out;
    }
    KV_TRY(ops->masked(&span, &request, &masked));
out:
    kv_masked_free(&masked);
    free(evict_at);
    free(gate);
    free(score);
    return st;
}

static double share(int64_t part, int64_t whole) {
    return whole > 0 ? (double)part / (double)whole : NAN;
}

static const kv_accuracy undefined = {NAN, NAN, NAN, NAN, NAN, NAN, 0, 0, 0, 0, 0, 0};

static void sum_up(const walk *w, kv_accuracy *out) {
    int64_t problems_right = 0;
    for (int32_t p = 0; p < w->bench->n_problem; p++) problems_right += !w->wrong[p];
    *out = (kv_accuracy){
        .recall = share(w->right[KV_SCORED_RECALL], w->seen[KV_SCORED_RECALL]),
        .result = share(w->right[KV_SCORED_RESULT], w->seen[KV_SCORED_RESULT]),
        .deterministic = share(w->right[KV_SCORED_DETERMINISTIC], w->seen[KV_SCORED_DETERMINISTIC]),
        .problem = share(problems_right, w->bench->n_problem),
        .agreement = share(w->agreed, w->next),
        .kl = w->next > 0 ? w->kl / (double)w->next : NAN,
        .n_recall = w->seen[KV_SCORED_RECALL],
        .n_result = w->seen[KV_SCORED_RESULT],
        .n_deterministic = w->seen[KV_SCORED_DETERMINISTIC],
        .n_problem = w->bench->n_problem,
        .n_scored = w->next,
    };
}

static kv_status walk_documents(kv_accuracy_bench *bench, const kv_row *row,
                                const kv_recorded *recorded, kv_accuracy *out) {
    const kv_trace_info *t = bench->trace;
    kv_status st = KV_OK;
    double start = kv_now();
    walk w = {.bench = bench, .row = row, .recorded = recorded};
    char title[64];
    snprintf(title, sizeof title, "accuracy %s", row ? row->policy->name : "full");
    kv_progress_begin(&w.progress, title, (double)t->n_document * bench->model->config.n_layer);
    KV_NEW(w.wrong, bench->n_problem);
    KV_TRY(open_waiting(&w));
    for (w.document = 0; w.document < t->n_document; w.document++) {
        w.first = t->doc_first[w.document];
        int64_t n_token = t->doc_first[w.document + 1] - w.first;
        const kv_model_hooks hooks = {.context = &w,
                                      .attend = attend,
                                      .logits = take_logits,
                                      .want_logits = bench->want + w.first,
                                      .ops = bench->ops};
        KV_TRY(kv_model_forward(bench->model, t->token + w.first, t->position + w.first,
                                (int32_t)n_token, &hooks));
    }
    look_at_waiting(&w);
    sum_up(&w, out);
    out->seconds = kv_now() - start;
out:
    kv_progress_end(&w.progress);
    free(w.wrong);
    free(w.logits);
    free(w.waiting);
    return st;
}

/* Everything that the full run depends on. */
static kv_status key_of(const kv_accuracy_bench *b, uint64_t key[2]) {
    const kv_trace_info *t = b->trace;
    char about[256];
    XXH3_state_t *h = XXH3_createState();
    if (!h) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    int n = snprintf(about, sizeof about, "%s %s %s %s %s %lld %d", b->model->hash, b->ops->name,
                     kv_isa_name(kv_cpu_isa()), kv_blas_core(), kv_version_build.sources,
                     (long long)t->n_token, t->n_document);
    XXH3_128bits_reset(h);
    XXH3_128bits_update(h, about, (size_t)n);
    XXH3_128bits_update(h, t->token, (size_t)t->n_token * sizeof *t->token);
    XXH3_128bits_update(h, t->position, (size_t)t->n_token * sizeof *t->position);
    XXH3_128bits_update(h, t->scored, (size_t)t->n_token);
    XXH3_128bits_update(h, t->doc_first, ((size_t)t->n_document + 1) * sizeof *t->doc_first);
    XXH128_hash_t d = XXH3_128bits_digest(h);
    XXH3_freeState(h);
    key[0] = d.high64;
    key[1] = d.low64;
    return KV_OK;
}

/* The full run, from `folder` where it is known. */
static kv_status run_full(kv_accuracy_bench *b, const char *folder) {
    kv_status st = KV_OK;
    size_t rows = (size_t)b->n_row;
    kv_accuracy *full = NULL;
    kv_cached c = {
        .name = "full-run",
        .n_array = 4,
        .array = {(void **)&b->logits, (void **)&b->lse, (void **)&b->argmax, (void **)&full},
        .bytes = {rows * (size_t)b->model->config.vocab * sizeof *b->logits, rows * sizeof *b->lse,
                  rows * sizeof *b->argmax, sizeof *full}};
    KV_TRY(key_of(b, c.key));
    if (kv_cache_load(folder, &c)) {
        b->full = *full;
        goto out;
    }
    KV_NEW(b->argmax, b->n_row);
    KV_NEW(b->lse, b->n_row);
    KV_NEW(b->logits, rows * (size_t)b->model->config.vocab);
    KV_NEW(full, 1);
    KV_TRY(walk_documents(b, NULL, NULL, &b->full));
    *full = b->full;
    kv_cache_store(folder, &c);
out:
    free(full);
    return st;
}

kv_status kv_accuracy_open_cached(const kv_model *model, const kv_trace_info *trace,
                                  const kv_ops *ops, const char *folder, kv_accuracy_bench **out) {
    kv_status st = KV_OK;
    kv_accuracy_bench *b = NULL;
    KV_NEW(b, 1);
    *b = (kv_accuracy_bench){.model = model, .trace = trace, .ops = ops, .full = undefined};
    if (trace->scored) {
        KV_TRY(prepare(b));
        KV_TRY(run_full(b, folder));
    }
out:
    *out = st == KV_OK ? b : NULL;
    if (st != KV_OK) kv_accuracy_close(b);
    return st;
}

kv_status kv_accuracy_open(const kv_model *model, const kv_trace_info *trace, const kv_ops *ops,
                           kv_accuracy_bench **out) {
    return kv_accuracy_open_cached(model, trace, ops, NULL, out);
}

void kv_accuracy_close(kv_accuracy_bench *b) {
    if (!b) return;
    free(b->want);
    free(b->counted);
    free(b->problem);
    free(b->argmax);
    free(b->logits);
    free(b->lse);
    free(b);
}

kv_status kv_accuracy_run(kv_accuracy_bench *bench, const kv_row *row, const kv_recorded *recorded,
                          kv_accuracy *out) {
    const bool reads = row && kv_row_reads_recording(row);
    const bool known = bench->trace->scored && !(row && row->policy->no_evict_at) &&
                       (!reads || (recorded && kv_accuracy_covers_model(bench)));
    *out = known ? bench->full : undefined;
    if (!known || !row || row->policy == kv_policy_find("full")) return KV_OK;
    return walk_documents(bench, row, reads ? recorded : NULL, out);
}
