/* Half and bfloat16 conversion, scalar and in bulk. */
#include "reference/core/num.h"

#include "reference/core/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

uint16_t kv_f32_to_bf16(float x) {
    uint32_t b = kv_bits(x);
    if ((b & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((b >> 16) | 0x40u);
    return (uint16_t)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

float kv_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u,
             mantissa = h & 0x3ffu;
    if (exponent == 31) return kv_from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return kv_from_bits(sign | (exponent + 112u) << 23 | mantissa << 13);
    float tiny = (float)mantissa * 0x1p-24f;
    return sign ? -tiny : tiny;
}

uint16_t kv_f32_to_f16(float x) {
    uint32_t b = kv_bits(x), sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
    if (a >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
    if (a <
        0x38800000u) { /* subnormal half: adding 0.5 leaves the rounded mantissa in the low bits */
        float shifted = kv_from_bits(a) + 0.5f;
        return (uint16_t)(sign | (kv_bits(shifted) - 0x3f000000u));
    }
    uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

size_t kv_dtype_size(kv_dtype type) { return type == KV_F32 ? 4 : 2; }

const char *kv_dtype_name(kv_dtype type) {
    static const char *const name[] = {"f32", "f16", "bf16"};
    return name[type];
}

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) static size_t widen_f16c(const uint16_t *src, float *dst,
                                                             size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(
            dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(src + i))));
    return i;
}

__attribute__((target("avx,f16c"))) static size_t narrow_f16c(const float *src, uint16_t *dst,
                                                              size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(dst + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}
#endif

void kv_widen(kv_dtype type, const void *src, float *dst, size_t n) {
    size_t i = 0;
    if (type == KV_F32) {
        memcpy(dst, src, n * sizeof *dst);
        return;
    }
    const uint16_t *h = src;
    if (type == KV_BF16) {
        for (; i < n; i++) dst[i] = kv_bf16_to_f32(h[i]);
        return;
    }
#if defined(__x86_64__)
    if (kv_cpu_isa() != KV_ISA_GENERIC) i = widen_f16c(h, dst, n);
#endif
    for (; i < n; i++) dst[i] = kv_f16_to_f32(h[i]);
}

void kv_narrow(kv_dtype type, const float *src, void *dst, size_t n) {
    size_t i = 0;
    if (type == KV_F32) {
        memcpy(dst, src, n * sizeof *src);
        return;
    }
    uint16_t *h = dst;
    if (type == KV_BF16) {
        for (; i < n; i++) h[i] = kv_f32_to_bf16(src[i]);
        return;
    }
#if defined(__x86_64__)
    if (kv_cpu_isa() != KV_ISA_GENERIC) i = narrow_f16c(src, h, n);
#endif
    for (; i < n; i++) h[i] = kv_f32_to_f16(src[i]);
}
