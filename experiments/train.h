/* kvlab train: traces -> weights of kvpop_mlp, kvpop or dms. */
#ifndef KV_EXPERIMENTS_TRAIN_H
#define KV_EXPERIMENTS_TRAIN_H

#include "experiments/train_loop.h"

typedef struct kv_train_options {
    const char *policy, *budget; /* budget as typed: count or fraction of the longest document */
    int32_t sinks, window;
    uint64_t seed;
    const char *const *trace;
    int32_t n_trace;
    const char *const *set; /* "policy.key=value" */
    int32_t n_set;
    const char *model_dir; /* the traces must come from this model; NULL: not checked */
    const char *output;    /* NULL: policies/weights/<policy>-b<budget>.safetensors */
    const char *cache_folder;
    const kv_ops *ops; /* computes the targets; scorers are trained on the same device */
    bool force;        /* replace other weights, start over */
    bool dry_run;      /* check the arguments only; traces need not be named */
} kv_train_options;

typedef struct kv_train_report {
    char output[4096]; /* the weights file */
    char text[1024];   /* lines about the result, for the screen */
} kv_train_report;

/* Trains, writes the weights and beside them <name>.manifest.json. Weights that this very training already made are left as they are.
 * The checkpoint <output>.checkpoint exists only while a training is unfinished. */
kv_status kv_train(const kv_train_options *options, kv_train_report *report);

/* One training, resolved. */
typedef struct kv_train_job {
    const kv_train_options *options;
    kv_params params;
    kv_run run;
    kv_train_set set;
    /* filled in by the learner except n_trace, seed, identity, checkpoint, held_out, force */
    kv_train_plan plan;
    kv_train_report *report;
    char checkpoint[4096 + 16];
} kv_train_job;

/* What can be trained. */
typedef struct kv_learner {
    const char *policy;
    /* settings of its training; `held_out` names a trace for early stopping */
    const kv_param *params;
    kv_status (*paper)(kv_params *params); /* the paper's own settings (paper=1); NULL: none */
    kv_status (*train)(const struct kv_learner *learner,
                       kv_train_job *job); /* loads, trains, writes job->report->output */
} kv_learner;

extern const kv_learner kv_learner_kvpop, kv_learner_kvpop_mlp, kv_learner_dms;

const kv_learner *kv_learner_at(int i); /* NULL past the end */

/* The optimiser's part of job->plan from the settings that all learners have. */
void kv_train_job_plan(kv_train_job *job);
/* Runs job->plan on an objective and describes the result in the report. */
kv_status kv_train_job_run(kv_train_job *job, const kv_train_objective *objective,
                           kv_train_state *state);
/* Metadata of the weights that say where they come from: key, value, …, NULL; valid while job lives. out [16] */
void kv_train_job_metadata(const kv_train_job *job, const char **out);

#endif
