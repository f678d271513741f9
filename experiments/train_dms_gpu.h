/* The objective of train_dms_loss.h on the GPU: gates, relaxed decisions, attention under the soft mask, gradients and the optimiser's
 * step. What comes back in a step is how many tokens every lane marks and how far every query head is off. */
#ifndef KV_EXPERIMENTS_TRAIN_DMS_GPU_H
#define KV_EXPERIMENTS_TRAIN_DMS_GPU_H

#include "experiments/train_dms_loss.h"

typedef struct kv_train_dms_gpu kv_train_dms_gpu;

/* set (loaded) and options must outlive the objective. KV_E_UNAVAILABLE without a GPU. */
kv_status kv_train_dms_gpu_open(const kv_train_set *set, const kv_train_dms_options *options,
                                kv_train_dms_gpu **out);
void kv_train_dms_gpu_close(kv_train_dms_gpu *o); /* NULL is legal */
kv_train_objective kv_train_dms_gpu_objective(kv_train_dms_gpu *o);
/* kv_train_dms_logits; replaces the parameters on the device. */
kv_status kv_train_dms_gpu_logits(kv_train_dms_gpu *o, const float *param, int32_t trace,
                                  float *out);

#endif
