// Fused training passes of the scorers for Hopper: which networks take them, and what their files share.
//
// Operands of products are bfloat16 in shared tiles of 64 columns with 128-byte swizzle, sums fp32. Every block sums its rows in
// registers and leaves one partial gradient; a last kernel adds the partials in a fixed order.
#ifndef KV_KERNELS_FUSED_CUH
#define KV_KERNELS_FUSED_CUH

#include "kernels/fused_ops.cuh"
#include "kernels/net.cuh"
#include "kernels/rows.cuh"

// The one place that says so. All other networks, all of fp32 arithmetic and all other GPUs run the general passes (net_*.cu).
static inline bool kv_fused_width(int32_t n) { return n == 128 || n == 256; }
static inline bool kv_fused_mlp(const kv_gpu_net *net) {
    return net->gpu->hopper && !net->exact && !net->spec.hidden_input && net->spec.n_mlp == 256 &&
           kv_fused_width(net->spec.n_input);
}
static inline bool kv_fused_memory(const kv_gpu_net *net) {
    const kv_net_spec &s = net->spec;
    return net->gpu->hopper && !net->exact && s.recurrent && s.norm && s.n_key == 128 &&
           s.n_value == 128 && kv_fused_width(net->wide()) && !(s.hidden_input && !s.n_feature);
}

// The memory: rhat += a . silu(h), or =; gradients at the projections and gates of every row, and of the readout (fused_memory.cu).
kv_status kv_fused_memory_forward(kv_gpu_net *net, const float *param, float *rhat);
kv_status kv_fused_memory_backward(kv_gpu_net *net, const float *param, const float *e,
                                   float *grad);
// Projections of every row and pre-activations of its gates (unless they read hidden states); gradients of both (fused_tokens.cu).
kv_status kv_fused_project(kv_gpu_net *net, const float *param);
kv_status kv_fused_project_backward(kv_gpu_net *net, float *grad);

// rhat of every token from its own MLP; gradients of W1, b1, W2 (fused_mlp.cu).
kv_status kv_fused_mlp_forward(kv_gpu_net *net, const float *param, float *rhat);
kv_status kv_fused_mlp_backward(kv_gpu_net *net, const float *param, const float *e, float *grad);

// grad[lane][at + i] = sum over parts of partial[lane][part][i], i < count, in the order of the parts.
kv_status kv_fused_total(kv_gpu_net *net, const float *partial, int n_part, int64_t count,
                         int64_t at, float *grad);

namespace fused {

constexpr int ROWS = 64;     // of a streamed tile
constexpr int THREADS = 384; // two warpgroups that compute, and one that loads

// silu(2 half) and its slope at 2 half
__device__ __forceinline__ float silu_half(float half) { return fmaf(half, tanh_fast(half), half); }
__device__ __forceinline__ void silu_half(float half, float *silu, float *slope) {
    const float t = tanh_fast(half), s = fmaf(0.5f, t, 0.5f);
    *silu = fmaf(half, t, half);
    *slope = fmaf(*silu, fmaf(-0.5f, t, 0.5f), s);
}
__device__ __forceinline__ uint32_t pair(float a, float b) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t *>(&h);
}
__device__ __forceinline__ float2 wide_pair(uint32_t x) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&x));
}
__device__ __forceinline__ uint32_t scale_pair(uint32_t x, float a, float b) {
    const float2 v = wide_pair(x);
    return pair(v.x * a, v.y * b);
}
// The same number, of which the compiler does not know that it is the same in every round: what follows from it is computed again
// instead of filling registers from round to round.
__device__ __forceinline__ int again(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
// Of a row's chunk of 8 columns: offset in the tile's first 64 columns. Chunks 2 k further lie at `^ 32 k` (k < 4).
__device__ __forceinline__ uint32_t fragment_at(uint32_t row, uint32_t chunk) {
    return row * 128 + (chunk ^ row % 8) * 16;
}

// Stores 32 columns of a row, of which the quad's threads hold pairs: 16 bytes a thread, threads exchange what they hold.
__device__ __forceinline__ void store_quad(const uint32_t (&word)[4], __nv_bfloat16 *to) {
    const int t = (int)threadIdx.x % 4;
    const bool odd = t & 1, high = t & 2;
    // 4 x 4 transposition: first 1 x 1 blocks between neighbours, then 2 x 2 blocks.
    const uint32_t a = __shfl_xor_sync(~0u, odd ? word[0] : word[1], 1),
                   b = __shfl_xor_sync(~0u, odd ? word[2] : word[3], 1);
    const uint32_t x0 = odd ? a : word[0], x1 = odd ? word[1] : a, x2 = odd ? b : word[2],
                   x3 = odd ? word[3] : b;
    const uint32_t c = __shfl_xor_sync(~0u, high ? x0 : x2, 2),
                   d = __shfl_xor_sync(~0u, high ? x1 : x3, 2);
    const uint4 out = make_uint4(high ? c : x0, high ? d : x1, high ? x2 : c, high ? x3 : d);
    *reinterpret_cast<uint4 *>(to + 8 * t) = out;
}

// The accumulators of a thread's two rows, 8 apart; zeros where a row is not real.
template <int N>
__device__ __forceinline__ void store_rows(const float (&x)[N], bool real0, bool real1,
                                           __nv_bfloat16 *to, int64_t ld) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int j = 0; j < N / 4; j += 4) {
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                word[i] = (r ? real1 : real0)
                              ? pair(x[4 * (j + i) + 2 * r], x[4 * (j + i) + 2 * r + 1])
                              : 0u;
            store_quad(word, to + 8 * r * ld + 8 * j);
        }
}

// Sums of 64 rows of a warpgroup, N columns, in fp32; `to`: the warp's first row and column.
template <int N>
__device__ __forceinline__ void store_sums(const float (&x)[N / 2], float *to, int64_t ld) {
    const int own = (int)threadIdx.x % 32;
    to += own / 4 * ld + own % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int j = 0; j < N / 8; j++)
            *reinterpret_cast<float2 *>(to + 8 * r * ld + 8 * j) =
                make_float2(x[4 * j + 2 * r], x[4 * j + 2 * r + 1]);
}

// Rows of a warpgroup, tile [64][2 N], as operand.
template <int N>
__device__ __forceinline__ void load_operand(const uint16_t *tile, uint32_t (&x)[N]) {
    const uint32_t thread = (uint32_t)again((int)threadIdx.x), base = hopper::shared_address(tile),
                   at = fragment_at(thread % 128 / 32 * 16 + thread % 16, thread % 32 / 16);
#pragma unroll
    for (int k = 0; k < N / 4; k++)
        load_matrices<false>(x + 4 * k, base + (at ^ (k % 4 * 32)) + k / 4 * ROWS * 128);
}

// Barriers of a ring of tiles, by one thread: how many arrivals fill a slot and leave it.
template <int N>
__device__ __forceinline__ void init_ring(uint64_t (&full)[N], uint64_t (&empty)[N], int filled,
                                          int left) {
    for (int i = 0; i < N; i++) {
        hopper::barrier_init(&full[i], (uint32_t)filled);
        hopper::barrier_init(&empty[i], (uint32_t)left);
    }
}

// Which tiles of a lane's rows a block works on.
struct share {
    int first, count;
    __device__ share(int tiles, int blocks, int block) {
        const int each = (tiles + blocks - 1) / blocks;
        first = block * each;
        count = max(0, min(each, tiles - first));
    }
};

} // namespace fused

#endif
