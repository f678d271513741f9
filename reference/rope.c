/* Rotary position embedding: frequencies (plain and Llama 3.1 scaling) and the rotate-half rotation.
 * Sources: Su et al., RoFormer; the llama3 rule as in transformers' modeling_rope_utils.py. */
#include "reference/model.h"

#include <math.h>

/* Long wavelengths are slowed down by `factor`, short ones stay, those between are blended. */
static double llama3_frequency(const kv_model_config *c, double inv_freq) {
    double turns = (double)c->rope_original * inv_freq / (2.0 * M_PI);
    if (turns < c->rope_low) return inv_freq / c->rope_factor;
    if (turns > c->rope_high) return inv_freq;
    double share = (turns - c->rope_low) / (c->rope_high - c->rope_low);
    return (1.0 - share) * inv_freq / c->rope_factor + share * inv_freq;
}

void kv_rope_frequencies(const kv_model_config *config, double *inv_freq) {
    for (int32_t i = 0; i < config->head_dim / 2; i++) {
        inv_freq[i] = pow(config->rope_theta, -2.0 * i / config->head_dim);
        if (config->llama3_scaling) inv_freq[i] = llama3_frequency(config, inv_freq[i]);
    }
}

void kv_rope_table(int32_t n, int32_t head_dim, const int32_t *position, const double *inv_freq,
                   float *table) {
    int32_t half = head_dim / 2;
#pragma omp parallel for schedule(static)
    for (int32_t t = 0; t < n; t++) {
        float *row = table + (size_t)t * (size_t)head_dim;
        for (int32_t c = 0; c < half; c++) {
            double angle = (double)(position ? position[t] : t) * inv_freq[c];
            row[c] = (float)cos(angle);
            row[half + c] = (float)sin(angle);
        }
    }
}

void kv_rope_apply(float *x, int32_t head_dim, const float *table_row) {
    int32_t half = head_dim / 2;
    for (int32_t c = 0; c < half; c++) {
        float a = x[c], b = x[half + c], cosine = table_row[c], sine = table_row[half + c];
        x[c] = a * cosine - b * sine;
        x[half + c] = b * cosine + a * sine;
    }
}

void kv_rope_rotate(float *x, int32_t n, int32_t head_dim, const int32_t *position,
                    const double *inv_freq, int sign) {
    int32_t half = head_dim / 2;
    for (int32_t t = 0; t < n; t++) {
        float *row = x + (size_t)t * (size_t)head_dim;
        for (int32_t c = 0; c < half; c++) {
            double angle = (double)(position ? position[t] : t) * inv_freq[c];
            float a = row[c], b = row[half + c];
            float cosine = (float)cos(angle), sine = (float)(sign < 0 ? -sin(angle) : sin(angle));
            row[c] = a * cosine - b * sine;
            row[half + c] = b * cosine + a * sine;
        }
    }
}
