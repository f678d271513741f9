/* The training loop that scorers and gates share: minibatches, AdamW, clipping, checkpoints, early stop, progress.
 *
 * Parameters lie lane by lane (lane = layer * n_kv_head + head). Results do not depend on the number of threads; an interrupted run
 * continues from its checkpoint as if it had never stopped. */
#ifndef KV_EXPERIMENTS_TRAIN_LOOP_H
#define KV_EXPERIMENTS_TRAIN_LOOP_H

#include "experiments/train_set.h"
#include "reference/adamw.h"

typedef struct kv_train_state {
    int32_t n_lane;
    int64_t n_param;                  /* of one lane */
    float *param, *grad, *m1, *m2;    /* [n_lane][n_param] */
    float *theta, *d_theta, *t1, *t2; /* [n_lane] decay; NULL without */
    float *best_param, *best_theta;   /* of the best check so far, when checks are made */
    double best;                      /* its loss; INFINITY before the first */
    int64_t best_step, step;          /* steps done */
} kv_train_state;

typedef struct kv_train_figures { /* of one minibatch, means over lanes */
    /* right, keep: share of decisions; NAN where the objective has none */
    double loss, right, keep;
} kv_train_figures;

typedef struct kv_train_objective {
    void *context;
    /* Loss on trace `trace` at step `step`; gradients into state->grad and state->d_theta when `train`. */
    kv_status (*evaluate)(void *context, kv_train_state *state, int32_t trace, int64_t step,
                          bool train, kv_train_figures *out);
    /* All three for an objective that keeps param, grad, m1 and m2 itself, on a device; NULL: the state's are used. load takes them
     * from the state before the first step, fetch copies them back, update makes the step numbered `step` (from 1) with the given
     * rate and tells the sum of the gradient's squares; unless that is finite, it changes nothing. */
    kv_status (*load)(void *context, const kv_train_state *state);
    kv_status (*fetch)(void *context, kv_train_state *state);
    kv_status (*update)(void *context, const kv_adamw *group, int64_t step, double clip,
                        double *sum);
} kv_train_objective;

typedef struct kv_train_plan {
    int64_t steps, warmup;
    kv_adamw scorer, theta; /* rate before the schedule; rate 0 freezes the group */
    double clip;            /* largest norm of each group's gradient; 0: none */
    uint64_t seed;
    int32_t n_trace;  /* traces to learn from: one per step, a fresh order in every epoch */
    int32_t held_out; /* index of the trace that checks are made on, -1: none */
    /* steps between checks; checks without a better loss before the end, 0: never */
    int64_t check, patience;
    const char *checkpoint; /* path */
    char identity[33];      /* of everything that decides the numbers */
    bool force;             /* start over, whatever the checkpoint says */
} kv_train_plan;

kv_status kv_train_state_open(int32_t n_lane, int64_t n_param, bool theta, bool best,
                              kv_train_state *out);
void kv_train_state_free(kv_train_state *s);

/* Trains `state` (fresh, or overwritten from the checkpoint). *last: running mean of the figures over the last steps. KV_E_DATA when the
 * loss is no number; KV_E_INTERRUPTED after the checkpoint was written. With checks, the best parameters are put back at the end. */
kv_status kv_train_run(const kv_train_plan *plan, const kv_train_objective *objective,
                       kv_train_state *state, kv_train_figures *last);

/* Checkpoints (train_checkpoint.c): whole, by rename. */
kv_status kv_train_save(const kv_train_plan *plan, const kv_train_state *state);
/* KV_OK with *found = false when there is none; KV_E_USAGE when it belongs to other settings. */
kv_status kv_train_restore(const kv_train_plan *plan, kv_train_state *state, bool *found);

#endif
