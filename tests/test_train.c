/* Training: the loop (exact resume, early stop, frozen group, bad numbers), the trainer on a small trace (threads, reuse, refusals, every
 * setting), weights that the policies accept. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "experiments/train.h"
#include "policies/registry.h"
#include "reference/core/cpu.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/core/progress.h"
#include "reference/replay.h"
#include "reference/scorer_net.h"
#include "tests/naive/small_trace.h"
#include "traces/safetensors.h"

static char folder[] = "/tmp/kvtrainXXXXXX";

static void setup(void) {
    cr_assert_not_null(mkdtemp(folder));
    cr_assert_eq(chdir(folder), 0);
    kv_progress_set_quiet(1);
    kv_log_set_level(KV_LOG_ERROR);
}

static void teardown(void) {
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (system(command) != 0) fprintf(stderr, "%s stays\n", folder);
}

TestSuite(train, .init = setup, .fini = teardown);

/* Pulls every parameter of a lane towards the trace's number; can stop once in the middle. */
typedef struct pull {
    int64_t interrupt_at, bad_at;
    double checks[64];
    int n_check;
} pull;

static kv_status evaluate(void *context, kv_train_state *s, int32_t trace, int64_t step, bool train,
                          kv_train_figures *out) {
    pull *p = context;
    if (train && step == p->interrupt_at) {
        p->interrupt_at = -1;
        return KV_FAIL(KV_E_INTERRUPTED, "now");
    }
    double loss = 0;
    for (int32_t lane = 0; lane < s->n_lane; lane++) {
        for (int64_t i = 0; i < s->n_param; i++) {
            double d = (double)s->param[lane * s->n_param + i] - trace - lane;
            s->grad[lane * s->n_param + i] = (float)d;
            loss += d * d / 2;
        }
        s->d_theta[lane] = s->theta[lane] - 1;
    }
    if (!train) { /* best in the middle */
        loss = p->n_check == 2 ? -1 : p->n_check;
        p->checks[p->n_check++] = s->param[0];
    }
    *out = (kv_train_figures){.loss = step == p->bad_at ? NAN : loss, .right = .5, .keep = .5};
    return KV_OK;
}

static kv_train_plan small_plan(const char *checkpoint) {
    kv_adamw group = {.rate = .05, .beta1 = .9, .beta2 = .95, .eps = 1e-8};
    return (kv_train_plan){.steps = 24,
                           .warmup = 4,
                           .scorer = group,
                           .theta = group,
                           .clip = 1,
                           .seed = 7,
                           .n_trace = 5,
                           .held_out = -1,
                           .check = 3,
                           .checkpoint = checkpoint,
                           .identity = "abc"};
}

Test(train, loop) {
    kv_train_state whole, cut;
    kv_train_figures last;
    pull p = {.interrupt_at = -1, .bad_at = -1};
    kv_train_objective o = {&p, evaluate};
    kv_train_plan plan = small_plan("whole.checkpoint");
    cr_assert_eq(kv_train_state_open(3, 4, true, false, &whole), KV_OK);
    cr_assert_eq(kv_train_run(&plan, &o, &whole, &last), KV_OK, "%s", kv_error_message());
    cr_expect_eq(whole.step, 24);
    cr_expect_neq(whole.theta[0], 0);
    /* interrupted after 11 steps, in another process for all that the loop knows */
    plan.checkpoint = "cut.checkpoint";
    p.interrupt_at = 11;
    cr_assert_eq(kv_train_state_open(3, 4, true, false, &cut), KV_OK);
    cr_assert_eq(kv_train_run(&plan, &o, &cut, &last), KV_E_INTERRUPTED);
    kv_train_state_free(&cut);
    cr_assert_eq(kv_train_state_open(3, 4, true, false, &cut), KV_OK);
    strcpy(plan.identity, "other");
    cr_expect_eq(kv_train_run(&plan, &o, &cut, &last), KV_E_USAGE, "a foreign checkpoint is used");
    strcpy(plan.identity, "abc");
    cr_assert_eq(kv_train_run(&plan, &o, &cut, &last), KV_OK, "%s", kv_error_message());
    cr_expect_eq(memcmp(whole.param, cut.param, 12 * sizeof(float)), 0, "resumed: other bytes");
    cr_expect_eq(memcmp(whole.theta, cut.theta, 3 * sizeof(float)), 0, "resumed: other decay");
    kv_train_state_free(&cut);
    /* frozen decay; early stop puts back the best: third check, after 9 steps; patience 2 ends at 15 */
    plan = small_plan("stop.checkpoint");
    plan.theta.rate = 0;
    plan.held_out = 4;
    plan.patience = 2;
    cr_assert_eq(kv_train_state_open(3, 4, true, true, &cut), KV_OK);
    cr_assert_eq(kv_train_run(&plan, &o, &cut, &last), KV_OK);
    cr_expect_eq(cut.step, 15, "stopped after %ld", (long)cut.step);
    cr_expect_eq(cut.best_step, 9);
    cr_expect_eq((double)cut.param[0], p.checks[2], "not the best parameters");
    cr_expect_eq(cut.theta[0], 0, "the frozen group moved");
    kv_train_state_free(&cut);
    /* a loss that is no number */
    plan = small_plan("bad.checkpoint");
    p.bad_at = 6;
    cr_assert_eq(kv_train_state_open(3, 4, true, false, &cut), KV_OK);
    cr_expect_eq(kv_train_run(&plan, &o, &cut, &last), KV_E_DATA);
    cr_expect(strstr(kv_error_message(), "step 6"), "%s", kv_error_message());
    kv_train_state_free(&cut);
    kv_train_state_free(&whole);
}

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
