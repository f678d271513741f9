// Priorities that follow from the keys alone (reference/priority.h): minus norm, minus cosine with the running mean direction.
//
// Exact class: sums are formed in double in the CPU's order, with its roundings, so the priorities are the same bytes. A square of
// an fp32 number is exact in double, so norms may use fused multiply-adds; products of the cosine are not, so they must not. Zeros
// behind the head size (spans are padded) add nothing to a norm.
//
// The sum of directions is a chain of n additions per channel, 16384 x ~16 clocks = 0.15 ms, all heads and channels beside each
// other; everything else is parallel over tokens. Directions lie in memory as doubles, a piece of the document at a time, so that
// they stay in L2: 8 heads of 128 make 8 KB a token.
#include <algorithm>

#include "kernels/device.cuh"

namespace {

constexpr int THREADS = 128, TOKENS = 32, COLUMNS = 32; // of a tile of cosine_kernel
constexpr int AHEAD = 32;   // additions whose operands are loaded at once
constexpr int PIECE = 4096; // tokens whose directions are in memory

__device__ double widen(float x) { return (double)x; }
__device__ double widen(__half x) { return (double)__half2float(x); }
__device__ double widen(__nv_bfloat16 x) { return (double)__bfloat162float(x); }

// |k| of one key of `width` elements, a multiple of 64.
template <class T> __device__ double length_of(const T *k, int width) {
    constexpr int N = 16 / (int)sizeof(T);
    double sum = 0;
#ifdef KV_BREAK_NORM
    width -= N; // one load short
#endif
    for (int c = 0; c < width; c += N) {
        const uint4 raw = *reinterpret_cast<const uint4 *>(k + c);
        const T *x = reinterpret_cast<const T *>(&raw);
#pragma unroll
        for (int i = 0; i < N; i++) sum = __fma_rn(widen(x[i]), widen(x[i]), sum);
    }
    return __dsqrt_rn(sum);
}

// Keys [rows][width]; priority, length [rows], either may be null.
template <class T>
__global__ void __launch_bounds__(THREADS)
    norm_kernel(const T *k, int64_t rows, int width, float *priority, double *length) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (i >= rows) return;
    const double x = length_of(k + i * width, width);
    if (length) length[i] = x;
    if (priority) priority[i] = __double2float_rn(-x);
}

struct cosine_args {
    const double *length; // [head][n]
    double *sum;          // [head][d], over the tokens before the piece
    double *direction;    // [head][piece][d], tokens first .. end - 1
    float *priority;      // [head][n]
    int n, d, width, lead, first, end, piece;
};

// k / |k| of the tokens of a piece, 0 for a zero vector.
template <class T>
__global__ void __launch_bounds__(THREADS) direction_kernel(const T *k, cosine_args a) {
    const int head = (int)blockIdx.y;
    const int64_t count = (int64_t)(a.end - a.first) * a.d;
    double *out = a.direction + (int64_t)head * a.piece * a.d;
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * THREADS) {
        const int64_t row = (int64_t)head * a.n + a.first + i / a.d;
        const double length = a.length[row];
        out[i] = length > 0 ? __ddiv_rn(widen(k[row * a.width + i % a.d]), length) : 0.0;
    }
}

// Running sums of the directions of a piece, in place. A thread per channel; a block per head.
__global__ void __launch_bounds__(THREADS) sum_kernel(cosine_args a) {
    const int c = (int)threadIdx.x, count = a.end - a.first;
    if (c >= a.d) return;
    double *x = a.direction + (int64_t)blockIdx.x * a.piece * a.d + c;
    double sum = a.sum[(int64_t)blockIdx.x * a.d + c], next[AHEAD];
    const auto load = [&](int at) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) next[i] = at + i < count ? x[(int64_t)(at + i) * a.d] : 0.0;
    };
    load(0);
    for (int at = 0; at < count; at += AHEAD) {
        double now[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) now[i] = next[i];
        load(at + AHEAD);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            sum = __dadd_rn(sum, now[i]); // zeros behind the end change nothing
            if (at + i < count) x[(int64_t)(at + i) * a.d] = sum;
        }
    }
    a.sum[(int64_t)blockIdx.x * a.d + c] = sum;
}

// Tokens [from, until), whose last compared key lies in the piece. Blocks of 32 tokens; products of 32 x 32 cells are formed side by
// side, then one thread a token adds them up in order of channels.
template <class T>
__global__ void __launch_bounds__(THREADS)
    cosine_kernel(const T *k, cosine_args a, int from, int until) {
    __shared__ double product[2][TOKENS][COLUMNS + 1]; // with the key; of the mean with itself
    const int head = (int)blockIdx.y, first = from + (int)blockIdx.x * TOKENS,
              warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    double sum = 0; // of token first + lane: warp 0 key times mean, warp 1 mean times mean
    for (int base = 0; base < a.d; base += COLUMNS) {
        const int c = base + lane, columns = min(COLUMNS, a.d - base);
        for (int r = warp; r < TOKENS; r += THREADS / 32) {
            const int t = first + r;
            if (t >= until || c >= a.d) continue;
            const int last = a.lead < a.n - t ? min(t + a.lead, a.n - 1) : a.n - 1;
            const double mean =
                __ddiv_rn(a.direction[((int64_t)head * a.piece + (last - a.first)) * a.d + c],
                          (double)(last + 1));
            product[0][r][lane] =
                __dmul_rn(widen(k[((int64_t)head * a.n + t) * a.width + c]), mean);
            product[1][r][lane] = __dmul_rn(mean, mean);
        }
        __syncthreads();
        if (warp < 2)
            for (int j = 0; j < columns; j++) sum = __dadd_rn(sum, product[warp][lane][j]);
        __syncthreads();
    }
    if (warp == 1) product[1][lane][0] = sum;
    __syncthreads();
    const int t = first + lane;
    if (warp || t >= until) return;
    const int64_t at = (int64_t)head * a.n + t;
    const double scale = __dmul_rn(a.length[at], __dsqrt_rn(product[1][lane][0]));
    a.priority[at] = scale > 0 ? __double2float_rn(__ddiv_rn(-sum, scale)) : 0.0f;
}

template <class T> kv_status norms(const kv_gpu_span *s, float *priority, double *length) {
    const int64_t rows = (int64_t)s->n_kv_head * s->n_token;
    norm_kernel<<<(unsigned)((rows + THREADS - 1) / THREADS), THREADS, 0, s->gpu->stream>>>(
        kv_data<T>((const kv_gpu_buffer *)s->k), rows, s->head_dim, priority, length);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

template <class T> kv_status cosines(const kv_gpu_span *s, int32_t lead, float *priority) {
    kv_gpu *g = s->gpu;
    const T *k = kv_data<T>((const kv_gpu_buffer *)s->k);
    const size_t heads = (size_t)s->n_kv_head,
                 row = heads * (size_t)s->head_dim_in * sizeof(double);
    kv_scratch length, sum, direction;
    cosine_args a = {};
    a.n = s->n_token;
    a.d = s->head_dim_in;
    a.width = s->head_dim;
    a.lead = lead;
    a.piece = std::min(a.n, PIECE);
    KV_RETURN(length.reserve(g, heads * (size_t)a.n * sizeof(double)));
    KV_RETURN(sum.reserve_zeros(g, row));
    KV_RETURN(direction.reserve(g, (size_t)a.piece * row));
    KV_RETURN(norms<T>(s, nullptr, length.as<double>()));
    a.length = length.as<double>();
    a.sum = sum.as<double>();
    a.direction = direction.as<double>();
    a.priority = priority;
#ifdef KV_BREAK_COSINE
    a.lead = std::max(0, lead - 1);
#endif
    for (int from = 0; a.first < a.n; a.first = a.end) {
        a.end = std::min(a.first + a.piece, a.n);
        const int64_t cells = (int64_t)(a.end - a.first) * a.d;
        direction_kernel<<<dim3((unsigned)std::min<int64_t>((cells + THREADS - 1) / THREADS, 4096),
                                (unsigned)heads),
                           THREADS, 0, g->stream>>>(k, a);
        KV_CUDA(cudaGetLastError());
        sum_kernel<<<(unsigned)heads, THREADS, 0, g->stream>>>(a);
        KV_CUDA(cudaGetLastError());
        // Token t is compared up to min(t + lead, n - 1): the last piece serves all that are left.
        const int until = a.end == a.n ? a.n : std::max(from, a.end - std::min(a.lead, a.end));
        if (until > from) {
            cosine_kernel<<<dim3((unsigned)kv_div_up(until - from, TOKENS), (unsigned)heads),
                            THREADS, 0, g->stream>>>(k, a, from, until);
            KV_CUDA(cudaGetLastError());
        }
        from = until;
    }
    return KV_OK;
}

kv_status check(const kv_gpu_span *s, const kv_gpu_buffer *priority) {
    return kv_buffer_check(priority, "priority", (size_t)s->n_kv_head * (size_t)s->n_token,
                           sizeof(float));
}

} // namespace

kv_status kv_gpu_norm_priorities(const kv_gpu_span *s, kv_gpu_buffer *priority) {
    KV_RETURN(check(s, priority));
    float *out = kv_data<float>(priority);
    if (s->type == KV_F16) return norms<__half>(s, out, nullptr);
    if (s->type == KV_BF16) return norms<__nv_bfloat16>(s, out, nullptr);
    return norms<float>(s, out, nullptr);
}

kv_status kv_gpu_cosine_priorities(const kv_gpu_span *s, int32_t lead, kv_gpu_buffer *priority) {
    KV_RETURN(check(s, priority));
    float *out = kv_data<float>(priority);
    if (s->type == KV_F16) return cosines<__half>(s, lead, out);
    if (s->type == KV_BF16) return cosines<__nv_bfloat16>(s, lead, out);
    return cosines<float>(s, lead, out);
}
