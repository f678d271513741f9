// The token's own MLP (maths.md 5) in one kernel forward and one backward; hidden values never leave the chip.
//
// Forward: hidden weights stay in shared memory, warpgroups take tiles of 64 rows in turn, bias, silu and the readout follow in the
// accumulators. Backward: a block owns 128 hidden units and a share of the rows; it forms z transposed, so that its gradient is
// already the register operand of the product with x that sums dW1.
#include "kernels/fused.cuh"

namespace {

using namespace fused;
using bf16 = __nv_bfloat16;

constexpr int HIDDEN = 256, OWN = 128; // hidden units; of a backward block
// The warpgroups take turns in issuing products, so that one's sums run beside the other's products: named barriers of the first one
// and the second one.
constexpr int TURN = 2;

struct mlp_args {
    const float *bias, *w2; // [HIDDEN] of each lane, lanes n_param apart
    const int32_t *token;
    const float *e;
    float *rhat, *partial;
    int64_t n_param;
    int n_row, n_token;
};

// ---- forward ----

template <int NI> struct forward_shared {
    static constexpr int STAGES = NI == 256 ? 3 : 6;
    alignas(1024) uint16_t w[HIDDEN * NI];
    alignas(1024) uint16_t x[STAGES][ROWS * NI];
    float4 column[HIDDEN / 2]; // half the bias and w2 of two hidden units
    uint64_t w_full, full[STAGES], empty[STAGES];
};

// Sums of w2 . silu over the thread's columns of both rows.
__device__ __forceinline__ void read_out(const float (&z)[64], const float4 *column,
                                         float (&sum)[2]) {
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const float4 c = column[4 * j];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] = fmaf(silu_half(fmaf(0.5f, z[4 * j + 2 * r], c.x)), c.y, sum[r]);
            sum[r] = fmaf(silu_half(fmaf(0.5f, z[4 * j + 2 * r + 1], c.z)), c.w, sum[r]);
        }
    }
}

template <int NI>
__global__ __launch_bounds__(THREADS, 1) void forward_kernel(const __grid_constant__ CUtensorMap xm,
                                                             const __grid_constant__ CUtensorMap wm,
                                                             const mlp_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ __align__(1024) char raw[];
    forward_shared<NI> &s = *reinterpret_cast<forward_shared<NI> *>(raw);
    constexpr int STAGES = forward_shared<NI>::STAGES;
    const int lane = (int)blockIdx.y, team = uniform(threadIdx.x / 128);
    const share work(a.n_row / ROWS, (int)gridDim.x, (int)blockIdx.x);
    kv_follow();
    const float *bias = a.bias + lane * a.n_param, *w2 = a.w2 + lane * a.n_param;
    for (int i = (int)threadIdx.x; i < HIDDEN / 2; i += THREADS)
        s.column[i] =
            make_float4(0.5f * bias[2 * i], w2[2 * i], 0.5f * bias[2 * i + 1], w2[2 * i + 1]);
    if (threadIdx.x == 0) {
        barrier_init(&s.w_full, 1);
        init_ring(s.full, s.empty, 1, 4);
        barrier_init_fence();
    }
    __syncthreads();
    if (team == 2) {
        registers_shrink<40>();
        if (threadIdx.x != 256) return;
        barrier_expect(&s.w_full, HIDDEN * NI * 2);
        load_tile(s.w, &wm, 0, lane, &s.w_full);
        ring<STAGES> r;
        for (int i = 0; i < work.count; i++, r.next()) {
            barrier_wait(&s.empty[r.slot], r.parity ^ 1);
            barrier_expect(&s.full[r.slot], ROWS * NI * 2);
            load_tile(s.x[r.slot], &xm, (work.first + i) * ROWS, lane, &s.full[r.slot]);
        }
        return;
    }
    registers_grow<232>();
    const int own = (int)threadIdx.x % 32, line = (int)threadIdx.x % 128 / 32 * 16 + own / 4;
    barrier_wait(&s.w_full, 0);
    if (team == 1) turn_pass(TURN);
    ring<STAGES> r;
    if (team == 1) r.next();
    const int rounds = (work.count + 1) / 2;
    for (int round = 0; round < rounds; round++, r.next(), r.next()) {
        const int i = 2 * round + team, row = (work.first + i) * ROWS + line;
        const bool real = i < work.count;
        const uint32_t slot = r.slot;
        uint32_t x[NI / 4];
        float sum[2] = {};
        int token[2] = {-1, -1};
        if (real) {
            barrier_wait(&s.full[slot], r.parity);
            load_operand(s.x[slot], x);
            pin(x);
            for (int h = 0; h < 2; h++) token[h] = a.token[row + 8 * h];
        }
#pragma unroll 1
        for (int h = 0; h < 2; h++) { // halves of the hidden units
            turn_wait(TURN + team);
            if (!real) {
                turn_pass(TURN + 1 - team);
                continue;
            }
            const uint64_t wd = tile_k_major(s.w) + (uint64_t)(h * 128 * 128 >> 4);
            float z[64];
            mma_begin();
#pragma unroll
            for (int k = 0; k < NI / 16; k++)
                mma<bf16, 128>::rs<0>(z, x + 4 * k, wd + step_k_major(k, HIDDEN), k > 0);
            mma_commit();
            turn_pass(TURN + 1 - team);
            mma_wait<0>();
            pin(z);
            if (h == 0 && own == 0)
                barrier_arrive(&s.empty[slot]); // the operand has long been read
            read_out(z, s.column + 64 * h + own % 4, sum);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float score = kv_quad_sum(sum[h]);
            if (own % 4 == 0 && token[h] >= 0) a.rhat[(int64_t)lane * a.n_token + token[h]] = score;
        }
    }
#endif
}

// ---- backward ----

template <int NI> struct backward_shared {
    static constexpr int STAGES = NI == 256 ? 5 : 8;
    alignas(1024) uint16_t w[2][ROWS * NI]; // 64 hidden units of each warpgroup
    alignas(1024) uint16_t x[STAGES][ROWS * NI];
    alignas(16) float e[STAGES][ROWS];
    uint64_t w_full, full[STAGES], empty[STAGES];
};

// Of one thread: two hidden units.
struct unit_sums {
    float half_bias[2], w2[2], d_bias[2], d_w2[2];
};

// Transposed tile of z: its gradient as operand, and what it adds to the gradients of bias and w2 (d_bias without the factor w2).
__device__ __forceinline__ void slope(const float (&z)[32], const float *e, unit_sums *u,
                                      uint32_t (&out)[16]) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float2 up = *reinterpret_cast<const float2 *>(e + 8 * j);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float y[2], d[2];
            silu_half(fmaf(0.5f, z[4 * j + 2 * r], u->half_bias[r]), &y[0], &d[0]);
            silu_half(fmaf(0.5f, z[4 * j + 2 * r + 1], u->half_bias[r]), &y[1], &d[1]);
            d[0] *= up.x;
            d[1] *= up.y;
            u->d_bias[r] += d[0] + d[1];
            u->d_w2[r] = fmaf(up.x, y[0], fmaf(up.y, y[1], u->d_w2[r]));
            out[2 * j + r] = pair(d[0] * u->w2[r], d[1] * u->w2[r]);
        }
    }
}

template <int NI>
__global__ __launch_bounds__(THREADS,
                             1) void backward_kernel(const __grid_constant__ CUtensorMap xm,
                                                     const __grid_constant__ CUtensorMap wm,
                                                     const mlp_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ __align__(1024) char raw[];
    backward_shared<NI> &s = *reinterpret_cast<backward_shared<NI> *>(raw);
    constexpr int STAGES = backward_shared<NI>::STAGES, PARTS = NI / 128;
    const int lane = (int)blockIdx.z, first_unit = (int)blockIdx.y * OWN,
              team = uniform(threadIdx.x / 128), own = (int)threadIdx.x % 32;
    const share work(a.n_row / ROWS, (int)gridDim.x, (int)blockIdx.x);
    if (threadIdx.x == 0) {
        barrier_init(&s.w_full, 1);
        init_ring(s.full, s.empty, 32, 8);
        barrier_init_fence();
    }
    __syncthreads();
    kv_follow();
    if (team == 2) {
        registers_shrink<40>();
        if (threadIdx.x >= 288) return;
        if (own == 0) {
            barrier_expect(&s.w_full, OWN * NI * 2);
            for (int i = 0; i < 2; i++)
                load_tile(s.w[i], &wm, first_unit + 64 * i, lane, &s.w_full);
        }
        ring<STAGES> r;
        for (int i = 0; i < work.count; i++, r.next()) {
            const int row = (work.first + i) * ROWS;
            float up[2];
            for (int h = 0; h < 2; h++) {
                const int t = a.token[row + 2 * own + h];
#ifdef KV_BREAK_GRADIENTS
                up[h] = t < 1 ? 0.0f : a.e[(int64_t)lane * a.n_token + t - 1];
#else
                up[h] = t < 0 ? 0.0f : a.e[(int64_t)lane * a.n_token + t];
#endif
            }
            barrier_wait(&s.empty[r.slot], r.parity ^ 1);
            *reinterpret_cast<float2 *>(&s.e[r.slot][2 * own]) = make_float2(up[0], up[1]);
            if (own == 0) {
                barrier_expect(&s.full[r.slot], ROWS * NI * 2);
                load_tile(s.x[r.slot], &xm, row, lane, &s.full[r.slot]);
            } else {
                barrier_arrive(&s.full[r.slot]);
            }
        }
        return;
    }
    registers_grow<232>();
    const int unit = first_unit + (int)threadIdx.x / 32 * 16 + own / 4;
    float dw[PARTS][64] = {};
    unit_sums u = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        u.half_bias[r] = 0.5f * a.bias[lane * a.n_param + unit + 8 * r];
        u.w2[r] = a.w2[lane * a.n_param + unit + 8 * r];
    }
    barrier_wait(&s.w_full, 0);
    if (team == 1) turn_pass(TURN);
    float z[32];
    const auto form_z = [&](uint32_t slot) {
        const uint64_t wd = tile_k_major(s.w[team]), xk = tile_k_major(s.x[slot]);
#pragma unroll
        for (int k = 0; k < NI / 16; k++)
            mma<bf16, 64>::ss(z, wd + step_k_major(k, ROWS), xk + step_k_major(k, ROWS), k > 0);
        mma_commit();
    };
    ring<STAGES> ring;
    if (work.count) {
        barrier_wait(&s.full[0], 0);
        mma_begin();
        form_z(0);
        mma_wait<0>();
        pin(z);
    }
    for (int i = 0; i < work.count; i++) {
        const uint32_t slot = ring.slot;
        uint32_t dz[16];
        slope(z, s.e[slot] + 2 * (own % 4), &u, dz);
        pin(dz);
        ring.next();
        const bool more = i + 1 < work.count;
        if (more) barrier_wait(&s.full[ring.slot], ring.parity);
        turn_wait(TURN + team);
        const uint64_t xn = tile_n_major(s.x[slot], ROWS * 128);
        mma_begin();
#pragma unroll
        for (int k = 0; k < ROWS / 16; k++)
#pragma unroll
            for (int h = 0; h < PARTS; h++)
                mma<bf16, 128>::rs(dw[h], dz + 4 * k,
                                   xn + (h * 2 * ROWS * 128 >> 4) + step_n_major(k), 1);
        mma_commit();
        form_z(more ? ring.slot : slot); // of the next tile; behind the last one nobody reads it
        turn_pass(TURN + 1 - team);
        mma_wait<0>();
#pragma unroll
        for (int h = 0; h < PARTS; h++) pin(dw[h]);
        pin(z);
        if (own == 0) barrier_arrive(&s.empty[slot]);
    }
    float *out = a.partial + ((int64_t)lane * gridDim.x + blockIdx.x) * (HIDDEN * (NI + 2));
#pragma unroll
    for (int h = 0; h < PARTS; h++)
        store_sums<128>(dw[h], out + (int64_t)(unit - own / 4) * NI + 128 * h, NI);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float d_bias = kv_quad_sum(u.d_bias[r]) * u.w2[r], d_w2 = kv_quad_sum(u.d_w2[r]);
        if (own % 4 == 0) {
            out[HIDDEN * NI + unit + 8 * r] = d_bias;
            out[HIDDEN * (NI + 1) + unit + 8 * r] = d_w2;
        }
    }
#endif
}

// A thread adds two neighbours; count is even.
__global__ void total_kernel(const float *partial, int n_part, int64_t count, int64_t stride,
                             float *out) {
    kv_follow();
    const int64_t i = 2 * (blockIdx.x * (int64_t)blockDim.x + threadIdx.x), lane = blockIdx.y;
    if (i >= count) return;
    const float *from = partial + lane * n_part * count + i;
    float2 sum = {};
#pragma unroll 8
    for (int p = 0; p < n_part; p++) {
        const float2 x = *reinterpret_cast<const float2 *>(from + p * count);
        sum.x += x.x;
        sum.y += x.y;
    }
    out[lane * stride + i] = sum.x;
    out[lane * stride + i + 1] = sum.y;
}

mlp_args arguments(const kv_gpu_net *net, const float *param) {
    mlp_args a = {};
    a.bias = param + net->layout.part[KV_NET_MLP_B1].at;
    a.w2 = param + net->layout.part[KV_NET_MLP_W2].at;
    a.token = net->at<int32_t>(NET_TOKEN);
    a.n_param = net->layout.n_param;
    a.n_row = net->n_row;
    a.n_token = net->n_token;
    return a;
}

kv_status maps(const kv_gpu_net *net, int w_rows, CUtensorMap *x, CUtensorMap *w) {
    const int ni = net->spec.n_input;
    KV_RETURN(kv_tile_map_of(net->at<bf16>(NET_X), KV_BF16, net->n_row, ni, ni, net->n_lane,
                             (int64_t)net->n_row * ni, ROWS, ni, x));
    return kv_tile_map_of(net->part<bf16>(KV_NET_MLP_W1), KV_BF16, HIDDEN, ni, ni, net->n_lane,
                          net->n_packed, w_rows, ni, w);
}

template <int NI> kv_status forward(kv_gpu_net *net, const float *param, float *rhat) {
    kv_gpu *g = net->gpu;
    CUtensorMap x, w;
    mlp_args a = arguments(net, param);
    a.rhat = rhat;
    KV_RETURN(maps(net, HIDDEN, &x, &w));
    KV_RETURN(kv_allow_shared(g, forward_kernel<NI>, sizeof(forward_shared<NI>)));
    const dim3 grid((unsigned)max(1, g->sm_count / net->n_lane), (unsigned)net->n_lane);
    return kv_net_launch(g, forward_kernel<NI>, grid, THREADS, sizeof(forward_shared<NI>), x, w, a);
}

template <int NI>
kv_status backward(kv_gpu_net *net, const float *param, const float *e, float *grad) {
    kv_gpu *g = net->gpu;
    CUtensorMap x, w;
    const int parts = max(1, g->sm_count * OWN / HIDDEN / net->n_lane);
    const int64_t count = HIDDEN * (NI + 2); // W1, b1 and W2 follow each other
    mlp_args a = arguments(net, param);
    a.e = e;
    KV_RETURN(maps(net, ROWS, &x, &w));
    KV_RETURN(net->reserve(NET_PARTIAL, (size_t)(net->n_lane * parts * count) * 4));
    a.partial = net->at<float>(NET_PARTIAL);
    KV_RETURN(kv_allow_shared(g, backward_kernel<NI>, sizeof(backward_shared<NI>)));
    const dim3 grid((unsigned)parts, HIDDEN / OWN, (unsigned)net->n_lane);
    KV_RETURN(
        kv_net_launch(g, backward_kernel<NI>, grid, THREADS, sizeof(backward_shared<NI>), x, w, a));
    return kv_fused_total(net, a.partial, parts, count, net->layout.part[KV_NET_MLP_W1].at, grad);
}

} // namespace

kv_status kv_fused_total(kv_gpu_net *net, const float *partial, int n_part, int64_t count,
                         int64_t at, float *grad) {
    return kv_net_launch(net->gpu, total_kernel,
                         dim3((unsigned)((count + 255) / 256), (unsigned)net->n_lane), 128, 0,
                         partial, n_part, count, net->layout.n_param, grad + at);
}

kv_status kv_fused_mlp_forward(kv_gpu_net *net, const float *param, float *rhat) {
    return (net->spec.n_input == 256 ? forward<256> : forward<128>)(net, param, rhat);
}
kv_status kv_fused_mlp_backward(kv_gpu_net *net, const float *param, const float *e, float *grad) {
    return (net->spec.n_input == 256 ? backward<256> : backward<128>)(net, param, e, grad);
}
