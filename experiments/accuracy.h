/* Accuracy through a model (contract.md 3): the model reads the trace's tokens again, teacher-forced, while a policy decides in every
 * layer on that run's own q, k, v, and attention sees only what the policy keeps. Every document is a run of its own.
 *
 * Use: kv_accuracy_open once per model and trace (it makes the full-cache run), then kv_accuracy_run per policy and budget. */
#ifndef KV_EXPERIMENTS_ACCURACY_H
#define KV_EXPERIMENTS_ACCURACY_H

#include "experiments/recorded.h"
#include "reference/ops.h"

/* Shares over counted tokens (x-1 > S/4) of their kind, S the length of the token's own document; NAN where there is none. */
typedef struct kv_accuracy {
    double recall, result, deterministic; /* tokens right, by `scored` 2, 3, 1 */
    double problem;   /* problems ending in the counted part whose answer digits are all right */
    double agreement; /* same argmax as the full run, scored > 0 */
    double kl;        /* mean KL(full || policy), nats, scored > 0 */
    int64_t n_recall, n_result, n_deterministic, n_problem, n_scored;
    double seconds;
} kv_accuracy;

typedef struct kv_accuracy_bench kv_accuracy_bench; /* model, tokens and the full run's logits */

/* Makes the full run and keeps the logits of its counted, scored positions: 4 * vocab bytes each. model, trace and ops must outlive
 * the bench. Without `scored` in the trace nothing is run and every accuracy is NAN. KV_E_DATA when tokens lie outside the
 * model's vocabulary. */
kv_status kv_accuracy_open(const kv_model *model, const kv_trace_info *trace, const kv_ops *ops,
                           kv_accuracy_bench **out);
/* The same, with the full run kept in `folder` (cache.h; NULL: not kept). */
kv_status kv_accuracy_open_cached(const kv_model *model, const kv_trace_info *trace,
                                  const kv_ops *ops, const char *folder, kv_accuracy_bench **out);
void kv_accuracy_close(kv_accuracy_bench *bench); /* NULL is legal */

/* Whether the trace holds every layer of the model: rows that read the recording decide nowhere else. */
bool kv_accuracy_covers_model(const kv_accuracy_bench *bench);

/* One policy at one budget; NULL is the full run. `recorded`: of a row that reads the recording. All NAN where accuracy has no meaning:
 * bounds without a cache (oracle_step), and rows that read the recording when it is not given or does not cover the model. */
kv_status kv_accuracy_run(kv_accuracy_bench *bench, const kv_row *row, const kv_recorded *recorded,
                          kv_accuracy *out);

#endif
