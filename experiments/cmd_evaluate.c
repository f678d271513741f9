/* kvlab evaluate: model x policies x budgets. */
#include "experiments/cli.h"
#include "experiments/job.h"

kv_status kv_cmd_evaluate(int argc, char **argv) {
    kv_config config = {0};
    kv_status st = kv_job_options(KV_JOB_EVALUATE, argc, argv, &config);
    if (st == KV_OK) st = kv_job_run(KV_JOB_EVALUATE, &config);
    kv_config_free(&config);
    return st;
}
