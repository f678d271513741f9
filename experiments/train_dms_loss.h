/* Training objective of dms without a model (maths.md 7): on a window of a trace, every head's attention output under the soft mask is to
 * match its dense output, while the share of marked tokens is pushed up to the schedule.
 *
 * The published method distils the logits of the whole model, so a head may err where later layers forgive it; here every head answers for
 * itself, which needs only the recorded q, k, v. */
#ifndef KV_EXPERIMENTS_TRAIN_DMS_LOSS_H
#define KV_EXPERIMENTS_TRAIN_DMS_LOSS_H

#include "experiments/train_loop.h"
#include "reference/dms.h"

typedef struct kv_train_dms_options {
    kv_dms_spec spec;
    int32_t window, shift;
    int32_t tokens;        /* longest training window */
    int32_t every;         /* one block of queries in so many is used, another one each time */
    double temp, pressure; /* pressure: weight of the one-sided ratio loss */
    double ratio;          /* compression at the end of the schedule, which takes `ramp` steps */
    int64_t ramp;
    uint64_t seed;
} kv_train_dms_options;

/* The tokens and queries of a step: a window anywhere within one document; documents count by their length. step -1: of the checks,
 * which all look at the same window, so that they compare. */
typedef struct kv_train_dms_window {
    int64_t first;
    int32_t n, from, every; /* blocks of 64 queries from, from + every, … are matched */
    uint32_t step;          /* address of the random draws */
} kv_train_dms_window;
kv_train_dms_window kv_train_dms_choose(const kv_train_dms_options *o, const kv_train_trace *t,
                                        int32_t trace, int64_t step);

typedef struct kv_train_dms kv_train_dms;

kv_status kv_train_dms_open(const kv_train_set *set, const kv_train_dms_options *options,
                            kv_train_dms **out);
void kv_train_dms_close(kv_train_dms *o);
/* Computes on the GPU from here on; before the objective is taken. KV_E_UNAVAILABLE without one. */
kv_status kv_train_dms_use_gpu(kv_train_dms *o);
kv_train_objective kv_train_dms_objective(kv_train_dms *o);

/* Gate logits of a whole trace: out [n_layer * n_kv_head][n_token], parameters [lane][kv_dms_param]. */
kv_status kv_train_dms_logits(kv_train_dms *o, const float *param, int32_t trace, float *out);

#endif
