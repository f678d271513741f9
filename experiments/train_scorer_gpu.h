/* The objective of train_scorer.h on the GPU: networks, pairs, losses, gradients and the optimiser's step. What comes back in a step is
 * the loss of every lane; decays, one number a lane, stay with the state. */
#ifndef KV_EXPERIMENTS_TRAIN_SCORER_GPU_H
#define KV_EXPERIMENTS_TRAIN_SCORER_GPU_H

#include "experiments/train_loop.h"
#include "reference/loss_boundary.h"
#include "reference/scorer_net.h"

typedef struct kv_train_scorer_gpu kv_train_scorer_gpu;

/* set (loaded) and run must outlive the objective. KV_E_UNAVAILABLE without a GPU. */
kv_status kv_train_scorer_gpu_open(const kv_train_set *set, const kv_run *run,
                                   const kv_net_spec *spec, const kv_loss_options *loss,
                                   kv_train_scorer_gpu **out);
void kv_train_scorer_gpu_close(kv_train_scorer_gpu *o); /* NULL is legal */
kv_train_objective kv_train_scorer_gpu_objective(kv_train_scorer_gpu *o);

#endif
