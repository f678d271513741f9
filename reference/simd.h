/* One vector vocabulary for three instruction sets, chosen by the flags of the including file (*_avx512.c, *_avx2.c, any other),
 * so that a kernel is written once and compiled three times.
 *
 * kv_vf: KV_VF floats; kv_vd: KV_VF / 2 doubles. exp follows the Cephes scheme (round to n*log 2, degree-5 polynomial, within
 * 1.5 ulp), with results below 2^-126 flushed to 0 (contract.md 3) so that no denormal ever appears. */
#ifndef KV_SIMD_H
#define KV_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include <immintrin.h>
enum { KV_VF = 16 };
typedef __m512 kv_vf;
typedef __m512d kv_vd;
static inline kv_vf kv_vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void kv_vf_store(float *p, kv_vf v) { _mm512_storeu_ps(p, v); }
static inline kv_vf kv_vf_set(float x) { return _mm512_set1_ps(x); }
static inline kv_vf kv_vf_add(kv_vf a, kv_vf b) { return _mm512_add_ps(a, b); }
static inline kv_vf kv_vf_sub(kv_vf a, kv_vf b) { return _mm512_sub_ps(a, b); }
static inline kv_vf kv_vf_mul(kv_vf a, kv_vf b) { return _mm512_mul_ps(a, b); }
static inline kv_vf kv_vf_div(kv_vf a, kv_vf b) { return _mm512_div_ps(a, b); }
static inline kv_vf kv_vf_max(kv_vf a, kv_vf b) { return _mm512_max_ps(a, b); }
static inline kv_vf kv_vf_min(kv_vf a, kv_vf b) { return _mm512_min_ps(a, b); }
static inline kv_vf kv_vf_fma(kv_vf a, kv_vf b, kv_vf c) { return _mm512_fmadd_ps(a, b, c); }
/* a >= b ? x : y */
static inline kv_vf kv_vf_if_ge(kv_vf a, kv_vf b, kv_vf x, kv_vf y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), y, x);
}
static inline kv_vf kv_vf_and(kv_vf a, kv_vf b) { return _mm512_and_ps(a, b); }
static inline kv_vf kv_vf_or(kv_vf a, kv_vf b) { return _mm512_or_ps(a, b); }
/* p * 2^n where the low bits of t hold n */
static inline kv_vf kv_vf_scale(kv_vf p, kv_vf t) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}
static inline kv_vd kv_vd_load(const double *p) { return _mm512_loadu_pd(p); }
static inline void kv_vd_store(double *p, kv_vd v) { _mm512_storeu_pd(p, v); }
static inline kv_vd kv_vd_set(double x) { return _mm512_set1_pd(x); }
static inline kv_vd kv_vd_add(kv_vd a, kv_vd b) { return _mm512_add_pd(a, b); }
static inline kv_vd kv_vd_mul(kv_vd a, kv_vd b) { return _mm512_mul_pd(a, b); }
static inline kv_vd kv_vd_max(kv_vd a, kv_vd b) { return _mm512_max_pd(a, b); }
static inline kv_vd kv_vd_low(kv_vf v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
static inline kv_vd kv_vd_high(kv_vf v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }

#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
enum { KV_VF = 8 };
typedef __m256 kv_vf;
typedef __m256d kv_vd;
static inline kv_vf kv_vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void kv_vf_store(float *p, kv_vf v) { _mm256_storeu_ps(p, v); }
static inline kv_vf kv_vf_set(float x) { return _mm256_set1_ps(x); }
static inline kv_vf kv_vf_add(kv_vf a, kv_vf b) { return _mm256_add_ps(a, b); }
static inline kv_vf kv_vf_sub(kv_vf a, kv_vf b) { return _mm256_sub_ps(a, b); }
static inline kv_vf kv_vf_mul(kv_vf a, kv_vf b) { return _mm256_mul_ps(a, b); }
static inline kv_vf kv_vf_div(kv_vf a, kv_vf b) { return _mm256_div_ps(a, b); }
static inline kv_vf kv_vf_max(kv_vf a, kv_vf b) { return _mm256_max_ps(a, b); }
static inline kv_vf kv_vf_min(kv_vf a, kv_vf b) { return _mm256_min_ps(a, b); }
static inline kv_vf kv_vf_fma(kv_vf a, kv_vf b, kv_vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline kv_vf kv_vf_if_ge(kv_vf a, kv_vf b, kv_vf x, kv_vf y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GE_OQ));
}
static inline kv_vf kv_vf_and(kv_vf a, kv_vf b) { return _mm256_and_ps(a, b); }
static inline kv_vf kv_vf_or(kv_vf a, kv_vf b) { return _mm256_or_ps(a, b); }
static inline kv_vf kv_vf_scale(kv_vf p, kv_vf t) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
static inline kv_vd kv_vd_load(const double *p) { return _mm256_loadu_pd(p); }
static inline void kv_vd_store(double *p, kv_vd v) { _mm256_storeu_pd(p, v); }
static inline kv_vd kv_vd_set(double x) { return _mm256_set1_pd(x); }
static inline kv_vd kv_vd_add(kv_vd a, kv_vd b) { return _mm256_add_pd(a, b); }
static inline kv_vd kv_vd_mul(kv_vd a, kv_vd b) { return _mm256_mul_pd(a, b); }
static inline kv_vd kv_vd_max(kv_vd a, kv_vd b) { return _mm256_max_pd(a, b); }
static inline kv_vd kv_vd_low(kv_vf v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
static inline kv_vd kv_vd_high(kv_vf v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }

#else
enum { KV_VF = 4 };
typedef float kv_vf __attribute__((vector_size(16)));
typedef double kv_vd __attribute__((vector_size(16)));
typedef uint32_t kv_vi __attribute__((vector_size(16)));
typedef uint64_t kv_vl __attribute__((vector_size(16)));
static inline kv_vf kv_vf_load(const float *p) {
    kv_vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void kv_vf_store(float *p, kv_vf v) { memcpy(p, &v, sizeof v); }
static inline kv_vf kv_vf_set(float x) { return (kv_vf){x, x, x, x}; }
static inline kv_vf kv_vf_add(kv_vf a, kv_vf b) { return a + b; }
static inline kv_vf kv_vf_sub(kv_vf a, kv_vf b) { return a - b; }
static inline kv_vf kv_vf_mul(kv_vf a, kv_vf b) { return a * b; }
static inline kv_vf kv_vf_div(kv_vf a, kv_vf b) { return a / b; }
static inline kv_vf kv_vf_if_ge(kv_vf a, kv_vf b, kv_vf x, kv_vf y) {
    kv_vi m = (kv_vi)(a >= b);
    return (kv_vf)(((kv_vi)x & m) | ((kv_vi)y & ~m));
}
static inline kv_vf kv_vf_max(kv_vf a, kv_vf b) { return kv_vf_if_ge(a, b, a, b); }
static inline kv_vf kv_vf_min(kv_vf a, kv_vf b) { return kv_vf_if_ge(a, b, b, a); }
static inline kv_vf kv_vf_fma(kv_vf a, kv_vf b, kv_vf c) { return a * b + c; }
static inline kv_vf kv_vf_and(kv_vf a, kv_vf b) { return (kv_vf)((kv_vi)a & (kv_vi)b); }
static inline kv_vf kv_vf_or(kv_vf a, kv_vf b) { return (kv_vf)((kv_vi)a | (kv_vi)b); }
static inline kv_vf kv_vf_scale(kv_vf p, kv_vf t) { return (kv_vf)((kv_vi)p + ((kv_vi)t << 23)); }
static inline kv_vd kv_vd_load(const double *p) {
    kv_vd v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void kv_vd_store(double *p, kv_vd v) { memcpy(p, &v, sizeof v); }
static inline kv_vd kv_vd_set(double x) { return (kv_vd){x, x}; }
static inline kv_vd kv_vd_add(kv_vd a, kv_vd b) { return a + b; }
static inline kv_vd kv_vd_mul(kv_vd a, kv_vd b) { return a * b; }
static inline kv_vd kv_vd_max(kv_vd a, kv_vd b) {
    kv_vl m = (kv_vl)(a >= b);
    return (kv_vd)(((kv_vl)a & m) | ((kv_vl)b & ~m));
}
static inline kv_vd kv_vd_low(kv_vf v) { return (kv_vd){(double)v[0], (double)v[1]}; }
static inline kv_vd kv_vd_high(kv_vf v) { return (kv_vd){(double)v[2], (double)v[3]}; }
#endif

/* Horizontal reductions in a fixed order. */
static inline float kv_vf_reduce_max(kv_vf v) {
    float lane[KV_VF], m;
    kv_vf_store(lane, v);
    m = lane[0];
    for (int i = 1; i < KV_VF; i++) m = lane[i] > m ? lane[i] : m;
    return m;
}
static inline double kv_vd_reduce_add(kv_vd v) {
    double lane[KV_VF / 2], sum = 0;
    kv_vd_store(lane, v);
    for (int i = 0; i < KV_VF / 2; i++) sum += lane[i];
    return sum;
}

/* exp(x) for -inf <= x <= 88; exactly 1 at 0; 0 where exp(x) < 2^-126. */
static inline kv_vf kv_vf_exp(kv_vf x) {
    const kv_vf magic = kv_vf_set(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    kv_vf t = kv_vf_fma(x, kv_vf_set(1.44269504088896341f), magic);
    kv_vf n = kv_vf_sub(t, magic);
    kv_vf r = kv_vf_fma(n, kv_vf_set(-0.693359375f), x);
    r = kv_vf_fma(n, kv_vf_set(2.12194440e-4f), r);
    kv_vf p = kv_vf_set(1.9875691500e-4f);
    p = kv_vf_fma(p, r, kv_vf_set(1.3981999507e-3f));
    p = kv_vf_fma(p, r, kv_vf_set(8.3334519073e-3f));
    p = kv_vf_fma(p, r, kv_vf_set(4.1665795894e-2f));
    p = kv_vf_fma(p, r, kv_vf_set(1.6666665459e-1f));
    p = kv_vf_fma(p, r, kv_vf_set(5.0000001201e-1f));
    p = kv_vf_add(kv_vf_fma(p, kv_vf_mul(r, r), r), kv_vf_set(1.0f));
    /* the largest float whose exp is below 2^-126; x = -inf made a NaN above, a NaN stays one */
    return kv_vf_if_ge(kv_vf_set(-87.336547f), x, kv_vf_set(0.0f), kv_vf_scale(p, t));
}

/* tanh(x), absolute error below 1.2e-7 (Cephes: odd polynomial near 0, exp elsewhere). */
static inline kv_vf kv_vf_tanh(kv_vf x) {
    const kv_vf sign = kv_vf_set(-0.0f), one = kv_vf_set(1.0f);
    kv_vf s = kv_vf_and(x, sign), a = kv_vf_max(x, kv_vf_sub(kv_vf_set(0.0f), x));
    a = kv_vf_min(a, kv_vf_set(10.0f));
    kv_vf e = kv_vf_exp(kv_vf_add(a, a));
    kv_vf far = kv_vf_sub(one, kv_vf_div(kv_vf_set(2.0f), kv_vf_add(e, one)));
    kv_vf z = kv_vf_mul(a, a), p = kv_vf_set(-5.70498872745e-3f);
    p = kv_vf_fma(p, z, kv_vf_set(2.06390887954e-2f));
    p = kv_vf_fma(p, z, kv_vf_set(-5.37397155531e-2f));
    p = kv_vf_fma(p, z, kv_vf_set(1.33314422036e-1f));
    p = kv_vf_fma(p, z, kv_vf_set(-3.33332819422e-1f));
    kv_vf near = kv_vf_fma(kv_vf_mul(p, z), a, a);
    return kv_vf_or(kv_vf_if_ge(a, kv_vf_set(0.625f), far, near), s);
}

#endif
