/* Training of dms gates: settings, objective, the global offset that gives the wanted cache, weights file. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/train.h"
#include "experiments/train_dms_loss.h"
#include "experiments/train_dms_offset.h"
#include "experiments/train_params.h"
#include "reference/core/mem.h"
#include "reference/core/rand.h"
#include "traces/dms_file.h"

static const kv_param params[] = {
    KV_COUNT("steps", 600, 1, 1000000, "minibatches; one is a window of a trace, all heads"),
    KV_NUMBER("rate", 3e-3, 0, 1, "learning rate"),
    KV_COUNT("warmup", 20, 0, 1000000, "steps of linear warm-up; then a cosine down to 2 %"),
    KV_NUMBER("clip", 1, 0, 1e9, "largest gradient norm; 0: none"),
    KV_NUMBER("weight_decay", 0, 0, 1, "AdamW's"),
    KV_CHOICE("source", "kv|hidden|channel",
              "what the gate reads: key and value, the layer's hidden state, or one key channel"),
    KV_COUNT("mlp", 256, 0, 65536, "hidden width of the gate; 0: linear"),
    KV_COUNT("channel", 0, 0, 65535, "key channel of source=channel"),
    KV_NUMBER("scale", 10, 1e-3, 1e6, "the gate's output is multiplied by it"),
    KV_NUMBER("start", -5, -100, 100, "gate logit before training: few tokens are marked"),
    KV_NUMBER("temp", 0.1, 1e-3, 1e3, "temperature of the relaxed decision"),
    KV_CHOICE("shift", "1|0", "the gate of token t + shift decides about key t"),
    KV_COUNT("tokens", 4096, 2, 1 << 20, "length of a training window"),
    KV_COUNT("every", 4, 1, 1024, "one block of 64 queries in so many is matched each step"),
    KV_NUMBER("pressure", 1, 0, 1e6, "weight of the ratio loss"),
    KV_NUMBER("ratio", 0, 0, 1e6,
              "compression at the end of the schedule; 0: what the budget means"),
    KV_NUMBER("ramp", 0.6, 0, 1, "share of the steps over which the compression grows"),
    {.name = "held_out",
     .help = "trace to check on: the best parameters there are kept",
     .type = KV_PARAM_TEXT},
    KV_COUNT("check", 50, 1, 1000000, "steps between checks on the held-out trace"),
    KV_COUNT("patience", 0, 0, 1000000,
             "stop after this many checks without a better one; 0: never"),
    {0}};

/* Compression of the long-range tokens at which the mean cache over queries u >= B of the longest document is B. */
static double ratio_of(const kv_train_job *job) {
    double fixed = kv_params_real(&job->params, "ratio"), b = job->run.budget;
    if (fixed >= 1) return fixed;
    double mean = (b + 1 + job->set.longest) / 2 - job->run.window;
    double rate = (b - job->run.window) / mean;
    return rate > 0 && rate < 1 ? 1 / rate : 1;
}

static kv_train_dms_options make_options(const kv_train_job *job) {
    const kv_params *p = &job->params;
    kv_train_dms_options o = {
        .spec = {.source = (kv_dms_source)kv_params_int(p, "source"),
                 .n_mlp = kv_params_int(p, "mlp"),
                 .channel = kv_params_int(p, "channel"),
                 .scale = kv_params_real(p, "scale")},
        .window = job->run.window,
        .shift = kv_params_int(p, "shift") == 0,
        .tokens = kv_params_int(p, "tokens"),
        .every = kv_params_int(p, "every"),
        .temp = kv_params_real(p, "temp"),
        .pressure = kv_params_real(p, "pressure"),
        .ratio = ratio_of(job),
        .ramp = (int64_t)(kv_params_real(p, "ramp") * kv_params_int(p, "steps")),
        .seed = job->run.seed,
    };
    const int32_t width[] = {2 * job->set.head_dim, job->set.d_model, 1};
    o.spec.n_input = width[o.spec.source];
    if (o.spec.source == KV_DMS_CHANNEL) o.spec.n_mlp = 0;
    return o;
}

static void report_offset(kv_train_job *job, const kv_train_dms_fit *fit) {
    char *text = job->report->text;
    const size_t room = sizeof job->report->text, used = strlen(text);
    snprintf(text + used, room - used, "gate offset %.4g: mean cache %.1f on the training traces",
             fit->offset, fit->kept);
    const size_t more = strlen(text);
    if (isnan(fit->held_out))
        snprintf(text + more, room - more, "\n");
    else
        snprintf(text + more, room - more, ", %.1f on the held-out one\n", fit->held_out);
}

/* As the scorers: first layer normal with variance 1 / width, output 0; a linear gate starts at 0. */
static void start_values(const kv_dms_spec *spec, uint64_t seed, double bias, int32_t n_lane,
                         float *param) {
    int64_t n = kv_dms_param(spec), random = (int64_t)spec->n_mlp * spec->n_input;
    for (int32_t lane = 0; lane < n_lane; lane++) {
        for (int64_t i = 0; i < random; i++)
            param[lane * n + i] = (float)(kv_rand_normal(seed, (uint32_t)lane, (uint32_t)i, 0, 4) /
                                          sqrt((double)spec->n_input));
        param[lane * n + n - 1] = (float)bias;
    }
}

static kv_status train(const kv_learner *learner, kv_train_job *job) {
    kv_status st = KV_OK;
    const kv_params *p = &job->params;
    kv_train_dms *loss = NULL;
    kv_train_state state = {0};
    const char *more[16];
    kv_train_dms_fit fit;
    kv_train_dms_options o = make_options(job);
    if (o.spec.source == KV_DMS_CHANNEL && o.spec.channel >= job->set.head_dim)
        return KV_FAIL(KV_E_USAGE, "%s.channel: %d; keys have %d channels", learner->policy,
                       o.spec.channel, job->set.head_dim);
    kv_train_need need = {.run = &job->run,
                          .hidden = o.spec.source == KV_DMS_HIDDEN,
                          .queries = true,
                          .cache_folder = job->options->cache_folder,
                          .ops = job->options->ops};
    kv_train_job_plan(job);
    KV_TRY(kv_train_set_load(&job->set, &need));
    KV_TRY(kv_train_dms_open(&job->set, &o, &loss));
    if (need.ops != &kv_ops_cpu) KV_TRY(kv_train_dms_use_gpu(loss));
    int32_t n_lane = job->set.n_layer * job->set.n_kv_head;
    int64_t n_param = kv_dms_param(&o.spec);
    KV_TRY(kv_train_state_open(n_lane, n_param, false, job->plan.held_out >= 0, &state));
    start_values(&o.spec, job->run.seed, kv_params_real(p, "start"), n_lane, state.param);
    kv_train_objective objective = kv_train_dms_objective(loss);
    KV_TRY(kv_train_job_run(job, &objective, &state));
    KV_TRY(kv_train_dms_fit_offset(job, loss, state.param, o.shift, &fit));
    report_offset(job, &fit);
    for (int32_t lane = 0; lane < n_lane; lane++) {
        float *bias = &state.param[lane * n_param + n_param - 1];
        *bias = (float)(*bias + fit.offset);
    }
    kv_train_job_metadata(job, more);
    kv_dms_file file = {.spec = o.spec,
                        .n_layer = job->set.n_layer,
                        .n_kv_head = job->set.n_kv_head,
                        .layer_id = job->set.layer_id,
                        .param = state.param,
                        .window = job->run.window,
                        .shift = o.shift,
                        .budget = job->run.budget,
                        .sinks = job->run.sinks,
                        .more = more};
    KV_TRY(kv_dms_file_write(job->report->output, &file));
out:
    kv_train_dms_close(loss);
    kv_train_state_free(&state);
    return st;
}

const kv_learner kv_learner_dms = {"dms", params, NULL, train};
