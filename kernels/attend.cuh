// Attention forward, what its kernels share: arguments, the keys of a block, probabilities and sums of a row. attend.cu says more.
#ifndef KV_KERNELS_ATTEND_CUH
#define KV_KERNELS_ATTEND_CUH

#include <climits>

#include "kernels/device.cuh"
#include "kernels/kept.cuh"
#include "kernels/portable.cuh"
#include "kernels/rows.cuh"

namespace attend {

constexpr float LIFT = 7.0f, SLACK = 8.0f; // binary exponents
// of a thread's sum over a row of a tile: half precision ends at 2^16
constexpr float LIMIT = 0x1p15f;

struct attend_args {
    int n_token, n_q_head, n_kv_head, n_block, head_dim_out, sinks, window;
    float unit, scale, softcap;
    const kept_block *block; // NULL: dense causal
    const int *list, *evict_at;
    float *o, *lse, *lse_long;
    int *next;
};

// The keys of one block: how many, and how many of the first need no mask.
struct key_list {
    const int *list; // NULL: key i is i
    const int *until;
    int count, far, open; // all; inside every E(u); visible to all queries
    __device__ __forceinline__ int key(int i) const {
        return i >= count ? -1 : list ? __ldg(list + i) : i;
    }
    // Whether a tile of keys [from, to) needs a look at each key: hidden ones, or some inside and some outside E.
    __device__ __forceinline__ bool mixed(int from, int to) const {
        return to > open || (from < far && to > far);
    }
    __device__ __forceinline__ int2 limits(int key) const { // visible from, up to but excluding
        return key < 0 ? make_int2(INT_MAX, 0)
                       : make_int2(key, list ? __ldg(until + key) : INT_MAX);
    }
};

__device__ __forceinline__ key_list keys_of(const attend_args &a, int kv, int block) {
    if (!a.block)
        return key_list{nullptr, nullptr, min((block + 1) * KV_BLOCK, a.n_token), 0,
                        block * KV_BLOCK + 1};
    const kept_block b = a.block[(size_t)kv * (size_t)a.n_block + (size_t)block];
    return key_list{a.list + b.first, a.evict_at + (size_t)kv * (size_t)a.n_token,
                    b.far + b.near + b.part, b.far, b.far + b.near};
}

struct attend_row {
    // fade: what sums and output are multiplied with before the next tile joins them
    float shift, fade;
    float near, far;
};

// Hides what rows u and u + 8 do not see; inside[r]: which of its elements lie in E, one bit each. limit: shared memory, [columns].
template <int N>
__device__ __forceinline__ void hide(float (&x)[N], uint32_t (&inside)[2], const int2 *limit, int u,
                                     const attend_args &a) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(limit);
    inside[0] = inside[1] = 0;
#ifdef KV_BREAK_ATTEND
    u++;
#endif
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        int t[2], gone[2];
        // Volatile: the compiler would load all limits ahead and run out of registers.
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(t[0]), "=r"(gone[0]), "=r"(t[1]), "=r"(gone[1])
                     : "r"(at + 64 * j)
                     : "memory");
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = i / 2, c = i % 2, query = u + 8 * r;
            if (t[c] > query || query >= gone[c]) x[4 * j + i] = -INFINITY;
            if (t[c] >= a.sinks && t[c] <= query - a.window) inside[r] |= 1u << (2 * j + c);
        }
    }
}

// Turns logits of row r into probabilities times 2^(exponent - shift) and adds them to the sums. `inside`: as from hide, used when
// the tile is mixed.
template <int N>
__device__ __forceinline__ void weigh(float (&x)[N], attend_row &s, int r, float unit, kv_zone zone,
                                      uint32_t inside) {
    const float top = kv_quad_max(kv_row_max(x, r)) * unit - LIFT;
    s.fade = 1.0f;
    if (__any_sync(~0u, top > s.shift + SLACK)) {
        const float shift = fmaxf(s.shift, top);
        s.fade = kv_exp2(s.shift - shift);
        s.shift = shift;
        s.near *= s.fade;
        s.far *= s.fade;
    }
    float a = 0, b = 0;
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        a += x[4 * j + 2 * r] = kv_exp2(fmaf(x[4 * j + 2 * r], unit, -s.shift));
        b += x[4 * j + 2 * r + 1] = kv_exp2(fmaf(x[4 * j + 2 * r + 1], unit, -s.shift));
    }
    a += b;
    if (zone == KV_FAR)
        s.far += a;
    else
        s.near += a;
    if (zone == KV_MIXED) {
        float in = 0;
#pragma unroll
        for (int j = 0; j < N / 4; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (inside >> (2 * j + c) & 1) in += x[4 * j + 2 * r + c];
        s.far += in;
        s.near -= in;
    }
}

// Probabilities times 2^(exponent - shift), two packed to a word; their sums for both rows of a thread.
template <class T, int N>
__device__ __forceinline__ void pack_terms(const float (&x)[N], uint32_t (&p)[N / 2],
                                           const attend_row (&row)[2], float unit,
                                           float (&sum)[2]) {
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int c = 0; c < N / 2; c++) {
        const int r = c % 2;
        const float a = kv_exp2(fmaf(x[2 * c], unit, -row[r].shift));
        const float b = kv_exp2(fmaf(x[2 * c + 1], unit, -row[r].shift));
        sum[r] += a + b;
        p[c] = portable::pack(a, b, T());
    }
}

// weigh for both rows of a thread, into packed words. The shifts are those of earlier tiles; only when a sum grows beyond LIMIT
// they move to this tile's maxima, and the output o that belongs to them fades.
template <class T, int N, int M>
__device__ __forceinline__ void weigh_packed(const float (&x)[N], uint32_t (&p)[N / 2],
                                             attend_row (&row)[2], float (&o)[M], float unit,
                                             kv_zone zone, const uint32_t (&inside)[2]) {
    float sum[2];
    pack_terms<T>(x, p, row, unit, sum);
    if (__any_sync(~0u, fmaxf(sum[0], sum[1]) >= LIMIT)) {
        float fade[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            attend_row &s = row[r];
            const float shift = fmaxf(s.shift, kv_quad_max(kv_row_max(x, r)) * unit - LIFT);
            fade[r] = kv_exp2(s.shift - shift);
            s.shift = shift;
            s.near *= fade[r];
            s.far *= fade[r];
        }
#pragma unroll
        for (int i = 0; i < M; i++) o[i] *= fade[i / 2 % 2];
        pack_terms<T>(x, p, row, unit, sum);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        attend_row &s = row[r];
        if (zone == KV_FAR)
            s.far += sum[r];
        else
            s.near += sum[r];
        if (zone != KV_MIXED) continue;
        float in = 0;
#pragma unroll
        for (int j = 0; j < N / 4; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (inside[r] >> (2 * j + c) & 1)
                    in += kv_exp2(fmaf(x[4 * j + 2 * r + c], unit, -s.shift));
        s.far += in;
        s.near -= in;
    }
}

// Natural logarithm of sum 2^shift, sum > 0 and not subnormal.
__device__ __forceinline__ float log_of(float shift, float sum) {
    const int bits = __float_as_int(sum);
    const float mantissa = __int_as_float((bits & 0x7fffff) | 0x3f800000);
    return (float)(((double)shift + ((bits >> 23) - 127) + __log2f(mantissa)) * KV_LN2);
}

template <int N>
__device__ __forceinline__ void finish(const attend_row &s, const float (&o)[N], int r,
                                       const attend_args &a, int head, int u) {
    const float far = kv_quad_sum(s.far), sum = kv_quad_sum(s.near) + far;
    if (u >= a.n_token) return;
    const size_t i = (size_t)head * (size_t)a.n_token + (size_t)u;
    const int t = threadIdx.x % 4, d = a.head_dim_out;
    if (t == 0 && a.lse) a.lse[i] = sum > 0 ? log_of(s.shift, sum) : -INFINITY;
    if (t == 0 && a.lse_long) a.lse_long[i] = far > 0 ? log_of(s.shift, far) : -INFINITY;
    if (!a.o) return;
    const float scale = sum > 0 ? 1.0f / sum : 0.0f;
    float *row = a.o + i * (size_t)d + 2 * t;
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        const float p = o[4 * j + 2 * r] * scale, q = o[4 * j + 2 * r + 1] * scale;
        const int c = 8 * j + 2 * t;
        if (d % 2 == 0) {
            if (c < d) *reinterpret_cast<float2 *>(row + 8 * j) = make_float2(p, q);
        } else {
            if (c < d) row[8 * j] = p;
            if (c + 1 < d) row[8 * j + 1] = q;
        }
    }
}

template <int N> __device__ __forceinline__ void fade_rows(float (&o)[N], float f0, float f1) {
    if (!__any_sync(~0u, f0 != 1.0f || f1 != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < N; i++) o[i] *= i & 2 ? f1 : f0;
}

__device__ __forceinline__ attend_row start(float unit) {
    return attend_row{KV_LOW * unit, 1.0f, 0, 0};
}

} // namespace attend

#endif
