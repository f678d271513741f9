/* AdamW with decoupled weight decay (Loshchilov, Hutter 2019), and the schedule of the learning rate. */
#ifndef KV_ADAMW_H
#define KV_ADAMW_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kv_adamw {
    double rate, beta1, beta2, eps, weight_decay;
} kv_adamw;

/* Step number `step` (from 1) on n parameters: param, first and second moment are updated from `scale` times the gradient. */
void kv_adamw_step(const kv_adamw *o, int64_t step, int64_t n, const float *grad, double scale,
                   float *param, float *moment1, float *moment2);

/* Factor of the learning rate at step i of n (from 0): linear over `warmup` steps, times a cosine from 1 to 0.02. */
double kv_rate_factor(int64_t i, int64_t n, int64_t warmup);

/* Factor by which a gradient of this norm is scaled to keep it within `limit`; limit 0: 1. */
double kv_clip_factor(double norm, double limit);

double kv_sum_of_squares(int64_t n, const float *x);

#ifdef __cplusplus
}
#endif

#endif
