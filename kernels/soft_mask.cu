// Attention of a training window under the soft mask of dms, forward and backward (kv_dms_rows, kv_dms_rows_backward; maths.md 7.3,
// 8.3), on mma.sync: half and bfloat16 operands enter exactly, fp32 operands as two tf32 parts.
//
// Forward: one block per 64 queries, query head and mask (soft or none). Backward: one block per 64 keys and query head; the keys are
// the rows of the products, so the sum over queries stays in the thread and nothing needs atomics.
#include <type_traits>

#include "kernels/block_sum.cuh"
#include "kernels/portable.cuh"
#include "kernels/rows.cuh"

namespace {

using portable::COLUMNS;
using portable::ROWS;
using portable::THREADS;

// binary exponent that probabilities carry, so that half precision keeps the small ones
constexpr float LIFT = 7.0f;

struct soft_args {
    int n, n_token, n_q_head, n_kv_head, first, window, from, every, dim_out;
    float scale, softcap;
    const float *log_keep;          // [n_kv_head][n]
    float *o, *dense;               // [n_q_head][n][dim_out]
    float *lse;                     // [n_q_head][n]
    const float *given, *given_lse; // o and lse of the forward pass
};

// Logits of 64 queries and 64 keys are queries u0.., keys t0..; both count from the window's start.
__device__ __forceinline__ float masked(float x, float log_keep, int u, int t, const soft_args &a) {
    if (t > u || t >= a.n) return -INFINITY;
#ifdef KV_BREAK_SOFT_MASK
    return u - t > a.window ? x + log_keep : x;
#else
    return u - t >= a.window ? x + log_keep : x;
#endif
}

template <class T, int D>
__global__ __launch_bounds__(THREADS, 1) void soft_forward(const T *q, const T *k, const T *v,
                                                           soft_args a) {
    using namespace portable;
    extern __shared__ __align__(16) char shared[];
    constexpr int tile = tile_elements<T>(D), stage_count = stages<T>();
    T *sq = reinterpret_cast<T *>(shared), *sk = sq + tile, *sv = sk + stage_count * tile;
    __shared__ float weak[2][COLUMNS];
    const bool soft = blockIdx.z == 0;
    const int block = a.from + (int)(gridDim.x - 1 - blockIdx.x) * a.every;
    const int head = (int)blockIdx.y, kv = head / (a.n_q_head / a.n_kv_head);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int u0 = block * ROWS, u = u0 + warp * 16 + lane / 4;
    const size_t plane = (size_t)a.n_token * D, start = (size_t)a.first * D;
    const float *log_keep = a.log_keep + (size_t)kv * (size_t)a.n;
    const int tiles = (min(u0 + ROWS, a.n) + COLUMNS - 1) / COLUMNS;
    auto load_keys = [&](int j) {
        const int stage = j % stage_count;
        auto row = [&](int r) { return j * COLUMNS + r < a.n ? j * COLUMNS + r : -1; };
        load_rows<T, D>(sk + stage * tile, k + (size_t)kv * plane + start, row);
        load_rows<T, D>(sv + stage * tile, v + (size_t)kv * plane + start, row);
        if (threadIdx.x < COLUMNS) {
            const int t = row((int)threadIdx.x);
            weak[stage][threadIdx.x] = soft && t >= 0 ? log_keep[t] : 0.0f;
        }
    };
    load_rows<T, D>(sq, q + (size_t)head * plane + start,
                    [&](int r) { return u0 + r < a.n ? u0 + r : -1; });
    if (stage_count == 2) load_keys(0);
    copy_commit();
    float o[D / 2] = {}, shift[2] = {KV_LOW, KV_LOW}, sum[2] = {0, 0};
    for (int j = 0; j < tiles; j++) {
        const int ahead = stage_count == 2 ? j + 1 : j, stage = j % stage_count;
        if (ahead < tiles) load_keys(ahead);
        copy_commit();
        copy_wait<stage_count - 1>();
        __syncthreads();
        float x[COLUMNS / 2], fade[2];
        product<T, D>(x, sq + warp * 16 * row_stride<T>(D), sk + stage * tile);
        to_logits(x, a.scale, a.softcap);
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) {
            const int c = i / 4 * 8 + 2 * (lane % 4) + i % 2;
            x[i] = masked(x[i], weak[stage][c], u + i / 2 % 2 * 8, j * COLUMNS + c, a) * KV_LOG2E;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float top = fmaxf(shift[r], kv_quad_max(kv_row_max(x, r)) - LIFT);
            fade[r] = kv_exp2(shift[r] - top);
            shift[r] = top;
            float own = 0;
#pragma unroll
            for (int i = 0; i < COLUMNS / 4; i++)
                own += x[i / 2 * 4 + 2 * r + i % 2] = kv_exp2(x[i / 2 * 4 + 2 * r + i % 2] - top);
            sum[r] = fmaf(sum[r], fade[r], own);
        }
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] *= fade[i / 2 % 2];
        accumulate<T, D>(o, x, sv + stage * tile, true);
        __syncthreads();
    }
    float *out = soft ? a.o : a.dense;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float all = kv_quad_sum(sum[r]);
        const int row = u + 8 * r;
        if (row >= a.n) continue;
        const size_t at = (size_t)head * (size_t)a.n + (size_t)row;
        if (soft && lane % 4 == 0)
            a.lse[at] = (float)(((double)shift[r] + log2((double)all)) * KV_LN2);
#pragma unroll
        for (int i = 0; i < D / 4; i++) {
            const int c = i / 2 * 8 + 2 * (lane % 4) + i % 2;
            if (c < a.dim_out)
                out[at * (size_t)a.dim_out + (size_t)c] = o[i / 2 * 4 + 2 * r + i % 2] / all;
        }
    }
}

// What a query gives to the backward pass besides its vectors: log-sum-exp and mean of dP in binary exponents and plain numbers, and
// the power of two that its gradient was divided by.
struct __align__(16) soft_row {
    float lse, mean, factor, unused;
};

template <class T> struct parts { // of a gradient row: high and low half; fp32 keeps it whole
    static constexpr int count = sizeof(T) == 4 ? 1 : 2;
};

__device__ float narrow(float x, float) { return x; }
__device__ __half narrow(float x, __half) { return __float2half_rn(x); }
__device__ __nv_bfloat16 narrow(float x, __nv_bfloat16) { return __float2bfloat16_rn(x); }

// A warp per row of the chosen blocks: part [parts][n_q_head][n][D], row [n_q_head][n].
template <class T, int D>
__global__ void soft_rows(soft_args a, const float *d_o, T *part, soft_row *rows) {
    const int lane = threadIdx.x % 32, head = (int)blockIdx.y;
    const int i = (int)blockIdx.x * (THREADS / 32) + (int)threadIdx.x / 32;
    const int u = (a.from + i / ROWS * a.every) * ROWS + i % ROWS;
    if (u >= a.n) return;
    const size_t at = (size_t)head * (size_t)a.n + (size_t)u, row = at * (size_t)a.dim_out;
    float g[D / 32], top = 0;
    double along = 0;
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
        const int c = j * 32 + lane;
        g[j] = c < a.dim_out ? d_o[row + (size_t)c] : 0.0f;
        top = fmaxf(top, fabsf(g[j]));
        if (c < a.dim_out) along += (double)g[j] * (double)a.given[row + (size_t)c];
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        along += __shfl_xor_sync(~0u, along, d);
    }
    const int exponent = top > 0 ? max(-100, min(100, ilogbf(top))) : 0;
    const float down = sizeof(T) == 4 ? 1.0f : ldexpf(1.0f, -exponent);
    const size_t plane = (size_t)a.n_q_head * (size_t)a.n * D;
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
        const float x = g[j] * down;
        const T high = narrow(x, T());
        T *to = part + at * D + j * 32 + lane;
        *to = high;
        if constexpr (parts<T>::count == 2) to[plane] = narrow(x - (float)high, T());
    }
    if (lane == 0) rows[at] = soft_row{a.given_lse[at] * KV_LOG2E, (float)along, 1.0f / down, 0};
}

template <class T, int D>
__global__ __launch_bounds__(THREADS, 1) void soft_backward(const T *q, const T *k, const T *v,
                                                            const T *part, const soft_row *rows,
                                                            float *d_keep, soft_args a) {
    using namespace portable;
    extern __shared__ __align__(16) char shared[];
    constexpr int tile = tile_elements<T>(D);
    T *sk = reinterpret_cast<T *>(shared), *sv = sk + tile, *sq = sv + tile, *sg = sq + tile;
    __shared__ soft_row row[COLUMNS];
    const int head = (int)blockIdx.y, kv = head / (a.n_q_head / a.n_kv_head);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int t0 = (int)blockIdx.x * ROWS, t = t0 + warp * 16 + lane / 4;
    const size_t plane = (size_t)a.n_token * D, start = (size_t)a.first * D;
    const size_t own = (size_t)head * (size_t)a.n;
    auto keys = [&](int r) { return t0 + r < a.n ? t0 + r : -1; };
    load_rows<T, D>(sk, k + (size_t)kv * plane + start, keys);
    load_rows<T, D>(sv, v + (size_t)kv * plane + start, keys);
    float weak[2], sum[2] = {0, 0};
    for (int r = 0; r < 2; r++)
        weak[r] = t + 8 * r < a.n ? a.log_keep[(size_t)kv * (size_t)a.n + (size_t)(t + 8 * r)] : 0;
    // The first chosen block with a query that the mask of key t0 reaches.
    const int reach = max(0, t0 + a.window - (ROWS - 1)), lag = (reach + ROWS - 1) / ROWS - a.from;
    const int begin = a.from + (lag > 0 ? (lag + a.every - 1) / a.every * a.every : 0);
    for (int block = begin; block * ROWS < a.n; block += a.every) {
        const int u0 = block * ROWS;
        auto queries = [&](int r) { return u0 + r < a.n ? u0 + r : -1; };
        load_rows<T, D>(sq, q + (size_t)head * plane + start, queries);
#pragma unroll
        for (int i = 0; i < parts<T>::count; i++)
            load_rows<T, D>(sg + i * tile,
                            part + ((size_t)i * (size_t)a.n_q_head * (size_t)a.n + own) * D,
                            queries);
        if (threadIdx.x < COLUMNS) {
            const int u = queries((int)threadIdx.x);
            row[threadIdx.x] = u < 0 ? soft_row{INFINITY, 0, 0, 0} : rows[own + (size_t)u];
        }
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        float x[COLUMNS / 2], dp[COLUMNS / 2];
        product<T, D>(x, sk + warp * 16 * row_stride<T>(D), sq);
        to_logits(x, a.scale, a.softcap);
        product<T, D>(dp, sv + warp * 16 * row_stride<T>(D), sg);
        if constexpr (parts<T>::count == 2) {
            float low[COLUMNS / 2];
            product<T, D>(low, sv + warp * 16 * row_stride<T>(D), sg + tile);
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) dp[i] += low[i];
        }
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) {
            const int c = i / 4 * 8 + 2 * (lane % 4) + i % 2, r = i / 2 % 2;
            const soft_row w = row[c];
            // The softmax's share that fell to a key behind the window; padding has lse +inf and so none.
            const float p = u0 + c - (t + 8 * r) >= a.window
                                ? kv_exp2((x[i] + weak[r]) * KV_LOG2E - w.lse)
                                : 0.0f;
            sum[r] += p * (dp[i] * w.factor - w.mean);
        }
        __syncthreads();
    }
    portable::copy_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float all = kv_quad_sum(sum[r]);
        if (lane % 4 == 0 && t + 8 * r < a.n) d_keep[own + (size_t)(t + 8 * r)] = all;
    }
}

// One block per query head.
__global__ void __launch_bounds__(1024) soft_match(soft_args a, double *off) {
    __shared__ double shared[32];
    const size_t own = (size_t)blockIdx.x * (size_t)a.n * (size_t)a.dim_out;
    const int blocks = (a.n + ROWS - 1) / ROWS;
    double apart = 0, size = 0;
    for (int block = a.from; block < blocks; block += a.every) {
        const size_t first = own + (size_t)block * ROWS * (size_t)a.dim_out;
        const int cells = min(ROWS, a.n - block * ROWS) * a.dim_out;
        for (int i = (int)threadIdx.x; i < cells; i += 1024) {
            const float d = a.dense[first + (size_t)i], x = a.given[first + (size_t)i] - d;
            apart += (double)x * (double)x;
            size += (double)d * (double)d;
            a.dense[first + (size_t)i] = 2 * x;
        }
    }
    apart = kv_block_sum(apart, shared);
    size = kv_block_sum(size, shared);
    if (threadIdx.x == 0) {
        off[2 * blockIdx.x] = apart;
        off[2 * blockIdx.x + 1] = size;
    }
}

int chosen(const soft_args &a) {
    const int blocks = kv_div_up(a.n, ROWS);
    return a.from < blocks ? kv_div_up(blocks - a.from, a.every) : 0;
}

template <class T, int D> kv_status forward(const kv_gpu_span *s, const soft_args &a) {
    const size_t bytes =
        (size_t)(1 + 2 * portable::stages<T>()) * portable::tile_elements<T>(D) * sizeof(T);
    KV_RETURN(kv_allow_shared(s->gpu, soft_forward<T, D>, bytes));
    soft_forward<T, D>
        <<<dim3((unsigned)chosen(a), (unsigned)a.n_q_head, 2), THREADS, bytes, s->gpu->stream>>>(
            kv_data<T>(s->q), kv_data<T>(s->k), kv_data<T>(s->v), a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

template <class T, int D>
kv_status backward(const kv_gpu_span *s, const soft_args &a, const float *d_o, float *d_keep) {
    kv_scratch part, rows;
    kv_gpu *g = s->gpu;
    const size_t cells = (size_t)a.n_q_head * (size_t)a.n,
                 bytes = (size_t)(3 + parts<T>::count) * portable::tile_elements<T>(D) * sizeof(T);
    const unsigned heads = (unsigned)a.n_q_head;
    KV_RETURN(part.reserve(g, parts<T>::count * cells * D * sizeof(T)));
    KV_RETURN(rows.reserve(g, cells * sizeof(soft_row)));
    soft_rows<T, D>
        <<<dim3((unsigned)(chosen(a) * ROWS / (THREADS / 32)), heads), THREADS, 0, g->stream>>>(
            a, d_o, part.as<T>(), rows.as<soft_row>());
    KV_CUDA(cudaGetLastError());
    KV_RETURN(kv_allow_shared(g, soft_backward<T, D>, bytes));
    soft_backward<T, D><<<dim3((unsigned)kv_div_up(a.n, ROWS), heads), THREADS, bytes, g->stream>>>(
        kv_data<T>(s->q), kv_data<T>(s->k), kv_data<T>(s->v), part.as<T>(), rows.as<soft_row>(),
        d_keep, a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

// Calls F::run<T, D> for the span's number format and head size.
template <class F> kv_status by_type(const kv_gpu_span *s, F f) {
    const bool wide = s->head_dim == 128;
    if (s->type == KV_F16)
        return wide ? f(__half(), std::integral_constant<int, 128>())
                    : f(__half(), std::integral_constant<int, 64>());
    if (s->type == KV_BF16)
        return wide ? f(__nv_bfloat16(), std::integral_constant<int, 128>())
                    : f(__nv_bfloat16(), std::integral_constant<int, 64>());
    return wide ? f(float(), std::integral_constant<int, 128>())
                : f(float(), std::integral_constant<int, 64>());
}

kv_status arguments(const kv_gpu_span *s, const kv_gpu_window *w, const kv_gpu_buffer *log_keep,
                    const kv_gpu_buffer *o, const kv_gpu_buffer *dense, const kv_gpu_buffer *lse,
                    soft_args *a) {
    const size_t rows = (size_t)s->n_q_head * (size_t)w->n, cells = rows * (size_t)s->head_dim_in;
    if (!s->v) return KV_FAIL(KV_E_USAGE, "soft mask: the span was uploaded without v");
    if (w->first < 0 || w->n < 1 || w->first + w->n > s->n_token || w->window < 1 || w->from < 0 ||
        w->every < 1)
        return KV_FAIL(KV_E_USAGE,
                       "soft mask: tokens [%d, %d) of %d, window %d, blocks from %d, every %d",
                       w->first, w->first + w->n, s->n_token, w->window, w->from, w->every);
    KV_RETURN(kv_buffer_check(log_keep, "log_keep", (size_t)s->n_kv_head * (size_t)w->n, 4));
    KV_RETURN(kv_buffer_check(o, "o", cells, sizeof(float)));
    KV_RETURN(kv_buffer_check(dense, "dense or d_o", cells, sizeof(float)));
    KV_RETURN(kv_buffer_check(lse, "lse", rows, sizeof(float)));
    *a = soft_args{};
    a->n = w->n;
    a->n_token = s->n_token;
    a->n_q_head = s->n_q_head;
    a->n_kv_head = s->n_kv_head;
    a->first = w->first;
    a->window = w->window;
    a->from = w->from;
    a->every = w->every;
    a->dim_out = s->head_dim_in;
    a->scale = s->scale;
    a->softcap = s->softcap;
    a->log_keep = kv_data<float>(log_keep);
    return KV_OK;
}

} // namespace

kv_status kv_gpu_soft_attend(const kv_gpu_span *s, const kv_gpu_window *w,
                             const kv_gpu_buffer *log_keep, kv_gpu_buffer *o, kv_gpu_buffer *dense,
                             kv_gpu_buffer *lse) {
    soft_args a;
    KV_RETURN(arguments(s, w, log_keep, o, dense, lse, &a));
    a.o = kv_data<float>(o);
    a.dense = kv_data<float>(dense);
    a.lse = kv_data<float>(lse);
    if (chosen(a) == 0) return KV_OK;
    return by_type(s, [&](auto type, auto size) {
        return forward<decltype(type), decltype(size)::value>(s, a);
    });
}

kv_status kv_gpu_soft_backward(const kv_gpu_span *s, const kv_gpu_window *w,
                               const kv_gpu_buffer *log_keep, const kv_gpu_buffer *o,
                               const kv_gpu_buffer *lse, const kv_gpu_buffer *d_o,
                               kv_gpu_buffer *d_keep) {
    soft_args a;
    const size_t rows = (size_t)s->n_q_head * (size_t)w->n;
    KV_RETURN(arguments(s, w, log_keep, o, d_o, lse, &a));
    KV_RETURN(kv_buffer_check(d_keep, "d_keep", rows, sizeof(float)));
    a.given = kv_data<float>(o);
    a.given_lse = kv_data<float>(lse);
    if (chosen(a) == 0) {
        KV_CUDA(cudaMemsetAsync(d_keep->data, 0, rows * sizeof(float), s->gpu->stream));
        return KV_OK;
    }
    return by_type(s, [&](auto type, auto size) {
        return backward<decltype(type), decltype(size)::value>(s, a, kv_data<float>(d_o),
                                                               kv_data<float>(d_keep));
    });
}

kv_status kv_gpu_soft_match(const kv_gpu_span *s, const kv_gpu_window *w, const kv_gpu_buffer *o,
                            kv_gpu_buffer *dense, kv_gpu_buffer *off) {
    soft_args a;
    KV_RETURN(arguments(s, w, nullptr, o, dense, nullptr, &a));
    KV_RETURN(kv_buffer_check(off, "off", 2 * (size_t)s->n_q_head, sizeof(double)));
    a.given = kv_data<float>(o);
    a.dense = kv_data<float>(dense);
    soft_match<<<(unsigned)s->n_q_head, 1024, 0, s->gpu->stream>>>(a, kv_data<double>(off));
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}
