/* Body of one build of the attention kernels (attention_kernel.h). The includer's compiler flags choose the vectors (simd.h) and it
 * defines KERNEL, the name of the table. */
#include "reference/attention_kernel.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "reference/simd.h"

/* 6 x 2 vectors of 8 fill 16 registers (AVX2), 6 x 4 vectors of 16 fill 32 (AVX-512). */
enum { WIDTH = KV_VF == 16 ? 4 : 2, TILE = WIDTH * KV_VF, ROWS = KV_TILE_ROWS };

/* 2^x for x <= 127, exactly 1 at 0, 0 for x <= -127 (and for -infinity), some denormal between -127 and -126, which counts as 0
 * by the time it is a probability. Degree-5 minimax fit on [-1/2, 1/2] with constant term 1: relative error below 1.7e-7. */
static inline kv_vf exp2_clamped(kv_vf x) {
    const kv_vf magic = kv_vf_set(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = kv_vf_max(x, kv_vf_set(-127.0f));
    kv_vf t = kv_vf_add(x, magic);
    kv_vf f = kv_vf_sub(x, kv_vf_sub(t, magic));
    kv_vf p = kv_vf_set(1.326472848e-03f);
    p = kv_vf_fma(p, f, kv_vf_set(9.671513923e-03f));
    p = kv_vf_fma(p, f, kv_vf_set(5.550733581e-02f));
    p = kv_vf_fma(p, f, kv_vf_set(2.402224243e-01f));
    p = kv_vf_fma(p, f, kv_vf_set(6.931470037e-01f));
    p = kv_vf_fma(p, f, kv_vf_set(1.0f));
    return kv_vf_scale(p, t);
}

/* acc = sum over n steps of a (KV_TILE_ROWS numbers, row_step apart) times b (TILE numbers). */
static inline __attribute__((always_inline)) void tile(const float *a, ptrdiff_t row_step,
                                                       ptrdiff_t step, const float *b, int32_t n,
                                                       kv_vf acc[ROWS][WIDTH]) {
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < WIDTH; j++) acc[r][j] = kv_vf_set(0.0f);
    for (int32_t i = 0; i < n; i++, a += step, b += TILE) {
        kv_vf v[WIDTH];
        for (int j = 0; j < WIDTH; j++) v[j] = kv_vf_load(b + j * KV_VF);
        for (int r = 0; r < ROWS; r++) {
            kv_vf x = kv_vf_set(a[r * row_step]);
            for (int j = 0; j < WIDTH; j++) acc[r][j] = kv_vf_fma(x, v[j], acc[r][j]);
        }
    }
}

static void logits(const float *queries, const float *keys, int32_t head_dim, int32_t n_tile,
                   int32_t n_key, float factor, float *l, float *row_max) {
    const kv_vf f = kv_vf_set(factor);
    float max[KV_PANEL_ROWS][KV_VF] __attribute__((aligned(64)));
    for (int32_t r = 0; r < n_tile * ROWS; r++) kv_vf_store(max[r], kv_vf_set(-INFINITY));
    for (int32_t key = 0; key < n_key; key += TILE, keys += (ptrdiff_t)head_dim * TILE)
        for (int32_t i = 0; i < n_tile; i++) {
            kv_vf acc[ROWS][WIDTH];
            tile(queries + (ptrdiff_t)i * head_dim * ROWS, 1, ROWS, keys, head_dim, acc);
            float *out = l + (ptrdiff_t)i * ROWS * KV_CHUNK_KEYS + key;
            for (int r = 0; r < ROWS; r++) {
                kv_vf m = kv_vf_load(max[i * ROWS + r]);
                for (int j = 0; j < WIDTH; j++) {
                    const kv_vf x = kv_vf_mul(f, acc[r][j]);
                    m = kv_vf_max(m, x);
                    kv_vf_store(out + r * KV_CHUNK_KEYS + j * KV_VF, x);
                }
                kv_vf_store(max[i * ROWS + r], m);
            }
        }
    for (int32_t r = 0; r < n_tile * ROWS; r++) row_max[r] = kv_vf_reduce_max(kv_vf_load(max[r]));
}

static float cap(float *l, int32_t n_key, float factor) {
    kv_vf max = kv_vf_set(-INFINITY);
    for (int32_t j = 0; j < kv_round_up(n_key, KV_VF); j += KV_VF) {
        kv_vf x = kv_vf_mul(kv_vf_set(factor), kv_vf_tanh(kv_vf_load(l + j)));
        kv_vf_store(l + j, x);
        max = kv_vf_max(max, x);
    }
    return kv_vf_reduce_max(max);
}

static float hide(float *l, const int32_t *birth, const int32_t *death, int32_t u, int32_t n_key) {
    const int32_t n = kv_round_up(n_key, TILE);
    if (death)
        for (int32_t j = 0; j < n; j++)
            l[j] = ((birth[j] <= u) & (death[j] > u)) ? l[j] : -INFINITY;
    else
        for (int32_t j = 0; j < n; j++) l[j] = birth[j] <= u ? l[j] : -INFINITY;
    kv_vf max = kv_vf_set(-INFINITY);
    for (int32_t j = 0; j < n; j += KV_VF) max = kv_vf_max(max, kv_vf_load(l + j));
    return kv_vf_reduce_max(max);
}

static void exponentials(const float *l, const float *max, int32_t n_row, int32_t n_key, float *e,
                         float *sum) {
    for (int32_t r = 0; r < n_row; r++, l += KV_CHUNK_KEYS, e += KV_CHUNK_KEYS) {
        const kv_vf m = kv_vf_set(max[r]);
        kv_vf part[WIDTH];
        for (int i = 0; i < WIDTH; i++) part[i] = kv_vf_set(0.0f);
        for (int32_t j = 0; j < n_key; j += TILE)
            for (int i = 0; i < WIDTH; i++) {
                kv_vf x = exp2_clamped(kv_vf_sub(kv_vf_load(l + j + i * KV_VF), m));
                kv_vf_store(e + j + i * KV_VF, x);
                part[i] = kv_vf_add(part[i], x);
            }
        for (int i = 1; i < WIDTH; i++) part[0] = kv_vf_add(part[0], part[i]);
        sum[r] = (float)kv_vd_reduce_add(kv_vd_add(kv_vd_low(part[0]), kv_vd_high(part[0])));
    }
}

static float sum_range(const float *e, const int32_t *birth, int32_t lo, int32_t hi,
                       int32_t n_key) {
    const int32_t n = kv_round_up(n_key, TILE);
    float inside[KV_CHUNK_KEYS] __attribute__((aligned(64)));
    for (int32_t j = 0; j < n; j++) inside[j] = ((birth[j] >= lo) & (birth[j] <= hi)) ? e[j] : 0.0f;
    kv_vf sum = kv_vf_set(0.0f);
    for (int32_t j = 0; j < n; j += KV_VF) sum = kv_vf_add(sum, kv_vf_load(inside + j));
    return (float)kv_vd_reduce_add(kv_vd_add(kv_vd_low(sum), kv_vd_high(sum)));
}

static int32_t find_top(const float *l, const int32_t *birth, int32_t lo, int32_t hi, int32_t n_key,
                        float *top) {
    const int32_t n = kv_round_up(n_key, TILE);
    float inside[KV_CHUNK_KEYS] __attribute__((aligned(64)));
    for (int32_t j = 0; j < n; j++)
        inside[j] = ((birth[j] >= lo) & (birth[j] <= hi)) ? l[j] : -INFINITY;
    kv_vf max = kv_vf_set(-INFINITY);
    for (int32_t j = 0; j < n; j += KV_VF) max = kv_vf_max(max, kv_vf_load(inside + j));
    const float found = kv_vf_reduce_max(max);
    if (!(found > *top)) return -1;
    *top = found;
    int32_t j = 0;
    while (inside[j] != found) j++;
    return birth[j];
}

static void values(const float *e, const float *v, int32_t n_tile, int32_t n_key, int32_t n_slice,
                   const float *rescale, float *o) {
    const ptrdiff_t width = (ptrdiff_t)n_slice * TILE;
    for (int32_t s = 0; s < n_slice; s++, v += (ptrdiff_t)KV_CHUNK_KEYS * TILE)
        for (int32_t i = 0; i < n_tile; i++) {
            kv_vf acc[ROWS][WIDTH];
            tile(e + (ptrdiff_t)i * ROWS * KV_CHUNK_KEYS, KV_CHUNK_KEYS, 1, v, n_key, acc);
            for (int r = 0; r < ROWS; r++) {
                float *out = o + (i * ROWS + r) * width + s * TILE;
                const kv_vf f = kv_vf_set(rescale[i * ROWS + r]);
                for (int j = 0; j < WIDTH; j++)
                    kv_vf_store(out + j * KV_VF,
                                kv_vf_fma(kv_vf_load(out + j * KV_VF), f, acc[r][j]));
            }
        }
}

static inline kv_vf probability(const float *e, float weight) {
    const kv_vf p = kv_vf_mul(kv_vf_load(e), kv_vf_set(weight));
#if KV_HARDWARE_FLUSH
    return p;
#else
    return kv_vf_if_ge(p, kv_vf_set(0x1p-126f), p, kv_vf_set(0.0f));
#endif
}

static inline void add_wide(double *column, kv_vf x, double factor) {
    const kv_vd f = kv_vd_set(factor);
    double *high = column + KV_VF / 2;
    kv_vd_store(column, kv_vd_add(kv_vd_load(column), kv_vd_mul(kv_vd_low(x), f)));
    kv_vd_store(high, kv_vd_add(kv_vd_load(high), kv_vd_mul(kv_vd_high(x), f)));
}

static void add_p(const float *e, const float *weight, int32_t n_row, int32_t n_key,
                  double *column) {
    for (int32_t j = 0; j < n_key; j += KV_VF) {
        kv_vf sum = kv_vf_set(0.0f);
        for (int32_t r = 0; r < n_row; r++)
            sum = kv_vf_add(sum, probability(e + r * KV_CHUNK_KEYS + j, weight[r]));
        add_wide(column + j, sum, 1.0);
    }
}

/* p^2 of a p near 2^-126 is far below fp32: squares of 2^60 p stay in range for every p >= 2^-123 and for sums of a panel. */
static void add_p2(const float *e, const float *weight, int32_t n_row, int32_t n_key,
                   double *column) {
    for (int32_t j = 0; j < n_key; j += KV_VF) {
        kv_vf sum = kv_vf_set(0.0f);
        for (int32_t r = 0; r < n_row; r++) {
            kv_vf p =
                kv_vf_mul(probability(e + r * KV_CHUNK_KEYS + j, weight[r]), kv_vf_set(0x1p60f));
            sum = kv_vf_fma(p, p, sum);
        }
        add_wide(column + j, sum, 0x1p-120);
    }
}

static void max_p(const float *e, const float *weight, int32_t n_row, int32_t n_key,
                  double *column) {
    for (int32_t j = 0; j < n_key; j += KV_VF) {
        kv_vf max = kv_vf_set(0.0f);
        for (int32_t r = 0; r < n_row; r++)
            max = kv_vf_max(max, probability(e + r * KV_CHUNK_KEYS + j, weight[r]));
        double *high = column + j + KV_VF / 2;
        kv_vd_store(column + j, kv_vd_max(kv_vd_load(column + j), kv_vd_low(max)));
        kv_vd_store(high, kv_vd_max(kv_vd_load(high), kv_vd_high(max)));
    }
}

/* 2^(power x) = small * large^8 with small in [2^-4.5, 2^4.5] and large a power of two: fp32 holds both, double their product.
 * The product power * x keeps its rounding error. Clamped below at 2^-1008; infinite from 2^1024 on. */
static inline kv_vf split_power(kv_vf x, float power, kv_vf *large) {
    const kv_vf magic = kv_vf_set(12582912.0f), a = kv_vf_set(power);
    kv_vf y = kv_vf_mul(x, a);
    kv_vf rest = kv_vf_fma(x, a, kv_vf_sub(kv_vf_set(0.0f), y));
    y = kv_vf_min(kv_vf_max(y, kv_vf_set(-1008.0f)), kv_vf_set(1027.0f));
    kv_vf t = kv_vf_fma(y, kv_vf_set(0.125f), magic);
    *large = kv_vf_scale(kv_vf_set(1.0f), t);
    kv_vf small = kv_vf_fma(kv_vf_sub(t, magic), kv_vf_set(-8.0f), y);
    return exp2_clamped(kv_vf_add(small, rest));
}

static inline kv_vd times_power8(kv_vd small, kv_vd large) {
    large = kv_vd_mul(large, large);
    large = kv_vd_mul(large, large);
    return kv_vd_mul(small, kv_vd_mul(large, large));
}

static void add_power(const float *l, const float *high, const float *low, int32_t n_row,
                      int32_t n_key, double power, double *column) {
    const bool is_max = isinf(power);
    const float factor = is_max ? 1.0f : (float)power;
    for (int32_t j = 0; j < n_key; j += KV_VF, column += KV_VF) {
        kv_vd even = kv_vd_load(column), odd = kv_vd_load(column + KV_VF / 2);
        for (int32_t r = 0; r < n_row; r++) {
            kv_vf x = kv_vf_load(l + r * KV_CHUNK_KEYS + j), large;
            x = kv_vf_sub(kv_vf_sub(x, kv_vf_set(high[r])), kv_vf_set(low[r]));
            kv_vf small = split_power(kv_vf_max(x, kv_vf_set(-127.0f)), factor, &large);
            small = kv_vf_if_ge(x, kv_vf_set(-126.0f), small, kv_vf_set(0.0f));
            kv_vd p = times_power8(kv_vd_low(small), kv_vd_low(large));
            kv_vd q = times_power8(kv_vd_high(small), kv_vd_high(large));
            even = is_max ? kv_vd_max(even, p) : kv_vd_add(even, p);
            odd = is_max ? kv_vd_max(odd, q) : kv_vd_add(odd, q);
        }
        kv_vd_store(column, even);
        kv_vd_store(column + KV_VF / 2, odd);
    }
}

static float rotated_dot(const float *q, const float *k, int32_t half, const float *cosine,
                         const float *sine) {
    kv_vf sum = kv_vf_set(0.0f);
    int32_t c = 0;
    for (; c + KV_VF <= half; c += KV_VF) {
        kv_vf x = kv_vf_load(q + c), y = kv_vf_load(q + c + half);
        kv_vf v = kv_vf_load(k + c), w = kv_vf_load(k + c + half);
        kv_vf even = kv_vf_fma(x, v, kv_vf_mul(y, w));
        kv_vf odd = kv_vf_sub(kv_vf_mul(y, v), kv_vf_mul(x, w));
        sum = kv_vf_fma(kv_vf_load(cosine + c), even, sum);
        sum = kv_vf_fma(kv_vf_load(sine + c), odd, sum);
    }
    float rest = 0;
    for (; c < half; c++)
        rest += cosine[c] * (q[c] * k[c] + q[c + half] * k[c + half]) +
                sine[c] * (q[c + half] * k[c] - q[c] * k[c + half]);
    return (float)kv_vd_reduce_add(kv_vd_add(kv_vd_low(sum), kv_vd_high(sum))) + rest;
}

/* Written like tile(), whose accumulators stay in registers; one loop over all chains is not unrolled and goes through memory. */
static float peak(int64_t n, double *flop) {
    kv_vf acc[ROWS][WIDTH], sum = kv_vf_set(0.0f);
    const kv_vf x = kv_vf_set(0.999f), y = kv_vf_set(1e-3f);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < WIDTH; j++) acc[r][j] = kv_vf_set((float)(r * WIDTH + j));
    for (int64_t k = 0; k < n; k++)
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < WIDTH; j++) acc[r][j] = kv_vf_fma(acc[r][j], x, y);
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < WIDTH; j++) sum = kv_vf_add(sum, acc[r][j]);
    *flop = 2.0 * ROWS * WIDTH * KV_VF * (double)n;
    return kv_vf_reduce_max(sum);
}

const kv_attention_kernel KERNEL = {
    .tile_keys = TILE,
    .logits = logits,
    .cap = cap,
    .hide = hide,
    .exponentials = exponentials,
    .sum_range = sum_range,
    .find_top = find_top,
    .values = values,
    .add_p = add_p,
    .add_p2 = add_p2,
    .max_p = max_p,
    .add_power = add_power,
    .rotated_dot = rotated_dot,
    .peak = peak,
};
