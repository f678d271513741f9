/* Numeric formats: half and bfloat16 conversion, the order-preserving integer image of a float, exact rounding of priorities. */
#ifndef KV_CORE_NUM_H
#define KV_CORE_NUM_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum kv_dtype { KV_F32, KV_F16, KV_BF16 } kv_dtype;

static inline uint32_t kv_bits(float x) {
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}
static inline float kv_from_bits(uint32_t b) {
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}

/* Maps floats to integers of the same order; -0 and +0 coincide. The argument must not be NaN. */
static inline uint32_t kv_ordered(float x) {
    uint32_t b = kv_bits(x == 0.0f ? 0.0f : x);
    return (b & 0x80000000u) ? ~b : b | 0x80000000u;
}

/* Static priority of a token at position t with score r under the decay log_gamma <= 0 (maths.md 3.3): rounded to fp32 once. */
static inline float kv_static_priority(double r, int32_t t, double log_gamma) {
    return (float)fma(-(double)t, log_gamma, (double)(float)r);
}

static inline float kv_bf16_to_f32(uint16_t h) { return kv_from_bits((uint32_t)h << 16); }
uint16_t kv_f32_to_bf16(float x); /* round to nearest even, NaN stays NaN */
float kv_f16_to_f32(uint16_t h);
uint16_t kv_f32_to_f16(float x); /* round to nearest even, overflow to infinity */

size_t kv_dtype_size(kv_dtype type);
const char *kv_dtype_name(kv_dtype type); /* "f32", "f16", "bf16" */

/* Bulk forms (F16C where the CPU has it). src holds n elements of `type`. */
void kv_widen(kv_dtype type, const void *src, float *dst, size_t n);
void kv_narrow(kv_dtype type, const float *src, void *dst, size_t n);

#endif
