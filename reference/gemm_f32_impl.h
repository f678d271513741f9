/* One fp32 build of the product and the activations (gemm.h) on the vectors of simd.h. The includer defines GEMM_NAME, EXP_NAME,
 * SILU_NAME and the register tile ROWS. */
#include "reference/simd.h"

#define REAL float
#define VEC kv_vf
#define LANES KV_VF
#define LOAD kv_vf_load
#define STORE kv_vf_store
#define SPREAD kv_vf_set
#define FMA kv_vf_fma
#define WIDTH 2
#include "reference/gemm_impl.h"

static inline kv_vf load_some(const float *p, int64_t n) {
    float buffer[KV_VF] = {0};
    if (n >= KV_VF) return kv_vf_load(p);
    memcpy(buffer, p, (size_t)n * sizeof *p);
    return kv_vf_load(buffer);
}

static inline void store_some(float *p, int64_t n, kv_vf v) {
    float buffer[KV_VF];
    if (n >= KV_VF) {
        kv_vf_store(p, v);
        return;
    }
    kv_vf_store(buffer, v);
    memcpy(p, buffer, (size_t)n * sizeof *p);
}

static inline kv_vf bounded_exp(kv_vf x) { return kv_vf_exp(kv_vf_min(x, kv_vf_set(88.0f))); }

void EXP_NAME(int64_t n, const float *x, float *y) {
    for (int64_t i = 0; i < n; i += KV_VF)
        store_some(y + i, n - i, bounded_exp(load_some(x + i, n - i)));
}

void SILU_NAME(int64_t n, const float *z, float *value, float *slope) {
    const kv_vf one = kv_vf_set(1.0f), zero = kv_vf_set(0.0f);
    for (int64_t i = 0; i < n; i += KV_VF) {
        kv_vf x = load_some(z + i, n - i);
        kv_vf s = kv_vf_div(one, kv_vf_add(one, bounded_exp(kv_vf_sub(zero, x))));
        store_some(value + i, n - i, kv_vf_mul(x, s));
        if (!slope) continue;
        kv_vf inner = kv_vf_fma(x, kv_vf_sub(one, s), one);
        store_some(slope + i, n - i, kv_vf_mul(s, inner));
    }
}
