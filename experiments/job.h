/* `kvlab experiment` and `kvlab evaluate` from their options to their results folder: the same plan and files, one with the metrics of
 * the trace, the other with the model alone. */
#ifndef KV_EXPERIMENTS_JOB_H
#define KV_EXPERIMENTS_JOB_H

#include "experiments/config.h"

typedef enum kv_job { KV_JOB_EXPERIMENT, KV_JOB_EVALUATE } kv_job;

/* Options -> settings (defaults < --config file < options). `config` is initialised here and freed by the caller. */
kv_status kv_job_options(kv_job job, int argc, char **argv, kv_config *config);

/* Opens trace, plan, weights and model; reuses a finished run or makes a new one; prints the table. */
kv_status kv_job_run(kv_job job, const kv_config *config);

#endif
