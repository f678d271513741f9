/* oracle: keeps the tokens that receive most attention after they have left the window. Priority r_t - t*log1p(-oracle_delta),
 * r_t = log(eps + mass of the dense future attention raised to `power`). Source: maths.md 2, 2.6, 3.3; contract.md 2. */
#include "policies/policy.h"

#include <math.h>

#include "reference/core/num.h"
#include "reference/target.h"

static const kv_param params[] = {
    {.name = "power",
     .help = "exponent of each future probability; max: the largest one counts alone",
     .type = KV_PARAM_REAL,
     .default_value = 1,
     .min = 0,
     .max = 16,
     .min_open = 1,
     .choices = "max"},
    {0}};

static kv_status priority(const kv_policy_input *input, float *out) {
    const kv_span *span = input->span;
    double log_gamma = log1p(-input->run->oracle_delta);
    kv_status st =
        kv_target_of(input, kv_params_real(input->params, "power"), input->run->target_mean, out);
    if (st != KV_OK) return st;
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) {
            float *x = &out[h * span->stride + t];
            *x = kv_static_priority((double)*x, t, log_gamma);
        }
    return KV_OK;
}

const kv_policy kv_policy_oracle = {
    .name = "oracle",
    .summary = "the largest future attention mass stays",
    .source = "maths.md 2; contract.md 2",
    .kind = KV_PRIORITY,
    .params = params,
    .non_causal = true,
    .priority = priority,
};
