/* Accuracy through a model: every policy's run against the same run written out (naive masked attention in a hook, naive formulas),
 * on a small random model whose text it partly wrote itself. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/accuracy.h"
#include "experiments/experiment.h"
#include "policies/registry.h"
#include "reference/core/cpu.h"
#include "reference/core/progress.h"
#include "reference/core/rand.h"
#include "reference/replay.h"
#include "tests/naive/naive_accuracy.h"
#include "tests/naive/naive_attention.h"
#include "traces/model_load.h"

enum { N_DOC = 2, N_TOKEN = 170, VOCAB = 61 };
static const int64_t doc_first[N_DOC + 1] = {0, 100, N_TOKEN};
static const int32_t doc_request[N_DOC] = {0, 1}, doc_in_request[N_DOC] = {0, 0};
static const int32_t layer_id[3] = {0, 1, 2};

/* Where "answer . . d d <eos>" starts: the first ends before a quarter of its document, the last is cut by the end. */
static const int64_t answer[] = {10, 40, 70, 120, 140, 165};

static int32_t token[N_TOKEN], position[N_TOKEN];
static uint8_t scored[N_TOKEN];
static kv_trace_info trace;

typedef struct naive_run {
    const kv_row *row; /* NULL: full */
    const kv_recorded *recorded;
    int32_t doc;
    float *logits; /* [n_token][vocab] */
} naive_run;

static kv_status naive_attend(void *context, const kv_span *given, float *o) {
    const naive_run *run = context;
    kv_span span = *given;
    int64_t cells = span.n_kv_head * span.stride, n = span.n_q_head * span.stride * span.head_dim;
    int32_t *evict_at = malloc((size_t)cells * sizeof *evict_at);
    span.request = doc_request[run->doc];
    span.document = doc_in_request[run->doc];
    span.first = doc_first[run->doc];
    for (int64_t i = 0; i < cells; i++) evict_at[i] = run->row ? 0 : KV_NEVER;
    if (run->row) {
        kv_policy_input input = {
            .span = &span, .run = &run->row->run, .params = &run->row->params, .ops = &kv_ops_cpu};
        const kv_recorded *r = run->recorded;
        float mine[2 * N_TOKEN]; /* the document's part, at the stride of the span */
        for (int64_t h = 0; r && h < 2; h++)
            for (int64_t t = 0; t < span.n_token; t++)
                mine[h * span.stride + t] =
                    (r->gate ? r->gate
                             : r->score)[span.layer_id][h * N_TOKEN + doc_first[run->doc] + t];
        if (r && r->gate) span.gate = mine;
        if (r && r->score)
            input.trace_score = mine, input.trace_delta = r->delta + 2 * span.layer_id;
        cr_assert_eq(kv_replay(run->row->policy, &input, evict_at), KV_OK, "%s",
                     kv_error_message());
    }
    const kv_masked_request request = {.evict_at = evict_at,
                                       .window = 1,
                                       .rerotate = run->row && kv_row_rerotates(run->row),
                                       .want_output = true};
    naive_masked masked = {0};
    naive_masked_compute(&span, &request, &masked);
    for (int64_t i = 0; i < n; i++) o[i] = (float)masked.o[i];
    naive_masked_free(&masked);
    free(evict_at);
    return KV_OK;
}

static kv_status keep(void *context, int32_t first, int32_t n, const float *logits) {
    const naive_run *run = context;
    memcpy(run->logits + (doc_first[run->doc] + first) * VOCAB, logits,
           (size_t)n * VOCAB * sizeof *logits);
    return KV_OK;
}

static float *naive_logits(const kv_model *model, const kv_row *row, const kv_recorded *recorded) {
    naive_run run = {
        .row = row, .recorded = recorded, .logits = malloc(N_TOKEN * VOCAB * sizeof(float))};
    const kv_model_hooks hooks = {.context = &run, .attend = naive_attend, .logits = keep};
    for (run.doc = 0; run.doc < N_DOC; run.doc++)
        cr_assert_eq(
            kv_model_forward(model, token + doc_first[run.doc], position + doc_first[run.doc],
                             (int32_t)(doc_first[run.doc + 1] - doc_first[run.doc]), &hooks),
            KV_OK, "%s", kv_error_message());
    return run.logits;
}

/* the likeliest next token that neither ends a problem nor starts an answer */
static int32_t expected;

static kv_status write_next(void *context, int32_t first, int32_t n, const float *logits) {
    (void)context, (void)first;
    const float *last = logits + (n - 1) * VOCAB;
    expected = 3;
    for (int32_t i = 3; i < 60; i++)
        if (last[i] > last[expected]) expected = i;
    return KV_OK;
}

/* Half of the tokens are what the model itself expects, so that accuracy lies between 0 and 1. */
static kv_model *write_text(void) {
    kv_model *model = NULL;
    cr_assert_eq(kv_model_load("tests/fixtures/hf_qwen3", &model), KV_OK, "%s", kv_error_message());
    kv_rng rng = kv_rng_make(3, 0);
    kv_progress_set_quiet(1);
    for (int32_t x = 0; x < N_TOKEN; x++) {
        token[x] = (int32_t)(3 + kv_rng_below(&rng, 57)); /* neither <eos> nor `answer` */
        scored[x] = (uint8_t)kv_rng_below(&rng, 3);       /* results stand in answers only */
        position[x] = x < doc_first[1] ? x + 5 : 2 * x;
    }
    for (size_t i = 0; i < sizeof answer / sizeof *answer; i++) {
        int64_t a = answer[i];
        token[a] = 60;
        scored[a + 3] = scored[a + 4] = 3;
        if (a + 5 < N_TOKEN) token[a + 5] = 2;
    }
    for (int32_t x = 1; x < N_TOKEN; x++) {
        if (token[x] == 60 || token[x] == 2 || x == doc_first[1] || kv_rng_below(&rng, 4) == 0)
            continue;
        int64_t first = doc_first[x > doc_first[1]];
        const kv_model_hooks hooks = {.logits = write_next};
        cr_assert_eq(
            kv_model_forward(model, token + first, position + first, (int32_t)(x - first), &hooks),
            KV_OK);
        token[x] = expected;
    }
    trace = (kv_trace_info){.n_layer = 3,
                            .n_q_head = 4,
                            .n_kv_head = 2,
                            .head_dim = 16,
                            .d_model = 32,
                            .n_model_layer = 3,
                            .layer_id = layer_id,
                            .n_request = 2,
                            .n_token = N_TOKEN,
                            .n_document = N_DOC,
                            .doc_first = doc_first,
                            .doc_request = doc_request,
                            .doc_in_request = doc_in_request,
                            .longest = 100,
                            .token = token,
                            .position = position,
                            .scored = scored};
    return model;
}

static kv_row make_row(const char *policy, const char *key, const char *value, int32_t budget) {
    kv_row row = {.policy = kv_policy_find(policy),
                  .run = {.budget = budget,
                          .sinks = 2,
                          .window = 6,
                          .seed = 7,
                          .eps = 1e-8,
                          .oracle_delta = 2e-5}};
    cr_assert(row.policy, "%s", policy);
    cr_assert_eq(kv_params_init(&row.params, row.policy->params), KV_OK);
    if (key)
        cr_assert_eq(kv_params_set(&row.params, policy, key, value), KV_OK, "%s",
                     kv_error_message());
    return row;
}

static void expect_equal(const char *name, const kv_accuracy *got, const kv_accuracy *want) {
    const double g[] = {got->recall,  got->result,    got->deterministic,
                        got->problem, got->agreement, got->kl};
    const double w[] = {want->recall,  want->result,    want->deterministic,
                        want->problem, want->agreement, want->kl};
    static const char *const field[] = {"recall",  "result",    "deterministic",
                                        "problem", "agreement", "kl"};
    /* Counts are exact; kl carries the 2e-5 by which fp32 logits of size 20 differ. */
    for (int i = 0; i < 6; i++)
        cr_expect(fabs(g[i] - w[i]) <= (i == 5 ? 1e-4 : 1e-12), "case=%s %s %.9g, expected %.9g",
                  name, field[i], g[i], w[i]);
    cr_expect(got->n_recall == want->n_recall && got->n_result == want->n_result &&
                  got->n_deterministic == want->n_deterministic &&
                  got->n_problem == want->n_problem && got->n_scored == want->n_scored,
              "case=%s counts", name);
}

Test(accuracy, every_kind_of_policy_against_the_written_out_run) {
    /* Without knorm: the norms of normalised keys nearly tie, and rounding decides. */
    static const struct {
        const char *policy, *key, *value;
        int32_t budget;
    } c[] = {{"streaming", NULL, NULL, 20}, {"streaming", "pos", "cache", 20},
             {"random", NULL, NULL, 24},    {"keydiff", NULL, NULL, 16},
             {"oracle", "power", "2", 16},  {"tova", NULL, NULL, 16},
             {"h2o", NULL, NULL, 16},       {"cumulative", NULL, NULL, 8},
             {"streaming", NULL, NULL, 95}};
    kv_model *model = write_text();
    kv_accuracy_bench *bench = NULL;
    float *full = naive_logits(model, NULL, NULL);
    kv_accuracy got, want;
    cr_assert_eq(kv_accuracy_open(model, &trace, &kv_ops_cpu, &bench), KV_OK, "%s",
                 kv_error_message());
    cr_assert_eq(kv_accuracy_run(bench, NULL, NULL, &got), KV_OK);
    want = naive_accuracy(full, full, VOCAB, token, scored, doc_first, N_DOC);
    expect_equal("full", &got, &want);
    cr_expect(got.agreement == 1.0 && got.kl == 0.0, "full agrees with itself: %g %g",
              got.agreement, got.kl);
    cr_expect_eq(got.n_problem, 4, "one problem ends too early, one never");
    cr_expect(got.recall > 0.4 && got.recall < 1.0, "the text is partly the model's: %g",
              got.recall);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s b%d %s", c[i].policy, c[i].budget,
                 c[i].value ? c[i].value : "");
        kv_row row = make_row(c[i].policy, c[i].key, c[i].value, c[i].budget);
        float *logits = naive_logits(model, &row, NULL);
        kv_accuracy again;
        kv_threads_set(1);
        cr_assert_eq(kv_accuracy_run(bench, &row, NULL, &got), KV_OK, "%s: %s", name,
                     kv_error_message());
        kv_threads_set(3);
        cr_assert_eq(kv_accuracy_run(bench, &row, NULL, &again), KV_OK);
        kv_threads_set(0);
        want = naive_accuracy(full, logits, VOCAB, token, scored, doc_first, N_DOC);
        expect_equal(name, &got, &want);
        cr_expect(got.kl > 1e-4, "case=%s evicts something: kl %g", name, got.kl);
        again.seconds = got.seconds;
        cr_expect_eq(memcmp(&got, &again, sizeof got), 0, "case=%s: 1 and 3 threads", name);
        free(logits);
        kv_params_free(&row.params);
    }
    free(full);
    kv_accuracy_close(bench);
    kv_model_free(model);
}

/* Gates and scores of the recording decide in the model's run as they do in the replay, where the trace has all layers. */
Test(accuracy, recorded_gates_and_scores_against_the_written_out_run) {
    static float value[3][2 * N_TOKEN];
    float *layer[3] = {value[0], value[1], value[2]};
    double delta[6];
    kv_model *model = write_text();
    kv_accuracy_bench *bench = NULL;
    float *full = naive_logits(model, NULL, NULL);
    kv_rng rng = kv_rng_make(5, 0);
    for (int l = 0; l < 3; l++)
        for (int i = 0; i < 2 * N_TOKEN; i++) value[l][i] = (float)(kv_rng_below(&rng, 1000)) - 400;
    for (int i = 0; i < 6; i++) delta[i] = 1e-3 * (i + 1);
    cr_assert_eq(kv_accuracy_open(model, &trace, &kv_ops_cpu, &bench), KV_OK);
    const struct {
        kv_row row;
        kv_recorded recorded;
    } c[] = {
        {make_row("dms", NULL, NULL, 20), {.n_layer = 3, .gate = layer}},
        {make_row("dms", "shift", "0", 20), {.n_layer = 3, .gate = layer}},
        {make_row("kvpop", "scores", "trace", 20), {.n_layer = 3, .score = layer, .delta = delta}}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        kv_accuracy got, want;
        kv_params params = c[i].row.params;
        float *logits = naive_logits(model, &c[i].row, &c[i].recorded);
        cr_assert_eq(kv_accuracy_run(bench, &c[i].row, &c[i].recorded, &got), KV_OK, "%s",
                     kv_error_message());
        want = naive_accuracy(full, logits, VOCAB, token, scored, doc_first, N_DOC);
        expect_equal(c[i].row.policy->name, &got, &want);
        cr_expect(got.kl > 1e-4, "case=%zu evicts something: kl %g", i, got.kl);
        trace.n_layer = 2;
        cr_assert_eq(kv_accuracy_run(bench, &c[i].row, &c[i].recorded, &got), KV_OK);
        cr_expect(isnan(got.recall) && got.n_scored == 0, "case=%zu: a layer is missing", i);
        trace.n_layer = 3;
        free(logits);
        kv_params_free(&params);
    }
    free(full);
    kv_accuracy_close(bench);
    kv_model_free(model);
}

Test(accuracy, runs_without_a_meaning) {
    kv_model *model = write_text();
    kv_accuracy_bench *bench = NULL;
    kv_accuracy got;
    cr_assert_eq(kv_accuracy_open(model, &trace, &kv_ops_cpu, &bench), KV_OK, "%s",
                 kv_error_message());
    static const char *const none[] = {"oracle_step", "dms", "kvpop", "kvpop_mlp"};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        kv_row row = make_row(none[i], NULL, NULL, 20);
        cr_assert_eq(kv_accuracy_run(bench, &row, NULL, &got), KV_OK, "%s: %s", none[i],
                     kv_error_message());
        cr_expect(isnan(got.recall) && isnan(got.kl) && got.n_scored == 0, "case=%s", none[i]);
        kv_params_free(&row.params);
    }
    /* Nothing leaves a cache as large as the document: the very same bytes as the full run. */
    kv_row all = make_row("h2o", NULL, NULL, 100), full = make_row("full", NULL, NULL, 20);
    cr_assert_eq(kv_accuracy_run(bench, &all, NULL, &got), KV_OK);
    cr_expect(got.agreement == 1.0 && got.kl == 0.0, "B = S: kl %g", got.kl);
    cr_assert_eq(kv_accuracy_run(bench, &full, NULL, &got), KV_OK);
    cr_expect(got.agreement == 1.0 && got.kl == 0.0, "full: kl %g", got.kl);
    kv_params_free(&all.params);
    kv_params_free(&full.params);
    kv_row low = make_row("streaming", NULL, NULL, 5); /* below sinks + window */
    cr_expect_eq(kv_accuracy_run(bench, &low, NULL, &got), KV_E_USAGE);
    kv_params_free(&low.params);
    kv_accuracy_close(bench);

    trace.scored = NULL;
    cr_assert_eq(kv_accuracy_open(model, &trace, &kv_ops_cpu, &bench), KV_OK);
    cr_assert_eq(kv_accuracy_run(bench, NULL, NULL, &got), KV_OK);
    cr_expect(isnan(got.recall) && isnan(got.agreement), "a trace without `scored`");
    kv_accuracy_close(bench);
    trace.scored = scored;
    token[50] = 61;
    cr_expect_eq(kv_accuracy_open(model, &trace, &kv_ops_cpu, &bench), KV_E_DATA);
    cr_expect_null(bench);
    kv_accuracy_close(NULL);
    kv_model_free(model);
}
