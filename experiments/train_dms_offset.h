/* The last step of training dms: the offset of all gate logits at which the mean cache on the training traces is the budget. */
#ifndef KV_EXPERIMENTS_TRAIN_DMS_OFFSET_H
#define KV_EXPERIMENTS_TRAIN_DMS_OFFSET_H

#include "experiments/train.h"
#include "experiments/train_dms_loss.h"

/* Mean caches with the offset: over heads and the queries u >= B (contract.md 3). held_out: NAN without such a trace. */
typedef struct kv_train_dms_fit {
    double offset, kept, held_out;
} kv_train_dms_fit;

/* For the parameters param [lane][kv_dms_param], on the device of `loss`. KV_E_DATA when no offset comes within 1 % of the budget. */
kv_status kv_train_dms_fit_offset(const kv_train_job *job, kv_train_dms *loss, const float *param,
                                  int32_t shift, kv_train_dms_fit *out);

#endif
