/* Body of the closed-loop kernels; the including file defines KV_LOOP_TABLE, the name of the table it provides. */
#include "reference/closed_loop.h"

#include <math.h>

#include "reference/simd.h"

enum { PANEL = 2 * KV_VF };

/* 6 queries x 2 vectors of slots: 12 accumulators hide the latency of the multiply-add. */
static void tile(const float *q, const float *panel, int32_t head_dim, float scale, float *out,
                 size_t ld) {
    kv_vf a[KV_LOOP_STEP][2];
    for (int i = 0; i < KV_LOOP_STEP; i++) a[i][0] = a[i][1] = kv_vf_set(0);
    for (int32_t c = 0; c < head_dim; c++) {
        kv_vf k0 = kv_vf_load(panel + (size_t)c * PANEL),
              k1 = kv_vf_load(panel + (size_t)c * PANEL + KV_VF);
        for (int i = 0; i < KV_LOOP_STEP; i++) {
            kv_vf x = kv_vf_set(q[(size_t)i * (size_t)head_dim + (size_t)c]);
            a[i][0] = kv_vf_fma(x, k0, a[i][0]);
            a[i][1] = kv_vf_fma(x, k1, a[i][1]);
        }
    }
    for (int i = 0; i < KV_LOOP_STEP; i++)
        for (int j = 0; j < 2; j++)
            kv_vf_store(out + (size_t)i * ld + j * KV_VF, kv_vf_mul(a[i][j], kv_vf_set(scale)));
}

static void logits(const float *q, const float *panels, int32_t n_tile, int32_t n_panel,
                   int32_t head_dim, float scale, float *out, size_t ld) {
    const size_t q_tile = KV_LOOP_STEP * (size_t)head_dim, k_panel = PANEL * (size_t)head_dim;
    for (int32_t p = 0; p < n_panel; p++)
        for (int32_t i = 0; i < n_tile; i++)
            tile(q + (size_t)i * q_tile, panels + (size_t)p * k_panel, head_dim, scale,
                 out + (size_t)i * KV_LOOP_STEP * ld + (size_t)p * PANEL, ld);
}

static void softcap(float *x, int32_t n, float cap) {
    for (int32_t i = 0; i < n; i += KV_VF) {
        kv_vf t = kv_vf_tanh(kv_vf_div(kv_vf_load(x + i), kv_vf_set(cap)));
        kv_vf_store(x + i, kv_vf_mul(kv_vf_set(cap), t));
    }
}

static float maximum(const float *x, int32_t n) {
    kv_vf m = kv_vf_set(-INFINITY);
    for (int32_t i = 0; i < n; i += KV_VF) m = kv_vf_max(m, kv_vf_load(x + i));
    return kv_vf_reduce_max(m);
}

static void exponential(float *x, int32_t n, float shift) {
    const kv_vf s = kv_vf_set(shift);
    for (int32_t i = 0; i < n; i += PANEL) {
        kv_vf x0 = kv_vf_load(x + i), x1 = kv_vf_load(x + i + KV_VF);
        kv_vf_store(x + i, kv_vf_exp(kv_vf_sub(x0, s)));
        kv_vf_store(x + i + KV_VF, kv_vf_exp(kv_vf_sub(x1, s)));
    }
}

static double sum(const float *x, int32_t n) {
    kv_vd s0 = kv_vd_set(0), s1 = s0, s2 = s0, s3 = s0;
    for (int32_t i = 0; i < n; i += PANEL) {
        kv_vf v0 = kv_vf_load(x + i), v1 = kv_vf_load(x + i + KV_VF);
        s0 = kv_vd_add(s0, kv_vd_low(v0));
        s1 = kv_vd_add(s1, kv_vd_high(v0));
        s2 = kv_vd_add(s2, kv_vd_low(v1));
        s3 = kv_vd_add(s3, kv_vd_high(v1));
    }
    return kv_vd_reduce_add(kv_vd_add(kv_vd_add(s0, s1), kv_vd_add(s2, s3)));
}

static double update(const kv_loop_update *u) {
    const kv_vd factor = kv_vd_set(u->factor), decay = kv_vd_set(u->decay);
    double least = INFINITY;
    for (int32_t i = 0; i < u->n; i += KV_VF) {
        kv_vd low = kv_vd_set(0), high = low;
        for (int32_t r = 0; r < u->n_row; r++) {
            kv_vf e = kv_vf_load(u->e[r] + i);
            e = kv_vf_if_ge(e, kv_vf_set(u->tiny[r]), e, kv_vf_set(0));
            const kv_vd scale = kv_vd_set(u->inverse[r]);
            kv_vd p0 = kv_vd_mul(kv_vd_low(e), scale), p1 = kv_vd_mul(kv_vd_high(e), scale);
            low = u->use_max ? kv_vd_max(low, p0) : kv_vd_add(low, p0);
            high = u->use_max ? kv_vd_max(high, p1) : kv_vd_add(high, p1);
        }
        double *a = u->a + i;
        kv_vd a0 = kv_vd_mul(decay, kv_vd_load(a)),
              a1 = kv_vd_mul(decay, kv_vd_load(a + KV_VF / 2));
        kv_vd_store(a, kv_vd_add(a0, kv_vd_mul(factor, low)));
        kv_vd_store(a + KV_VF / 2, kv_vd_add(a1, kv_vd_mul(factor, high)));
        for (int j = 0; j < KV_VF; j++)
            if (u->time[i + j] <= u->limit && a[j] < least) least = a[j];
    }
    return least;
}

const kv_loop_kernel KV_LOOP_TABLE = {
    PANEL, logits, softcap, maximum, exponential, sum, update,
};
