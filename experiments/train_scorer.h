/* Training objective of kvpop_mlp and kvpop: the boundary loss of every lane on one trace (maths.md 4-6). */
#ifndef KV_EXPERIMENTS_TRAIN_SCORER_H
#define KV_EXPERIMENTS_TRAIN_SCORER_H

#include "experiments/train_loop.h"
#include "reference/loss_boundary.h"
#include "reference/scorer_net.h"

typedef struct kv_train_scorer kv_train_scorer;

/* set and run must outlive the objective. KV_E_USAGE when a trace is too short to give a decision at this budget. */
kv_status kv_train_scorer_open(const kv_train_set *set, const kv_run *run, const kv_net_spec *spec,
                               const kv_loss_options *loss, kv_train_scorer **out);
void kv_train_scorer_close(kv_train_scorer *o);
/* Computes on the GPU from here on; after the traces are loaded, before the objective is taken. KV_E_UNAVAILABLE without one. */
kv_status kv_train_scorer_use_gpu(kv_train_scorer *o);
kv_train_objective kv_train_scorer_objective(kv_train_scorer *o);

#endif
