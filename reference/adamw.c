/* AdamW. Moments are stored in fp32, the update is formed in double. */
#include "reference/adamw.h"

#include <math.h>

void kv_adamw_step(const kv_adamw *o, int64_t step, int64_t n, const float *grad, double scale,
                   float *param, float *moment1, float *moment2) {
    double correct1 = 1 - pow(o->beta1, (double)step), correct2 = 1 - pow(o->beta2, (double)step);
    for (int64_t i = 0; i < n; i++) {
        double g = scale * grad[i];
        double m = o->beta1 * moment1[i] + (1 - o->beta1) * g;
        double v = o->beta2 * moment2[i] + (1 - o->beta2) * g * g;
        double move = (m / correct1) / (sqrt(v / correct2) + o->eps) + o->weight_decay * param[i];
        moment1[i] = (float)m;
        moment2[i] = (float)v;
        param[i] = (float)(param[i] - o->rate * move);
    }
}

double kv_rate_factor(int64_t i, int64_t n, int64_t warmup) {
    double warm = warmup > 0 ? fmin(1, (double)(i + 1) / (double)warmup) : 1;
    return warm * (0.02 + 0.98 * 0.5 * (1 + cos(M_PI * (double)i / (double)n)));
}

double kv_clip_factor(double norm, double limit) {
    return limit > 0 && norm > limit ? limit / norm : 1;
}

double kv_sum_of_squares(int64_t n, const float *x) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}
