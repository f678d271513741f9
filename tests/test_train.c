/* Training on a small trace: threads, reuse, refusals, every setting, gradients of the objectives, weights that the policies accept. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "experiments/train.h"
#include "experiments/train_dms_loss.h"
#include "experiments/train_scorer.h"
#include "policies/registry.h"
#include "reference/core/cpu.h"
#include "reference/core/log.h"
#include "reference/core/progress.h"
#include "reference/core/rand.h"
#include "reference/replay.h"
#include "reference/scorer_net.h"
#include "tests/naive/small_trace.h"
#include "tests/naive/test_folder.h"
#include "traces/safetensors.h"

static void setup(void) {
    test_folder_enter();
    kv_progress_set_quiet(1);
    kv_log_set_level(KV_LOG_ERROR);
}

TestSuite(train, .init = setup, .fini = test_folder_leave);

static void write_trace(const char *path, uint64_t seed, bool hidden) {
    small_trace *f = malloc(sizeof *f);
    small_trace_make(f);
    f->spec.corpus_seed = seed;
    f->spec.hidden = hidden;
    f->spec.n_model_layer = 8;
    f->k[0][0][0][0] = (float)(seed % 7); /* another content for every seed */
    cr_assert_eq(small_trace_write(f, path), KV_OK, "%s", kv_error_message());
    free(f);
}

static kv_train_options small_options(const char *policy, const char *output) {
    static const char *const traces[] = {"a.h5", "b.h5"};
    return (kv_train_options){.policy = policy,
                              .budget = "20",
                              .sinks = 2,
                              .window = 8,
                              .seed = 3,
                              .trace = traces,
                              .n_trace = 2,
                              .output = output,
                              .cache_folder = "cache",
                              .ops = &kv_ops_cpu};
}

static kv_status train_with(const char *policy, const char *output, const char *const *set) {
    kv_train_options o = small_options(policy, output);
    kv_train_report report = {0};
    o.set = set;
    while (set[o.n_set]) o.n_set++;
    return kv_train(&o, &report);
}

static kv_tensors opened(const char *path) {
    kv_tensors t;
    cr_assert_eq(kv_safetensors_open(path, &t), KV_OK, "%s", kv_error_message());
    return t;
}

/* The policy decides on every layer of the trace with these weights. */
static void check_use(const char *policy_name, const char *path) {
    const kv_policy *policy = kv_policy_find(policy_name);
    kv_tensors weights = opened(path);
    kv_trace *trace;
    kv_trace_layer l;
    kv_params params;
    kv_run run = {.budget = 20, .sinks = 2, .window = 8, .eps = 1e-8};
    int32_t evict_at[FX_KV * FX_TOKEN];
    cr_assert_eq(kv_params_init(&params, policy->params), KV_OK);
    cr_assert_eq(kv_trace_open("a.h5", &trace), KV_OK);
    for (int32_t layer = 0; layer < FX_LAYER; layer++) {
        cr_assert_eq(kv_trace_read_layer(trace, layer, true, &l), KV_OK);
        for (int32_t doc = 0; doc < 3; doc++) {
            kv_span span;
            kv_trace_span(trace, &l, layer, doc, &span);
            kv_policy_input input = {.span = &span,
                                     .run = &run,
                                     .params = &params,
                                     .weights = &weights,
                                     .ops = &kv_ops_cpu};
            cr_expect_eq(kv_replay(policy, &input, evict_at), KV_OK, "%s", kv_error_message());
        }
        kv_trace_layer_free(&l);
    }
    kv_params_free(&params);
    kv_trace_close(trace);
    kv_tensors_free(&weights);
}

static bool same_weights(const char *a, const char *b) {
    kv_tensors x = opened(a), y = opened(b);
    bool same = x.n_tensor == y.n_tensor;
    for (int32_t i = 0; same && i < x.n_tensor; i++)
        same = x.tensor[i].n_element == y.tensor[i].n_element &&
               memcmp(x.tensor[i].data, y.tensor[i].data,
                      (size_t)x.tensor[i].n_element * sizeof(float)) == 0;
    kv_tensors_free(&x);
    kv_tensors_free(&y);
    return same;
}

/* A dense target does not depend on the budget, so pairs at the edge of a share of the slots are those of the budget with that many. */
Test(train, boundary_is_a_smaller_budget) {
    static const struct {
        const char *boundary, *budget; /* of the 10 slots beside 2 sinks and window 8 */
    } equal[] = {{"0.5", "15"}, {"0.41", "15"}, {"0", "11"}, {"1", "20"}};
    write_trace("a.h5", 5000000001u, false);
    write_trace("b.h5", 5000000002u, false);
    for (size_t i = 0; i < sizeof equal / sizeof *equal; i++) {
        char setting[64], share[32], whole[32];
        snprintf(setting, sizeof setting, "kvpop_mlp.boundary=%s", equal[i].boundary);
        snprintf(share, sizeof share, "share%zu.safetensors", i);
        snprintf(whole, sizeof whole, "whole%zu.safetensors", i);
        const char *const sets[] = {"kvpop_mlp.steps=4", "kvpop_mlp.mlp=8", setting, NULL};
        kv_train_report report = {0};
        kv_train_options o = small_options("kvpop_mlp", share);
        o.set = sets;
        o.n_set = 3;
        cr_assert_eq(kv_train(&o, &report), KV_OK, "%s", kv_error_message());
        o.output = whole;
        o.budget = equal[i].budget;
        o.n_set = 2;
        cr_assert_eq(kv_train(&o, &report), KV_OK, "%s", kv_error_message());
        cr_expect(same_weights(share, whole), "boundary %s is not budget %s", equal[i].boundary,
                  equal[i].budget);
    }
    cr_expect_not(same_weights("share0.safetensors", "share3.safetensors"), "no effect");
}

Test(train, scorers_from_a_trace) {
    write_trace("a.h5", 5000000001u, true);
    write_trace("b.h5", 5000000002u, true);
    write_trace("held.h5", 5, true);
    const char *const quick[] = {"kvpop_mlp.steps=5", "kvpop_mlp.mlp=8", NULL};
    kv_threads_set(1);
    cr_assert_eq(train_with("kvpop_mlp", "one.safetensors", quick), KV_OK, "%s",
                 kv_error_message());
    kv_threads_set(3);
    cr_assert_eq(train_with("kvpop_mlp", "three.safetensors", quick), KV_OK);
    kv_threads_set(0);
    kv_tensors one = opened("one.safetensors"), three = opened("three.safetensors");
    cr_expect(one.hash[0] == three.hash[0] && one.hash[1] == three.hash[1],
              "one and three threads give different weights");
    cr_expect_str_eq(kv_tensors_meta(&one, "budget"), "20");
    cr_expect_str_eq(kv_tensors_meta(&one, "target_power"), "2");
    cr_expect_eq(access("one.manifest.json", F_OK), 0);
    cr_expect_neq(access("one.safetensors.checkpoint", F_OK), 0, "the checkpoint stays");
    check_use("kvpop_mlp", "one.safetensors");
    /* the same again is known; another training does not overwrite */
    cr_expect_eq(train_with("kvpop_mlp", "one.safetensors", quick), KV_OK);
    const char *const other[] = {"kvpop_mlp.steps=6", NULL};
    cr_expect_eq(train_with("kvpop_mlp", "one.safetensors", other), KV_E_CANTCREATE);
    kv_tensors_free(&one);
    kv_tensors_free(&three);
    /* every setting once, both policies */
    const char *const settings[][4] = {
        {"kvpop.delay=off", "kvpop.norm=none", "kvpop.feature=linear"},
        {"kvpop.skip=none", "kvpop.gate=sigmoid", "kvpop.gate_input=hidden"},
        {"kvpop.paper=1", "kvpop.skip=mlp", "kvpop.delta=2e-5"},
        {"kvpop.input=hidden", "kvpop.sample=3", "kvpop.lse=sparse"},
        {"kvpop.power=max", "kvpop.reduce=mean", "kvpop.margin=0"},
        {"kvpop.held_out=held.h5", "kvpop.check=2", "kvpop.balance=off"},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        const char *set[] = {settings[i][0], settings[i][1], settings[i][2], "kvpop.steps=2", NULL};
        char path[64];
        snprintf(path, sizeof path, "set%zu.safetensors", i);
        cr_assert_eq(train_with("kvpop", path, set), KV_OK, "%s: %s", set[0], kv_error_message());
        check_use("kvpop", path);
    }
    kv_tensors paper = opened("set2.safetensors");
    cr_expect_str_eq(kv_tensors_meta(&paper, "norm"), "none");
    cr_expect_str_eq(kv_tensors_meta(&paper, "gate_input"), "hidden");
    cr_expect_str_eq(kv_tensors_meta(&paper, "target_power"), "1");
    cr_expect_not_null(kv_tensors_find(&paper, "layers.4.mlp.w1"), "a later setting wins");
    float theta[2];
    const int64_t shape[] = {2};
    const kv_tensor *t;
    cr_assert_eq(kv_tensors_get(&paper, "layers.1.theta", 1, shape, &t), KV_OK);
    cr_assert_eq(kv_tensor_read(&paper, t, theta), KV_OK);
    cr_expect_float_eq(kv_net_log_gamma(theta[1], NULL), log1p(-2e-5), 1e-11, "log gamma %.12g",
                       kv_net_log_gamma(theta[1], NULL));
    kv_tensors_free(&paper);
}

/* Mean cache of dms on a trace over queries u >= 20, from the decisions of the policy itself. */
static double mean_cache(const char *weights_path, const char *trace_path) {
    const kv_policy *dms = kv_policy_find("dms");
    kv_tensors weights = opened(weights_path);
    kv_trace *trace;
    kv_params params;
    kv_run run = {.budget = 20, .sinks = 2, .window = 8, .eps = 1e-8};
    double kept = 0, counted = 0;
    int32_t evict_at[FX_KV * FX_TOKEN];
    cr_assert_eq(kv_params_init(&params, dms->params), KV_OK);
    cr_assert_eq(kv_trace_open(trace_path, &trace), KV_OK);
    for (int32_t layer = 0; layer < FX_LAYER; layer++) {
        kv_trace_layer l;
        cr_assert_eq(kv_trace_read_layer(trace, layer, true, &l), KV_OK);
        for (int32_t doc = 0; doc < 3; doc++) {
            kv_span span;
            kv_trace_span(trace, &l, layer, doc, &span);
            kv_policy_input input = {.span = &span,
                                     .run = &run,
                                     .params = &params,
                                     .weights = &weights,
                                     .ops = &kv_ops_cpu};
            cr_assert_eq(kv_replay(dms, &input, evict_at), KV_OK, "%s", kv_error_message());
            for (int32_t h = 0; h < FX_KV; h++)
                for (int32_t u = 20; u < span.n_token; u++, counted++)
                    for (int32_t t = 0; t <= u; t++) kept += u < evict_at[h * span.stride + t];
        }
        kv_trace_layer_free(&l);
    }
    kv_params_free(&params);
    kv_trace_close(trace);
    kv_tensors_free(&weights);
    return kept / counted;
}

Test(train, dms_fits_the_budget) {
    write_trace("a.h5", 5000000001u, true);
    write_trace("b.h5", 5000000002u, true);
    write_trace("held.h5", 5, true);
    const char *const settings[][3] = {
        {"dms.source=kv", "dms.mlp=8", "dms.held_out=held.h5"},
        {"dms.source=hidden", "dms.mlp=0", "dms.shift=0"},
        {"dms.source=channel", "dms.channel=5", "dms.ratio=3"},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        const char *set[] = {settings[i][0],  settings[i][1], settings[i][2], "dms.steps=6",
                             "dms.tokens=64", "dms.every=1",  "dms.check=3",  NULL};
        char path[2][64];
        kv_tensors w[2];
        for (int threads = 1; threads <= 3; threads += 2) {
            snprintf(path[threads / 2], sizeof path[0], "dms%zu-%d.safetensors", i, threads);
            kv_threads_set(threads);
            cr_assert_eq(train_with("dms", path[threads / 2], set), KV_OK, "%s: %s", set[0],
                         kv_error_message());
            w[threads / 2] = opened(path[threads / 2]);
        }
        kv_threads_set(0);
        cr_expect(w[0].hash[0] == w[1].hash[0], "%s: threads change the weights", set[0]);
        kv_tensors_free(&w[0]);
        kv_tensors_free(&w[1]);
        if (i == 1) continue; /* the policy's own default is shift 1 */
        double kept = (mean_cache(path[0], "a.h5") + mean_cache(path[0], "b.h5")) / 2;
        cr_expect_float_eq(kept, 20, .2, "%s: mean cache %g, wanted 20", set[0], kept);
    }
    const char *const wide[] = {"dms.source=channel", "dms.channel=8", NULL};
    cr_expect_eq(train_with("dms", "w.safetensors", wide), KV_E_USAGE);
}

/* Slope of the loss along its own gradient, by differences and as the gradient says: the norm. */
static void check_slope(const char *name, const kv_train_objective *o, kv_train_state *s) {
    kv_train_figures f, up, down;
    int64_t n = s->n_lane * s->n_param;
    double norm = 0, h = 2e-3;
    float *start = malloc((size_t)n * sizeof *start), *grad = malloc((size_t)n * sizeof *grad);
    cr_assert_eq(o->evaluate(o->context, s, 0, 3, true, &f), KV_OK, "%s", kv_error_message());
    memcpy(start, s->param, (size_t)n * sizeof *start);
    memcpy(grad, s->grad, (size_t)n * sizeof *grad);
    for (int64_t i = 0; i < n; i++) norm += (double)grad[i] * (double)grad[i];
    norm = sqrt(norm);
    for (int64_t i = 0; i < n; i++) s->param[i] = start[i] + (float)(h * grad[i] / norm);
    cr_assert_eq(o->evaluate(o->context, s, 0, 3, true, &up), KV_OK);
    for (int64_t i = 0; i < n; i++) s->param[i] = start[i] - (float)(h * grad[i] / norm);
    cr_assert_eq(o->evaluate(o->context, s, 0, 3, true, &down), KV_OK);
    double slope = (up.loss - down.loss) / (2 * h);
    /* the loss is fp32 inside: 1e-7 / h, and curvature of third order */
    cr_expect_float_eq(slope, norm, .01 * norm, "%s: slope %g, gradient %g", name, slope, norm);
    free(start);
    free(grad);
}

Test(train, objectives_follow_their_gradients) {
    write_trace("a.h5", 5000000001u, true);
    const char *const path[] = {"a.h5"};
    kv_train_set set;
    kv_run run = {.budget = 20, .sinks = 2, .window = 8, .eps = 1e-8, .seed = 1};
    kv_train_need need = {.run = &run,
                          .target = true,
                          .power = 2,
                          .log_gamma = -1e-5,
                          .hidden = true,
                          .queries = true,
                          .ops = &kv_ops_cpu};
    kv_train_state s;
    cr_assert_eq(kv_train_set_open(path, 1, 0, false, &set), KV_OK);
    cr_assert_eq(kv_train_set_load(&set, &need), KV_OK, "%s", kv_error_message());
    for (int i = 0; i < 3; i++) {
        const kv_net_spec specs[] = {{.n_input = 16, .n_mlp = 8, .window = 8},
                                     {.recurrent = true,
                                      .delay = true,
                                      .norm = true,
                                      .n_input = 16,
                                      .n_feature = 6,
                                      .n_key = 4,
                                      .n_value = 4,
                                      .n_mlp = 8,
                                      .window = 8},
                                     {.recurrent = true,
                                      .hidden_gate = true,
                                      .n_input = 16,
                                      .n_hidden = FX_WIDTH,
                                      .n_key = 4,
                                      .n_value = 4,
                                      .window = 8}};
        kv_loss_options loss = kv_loss_defaults;
        loss.tail = 10;
        kv_net_layout l;
        kv_train_scorer *o;
        kv_net_describe(&specs[i], &l);
        cr_assert_eq(kv_train_scorer_open(&set, &run, &specs[i], &loss, &o), KV_OK);
        cr_assert_eq(kv_train_state_open(4, l.n_param, true, false, &s), KV_OK);
        for (int64_t j = 0; j < 4 * l.n_param; j++)
            s.param[j] = (float)(.3 * kv_rand_normal(4, (uint32_t)j, 0, 0, 0));
        kv_train_objective objective = kv_train_scorer_objective(o);
        check_slope(i == 0   ? "kvpop_mlp"
                    : i == 1 ? "kvpop"
                             : "kvpop on hidden states",
                    &objective, &s);
        kv_train_scorer_close(o);
        kv_train_state_free(&s);
    }
    for (int shift = 0; shift < 2; shift++) {
        /* without pressure: the ratio loss passes straight through a step and has no slope of its own */
        kv_train_dms_options options = {.spec = {.n_input = 16, .n_mlp = 4, .scale = 1},
                                        .window = 8,
                                        .shift = shift,
                                        .tokens = 60,
                                        .every = 1,
                                        .temp = 1,
                                        .ratio = 2,
                                        .ramp = 4,
                                        .seed = 2};
        kv_train_dms *o;
        int64_t n = kv_dms_param(&options.spec);
        cr_assert_eq(kv_train_dms_open(&set, &options, &o), KV_OK);
        cr_assert_eq(kv_train_state_open(4, n, false, false, &s), KV_OK);
        for (int64_t j = 0; j < 4 * n; j++)
            s.param[j] = (float)(.3 * kv_rand_normal(4, (uint32_t)j, 1, 0, 0));
        kv_train_objective objective = kv_train_dms_objective(o);
        check_slope(shift ? "dms, shift 1" : "dms, shift 0", &objective, &s);
        kv_train_dms_close(o);
        kv_train_state_free(&s);
    }
    kv_train_set_free(&set);
}

Test(train, refusals) {
    write_trace("a.h5", 5000000001u, false);
    write_trace("b.h5", 2147483647u, false);
    const char *const none[] = {NULL};
    kv_train_report report;
    cr_expect_eq(train_with("kvpop_mlp", "w.safetensors", none), KV_E_USAGE);
    cr_expect(strstr(kv_error_message(), "2147483647"), "%s", kv_error_message());
    write_trace("b.h5", 2147483648u, false);
#define REFUSED(policy, code, word, ...) \
    do { \
        const char *const set[] = {__VA_ARGS__, NULL}; \
        cr_expect_eq(train_with(policy, "w.safetensors", set), code, "%s", #__VA_ARGS__); \
        cr_expect(strstr(kv_error_message(), word), "'%s' lacks '%s'", kv_error_message(), word); \
    } while (0)
    REFUSED("h2o", KV_E_USAGE, "kvpop_mlp", "h2o.steps=1");
    REFUSED("kvpop_mlp", KV_E_USAGE, "steps", "kvpop_mlp.step=1");
    REFUSED("kvpop_mlp", KV_E_USAGE, "kvpop_mlp.KEY=VALUE", "kvpop.steps=1");
    REFUSED("kvpop_mlp", KV_E_DATA, "hidden states", "kvpop_mlp.input=hidden");
    kv_train_options o = small_options("kvpop_mlp", "w.safetensors");
    o.budget = "60";
    cr_expect_eq(kv_train(&o, &report), KV_E_USAGE);
    cr_expect(strstr(kv_error_message(), "longer than budget"), "%s", kv_error_message());
    o.budget = "10";
    cr_expect_eq(kv_train(&o, &report), KV_E_USAGE);
    o.budget = "9";
    cr_expect_eq(kv_train(&o, &report), KV_E_USAGE);
    o.budget = "20";
    o.n_trace = 0;
    cr_expect_eq(kv_train(&o, &report), KV_E_USAGE);
}
