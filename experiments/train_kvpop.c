/* Training of the two KVpop scorers: settings, network, target, weights file. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/train.h"
#include "experiments/train_params.h"
#include "experiments/train_scorer.h"
#include "reference/core/mem.h"
#include "traces/scorer_file.h"

#define COMMON \
    KV_COUNT("steps", 400, 1, 1000000, "minibatches; one is a whole trace, all layers and heads"), \
        KV_NUMBER("rate", 3e-3, 0, 1, "learning rate of the scorer"), \
        KV_NUMBER("rate_theta", 3e-2, 0, 10, "learning rate of the decay"), \
        KV_COUNT("warmup", 20, 0, 1000000, "steps of linear warm-up; then a cosine down to 2 %"), \
        KV_NUMBER("clip", 1, 0, 1e9, "largest gradient norm of each group; 0: none"), \
        KV_NUMBER("weight_decay", 0, 0, 1, "AdamW's, scorer only"), \
        {.name = "power", \
         .help = "power of the attention probability in the target (maths 2.6)", \
         .type = KV_PARAM_REAL, \
         .default_value = 2, \
         .max = 16, \
         .min_open = 1, \
         .choices = "max"}, \
        KV_CHOICE("reduce", "max|mean", "target over the query heads of a group"), \
        KV_CHOICE( \
            "lse", "dense|sparse", \
            "target's normaliser: all keys, or those the target itself keeps at this budget"), \
        KV_NUMBER("boundary", 1, 0, 1, \
                  "share of the budget's long-range slots at whose edge pairs are formed"), \
        KV_COUNT("sample", 0, 0, 1000000, "queries per document that give pairs; 0: every one"), \
        KV_NUMBER("margin", 0.5, 0, 100, \
                  "target margin below which a pair weighs less; 0: all the same"), \
        KV_CHOICE("balance", "on|off", "keep and drop pairs weigh the same in sum"), \
        KV_NUMBER("temp", 1, 1e-3, 1e3, "temperature of the loss"), \
        KV_NUMBER("theta", 4, -20, 20, \
                  "start of the learned decay: delta = 1e-3 - 999e-6 sigmoid(theta)"), \
        KV_NUMBER("delta", 0, 0, 1e-3, \
                  "decay 1 - gamma held at this value (at least 1e-6); 0: learned"), \
        KV_COUNT("mlp", 256, 1, 65536, "hidden width of the token's own network"), \
        KV_CHOICE("input", "kv|hidden", \
                  "what the scorer reads: the cached key and value, or the hidden state"), \
        {.name = "held_out", \
         .help = "trace to check on: the best parameters there are kept", \
         .type = KV_PARAM_TEXT}, \
        KV_COUNT("check", 20, 1, 1000000, "steps between checks on the held-out trace"), \
        KV_COUNT("patience", 0, 0, 1000000, \
                 "stop after this many checks without a better one; 0: never"), \
        KV_CHOICE("paper", "0|1", "1: the paper's own reading; settings given after it win")

static const kv_param mlp_params[] = {COMMON, {0}};
static const kv_param kvpop_params[] = {
    COMMON,
    KV_CHOICE("delay", "on|off", "read the memory when the token leaves the window, or at once"),
    KV_CHOICE("norm", "rms|none", "norm of the readout, or division by the mLSTM's normaliser"),
    KV_CHOICE("feature", "silu|linear", "feature layer before the projections, or none"),
    KV_CHOICE("skip", "mlp|none", "add the token's own network to the readout"),
    KV_CHOICE("gate", "exp|sigmoid", "input gate"),
    KV_CHOICE("gate_input", "feature|hidden|auto",
              "what the gates read; auto: the hidden state when every trace has it"),
    {0}};

static kv_status set_all(kv_params *p, const char *const (*pairs)[2]) {
    for (; (*pairs)[0]; pairs++) {
        kv_status st = kv_params_set(p, "paper", (*pairs)[0], (*pairs)[1]);
        if (st != KV_OK) return st;
    }
    return KV_OK;
}

static kv_status paper_mlp(kv_params *p) {
    static const char *const pairs[][2] = {{"power", "1"}, {"sample", "64"}, {NULL, NULL}};
    return set_all(p, pairs);
}

static kv_status paper_kvpop(kv_params *p) {
    static const char *const pairs[][2] = {{"feature", "linear"},
                                           {"norm", "none"},
                                           {"skip", "none"},
                                           {"gate_input", "auto"},
                                           {NULL, NULL}};
    kv_status st = paper_mlp(p);
    return st == KV_OK ? set_all(p, pairs) : st;
}

static kv_net_spec make_spec(const kv_train_job *job, bool recurrent) {
    const kv_params *p = &job->params;
    const kv_train_set *set = &job->set;
    kv_net_spec s = {.window = job->run.window, .hidden_input = kv_params_int(p, "input") == 1};
    s.n_mlp = kv_params_int(p, "mlp");
    if (recurrent) {
        int gate_input = kv_params_int(p, "gate_input");
        s.recurrent = true;
        s.delay = kv_params_int(p, "delay") == 0;
        s.norm = kv_params_int(p, "norm") == 0;
        s.n_feature = kv_params_int(p, "feature") == 0 ? 128 : 0;
        s.sigmoid_gate = kv_params_int(p, "gate") == 1;
        s.hidden_gate = gate_input == 1 || (gate_input == 2 && set->has_hidden);
        s.n_key = s.n_value = 64;
        if (kv_params_int(p, "skip") == 1) s.n_mlp = 0;
    }
    s.n_hidden = s.hidden_input || s.hidden_gate ? set->d_model : 0;
    s.n_input = s.hidden_input ? set->d_model : 2 * set->head_dim;
    return s;
}

/* The run at whose cutoffs pairs are formed: at least one of the budget's long-range slots. experiments/finding/ measures what it does. */
static kv_run boundary_run(const kv_train_job *job) {
    kv_run run = job->run;
    const int32_t k = run.budget - run.sinks - run.window;
    const int32_t slots = (int32_t)ceil(kv_params_real(&job->params, "boundary") * k);
    run.budget += (slots > 1 ? slots : 1) - k;
    return run;
}

/* theta whose decay is delta, kept off the ends where it would be infinite. */
static double theta_of(const kv_params *p) {
    double delta = kv_params_real(p, "delta");
    if (delta <= 0) return kv_params_real(p, "theta");
    double s = fmin(fmax((1e-3 - delta) / (1e-3 - 1e-6), 1e-9), 1 - 1e-9);
    return log(s / (1 - s));
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Half-lives of the decay, tokens: smallest, median, largest over the lanes. */
static kv_status describe_decay(kv_train_job *job, const kv_train_state *s) {
    kv_status st = KV_OK;
    double *life = NULL;
    KV_NEW(life, s->n_lane);
    for (int32_t i = 0; i < s->n_lane; i++)
        life[i] = -log(2) / kv_net_log_gamma((double)s->theta[i], NULL);
    qsort(life, (size_t)s->n_lane, sizeof *life, by_value);
    size_t used = strlen(job->report->text);
    snprintf(job->report->text + used, sizeof job->report->text - used,
             "decay: half of the score's odds after %.0f / %.0f / %.0f tokens (least, median, most "
             "over heads)\n",
             life[0], life[s->n_lane / 2], life[s->n_lane - 1]);
out:
    free(life);
    return st;
}

static kv_status train(const kv_learner *learner, kv_train_job *job) {
    kv_status st = KV_OK;
    const kv_params *p = &job->params;
    kv_train_state state = {0};
    kv_train_scorer *scorer = NULL;
    const char *more[16];
    bool recurrent = learner == &kv_learner_kvpop;
    kv_net_spec spec = make_spec(job, recurrent);
    kv_net_layout layout;
    kv_loss_options loss = {.margin = kv_params_real(p, "margin"),
                            .temp = kv_params_real(p, "temp"),
                            .balance = kv_params_int(p, "balance") == 0,
                            .sample = kv_params_int(p, "sample"),
                            .tail = kv_loss_defaults.tail};
    const kv_run boundary = boundary_run(job);
    kv_train_need need = {.run = &job->run,
                          .target = true,
                          .power = kv_params_real(p, "power"),
                          .mean = kv_params_int(p, "reduce") == 1,
                          .sparse = kv_params_int(p, "lse") == 1,
                          .log_gamma = kv_net_log_gamma(theta_of(p), NULL),
                          .hidden = spec.hidden_input || spec.hidden_gate,
                          .cache_folder = job->options->cache_folder,
                          .ops = job->options->ops};
    kv_net_describe(&spec, &layout);
    kv_train_job_plan(job);
    job->plan.theta = job->plan.scorer;
    job->plan.theta.weight_decay = 0;
    job->plan.theta.rate = kv_params_real(p, "delta") > 0 ? 0 : kv_params_real(p, "rate_theta");
    KV_TRY(kv_train_scorer_open(&job->set, &boundary, &spec, &loss, &scorer));
    KV_TRY(kv_train_set_load(&job->set, &need));
    if (need.ops != &kv_ops_cpu) KV_TRY(kv_train_scorer_use_gpu(scorer));
    int32_t n_lane = job->set.n_layer * job->set.n_kv_head;
    KV_TRY(kv_train_state_open(n_lane, layout.n_param, true, job->plan.held_out >= 0, &state));
    for (int32_t lane = 0; lane < n_lane; lane++) {
        kv_net_init(&spec, job->run.seed, lane, n_lane, state.param + lane * layout.n_param);
        state.theta[lane] = (float)theta_of(p);
    }
    kv_train_objective objective = kv_train_scorer_objective(scorer);
    KV_TRY(kv_train_job_run(job, &objective, &state));
    KV_TRY(describe_decay(job, &state));
    kv_train_job_metadata(job, more);
    kv_scorer_file file = {.policy = learner->policy,
                           .spec = spec,
                           .n_layer = job->set.n_layer,
                           .n_kv_head = job->set.n_kv_head,
                           .layer_id = job->set.layer_id,
                           .param = state.param,
                           .theta = state.theta,
                           .budget = job->run.budget,
                           .sinks = job->run.sinks,
                           .target_power = need.power,
                           .target_mean = need.mean,
                           .sparse_lse = need.sparse,
                           .more = more};
    KV_TRY(kv_scorer_file_write(job->report->output, &file));
out:
    kv_train_scorer_close(scorer);
    kv_train_state_free(&state);
    return st;
}

const kv_learner kv_learner_kvpop_mlp = {"kvpop_mlp", mlp_params, paper_mlp, train};
const kv_learner kv_learner_kvpop = {"kvpop", kvpop_params, paper_kvpop, train};
