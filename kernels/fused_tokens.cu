// Projections and gates of a recurrent scorer over all rows, and the gradients of their weights: two products with the features
// (or the input) as streamed operand, the gates' thin ones beside them in plain fp32 arithmetic.
#include "kernels/fused.cuh"

namespace {

using namespace fused;
using bf16 = __nv_bfloat16;

constexpr int COLUMNS = 192;     // projections of a block: half of the three times 128
constexpr int ALL_THREADS = 512; // four warpgroups

struct token_args {
    const float
        *gate_w; // [2][NI] of each lane, lanes n_param apart; null: gates read something else
    const int32_t *token;
    const float2 *d_gate;
    bf16 *project;
    float2 *pre;
    float *partial;
    int64_t n_param;
    int n_row, first_row; // rows before first_row hold nothing
};

// ---- forward: q~, k~, v~ of every row, pre-activations of its gates without their biases ----

template <int NI> struct project_shared {
    static constexpr int STAGES = NI == 256 ? 4 : 8;
    alignas(1024) uint16_t w[COLUMNS * NI];
    alignas(1024) uint16_t x[STAGES][ROWS * NI];
    uint64_t w_full, full[STAGES], empty[STAGES];
};

// Neighbouring columns of a row in a tile.
template <int N>
__device__ __forceinline__ void load_columns(float (&x)[N], void *tile, int row, int column) {
    const uint2 *at = reinterpret_cast<const uint2 *>(in_tile<ROWS>(tile, row, column));
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        const uint2 w = at[i];
        const float2 a = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&w.x)),
                     b = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&w.y));
        x[4 * i] = a.x;
        x[4 * i + 1] = a.y;
        x[4 * i + 2] = b.x;
        x[4 * i + 3] = b.y;
    }
}

// A warp has 16 rows of the tile, a thread NI / 32 columns; sums of 16 rows and two gates over the warp's threads end in thread
// 2 row + gate.
template <int NI>
__device__ __forceinline__ void project_gates(project_shared<NI> &s, const token_args &a, int lane,
                                              const share &work) {
    constexpr int STAGES = project_shared<NI>::STAGES, EACH = NI / 32;
    const int own = (int)threadIdx.x % 32, first = (int)threadIdx.x % 128 / 32 * 16;
    const float *from = a.gate_w + lane * a.n_param + EACH * own;
    float w[2][EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) w[0][j] = from[j], w[1][j] = from[NI + j];
    hopper::ring<STAGES> r;
    for (int i = 0; i < work.count; i++, r.next()) {
        hopper::barrier_wait(&s.full[r.slot], r.parity);
        float sum[32];
#pragma unroll
        for (int row = 0; row < 16; row++) {
            float x[EACH];
            load_columns<EACH>(x, s.x[r.slot], first + row, EACH * own);
            sum[2 * row] = sum[2 * row + 1] = 0;
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                sum[2 * row] = fmaf(x[j], w[0][j], sum[2 * row]);
                sum[2 * row + 1] = fmaf(x[j], w[1][j], sum[2 * row + 1]);
            }
        }
        __syncwarp();
        if (own == 0) hopper::barrier_arrive(&s.empty[r.slot]);
#pragma unroll
        for (int half = 16; half >= 1; half /= 2) {
            const bool high = own & half;
#pragma unroll
            for (int j = 0; j < half; j++) {
                const float sent = high ? sum[j] : sum[j + half],
                            kept = high ? sum[j + half] : sum[j];
                sum[j] = kept + __shfl_xor_sync(~0u, sent, half);
            }
        }
        reinterpret_cast<float *>(a.pre + (int64_t)lane * a.n_row + a.first_row +
                                  (work.first + i) * ROWS + first)[own] = sum[0];
    }
}

template <int NI>
__global__ __launch_bounds__(ALL_THREADS,
                             1) void project_kernel(const __grid_constant__ CUtensorMap xm,
                                                    const __grid_constant__ CUtensorMap wm,
                                                    const token_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ __align__(1024) char raw[];
    project_shared<NI> &s = *reinterpret_cast<project_shared<NI> *>(raw);
    constexpr int STAGES = project_shared<NI>::STAGES;
    const int lane = (int)blockIdx.z, block = (int)blockIdx.y, team = uniform(threadIdx.x / 128);
    const bool gates = a.gate_w && block == 0;
    const share work((a.n_row - a.first_row) / ROWS, (int)gridDim.x, (int)blockIdx.x);
    if (threadIdx.x == 0) {
        barrier_init(&s.w_full, 1);
        for (int i = 0; i < STAGES; i++)
            barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], gates ? 8 : 4);
        barrier_init_fence();
    }
    __syncthreads();
    if (team == 3) {
        registers_shrink<40>();
        if (threadIdx.x % 128 != 0) return;
        barrier_expect(&s.w_full, COLUMNS * NI * 2);
        load_tile(s.w, &wm, block * COLUMNS, lane, &s.w_full);
        ring<STAGES> r;
        for (int i = 0; i < work.count; i++, r.next()) {
            barrier_wait(&s.empty[r.slot], r.parity ^ 1);
            barrier_expect(&s.full[r.slot], ROWS * NI * 2);
            load_tile(s.x[r.slot], &xm, a.first_row + (work.first + i) * ROWS, lane,
                      &s.full[r.slot]);
        }
        return;
    }
    if (team == 2) {
        registers_shrink<80>();
        if (gates) project_gates<NI>(s, a, lane, work);
        return;
    }
    registers_grow<160>();
    const int own = (int)threadIdx.x % 32, line = (int)threadIdx.x % 128 / 32 * 16 + own / 4;
    barrier_wait(&s.w_full, 0);
    ring<STAGES> r;
    if (team == 1) r.next();
    for (int i = team; i < work.count; i += 2, r.next(), r.next()) {
        const uint32_t slot = r.slot;
        const int row = a.first_row + (work.first + i) * ROWS + line;
        const bool real0 = a.token[row] >= 0, real1 = a.token[row + 8] >= 0;
        barrier_wait(&s.full[slot], r.parity);
        const uint64_t xd = tile_k_major(s.x[slot]), wd = tile_k_major(s.w);
        float z0[64], z1[32];
        mma_begin();
#pragma unroll
        for (int k = 0; k < NI / 16; k++) {
            const uint64_t x = xd + step_k_major(k, ROWS), w = wd + step_k_major(k, COLUMNS);
            mma<bf16, 128>::ss(z0, x, w, k > 0);
            mma<bf16, 64>::ss(z1, x, w + (128 * 128 >> 4), k > 0);
        }
        mma_commit();
        mma_wait<0>();
        pin(z0);
        pin(z1);
        if (own == 0) barrier_arrive(&s.empty[slot]);
        bf16 *to = a.project + ((int64_t)lane * a.n_row + row) * (2 * COLUMNS) + block * COLUMNS;
        store_rows(z0, real0, real1, to, 2 * COLUMNS);
        store_rows(z1, real0, real1, to + 128, 2 * COLUMNS);
    }
#endif
}

// ---- backward: sums over rows of gradient of the projections (or the gates) times feature ----

template <int NI> struct gradient_shared {
    static constexpr int STAGES = 4;
    alignas(1024) uint16_t d[STAGES][ROWS * COLUMNS];
    alignas(1024) uint16_t x[STAGES][ROWS * NI];
    float gate[2 * NI + 2]; // sums of one warp
    uint64_t full[STAGES], empty[STAGES];
};

// Gradients of the gates' weights and biases by two warps: a warp has 32 rows of the tile, a thread NI / 32 columns. d_gate: of the
// first row.
template <int NI>
__device__ __forceinline__ void gate_gradient(gradient_shared<NI> &s, const float2 *d_gate,
                                              int count, int warp, float *out) {
    constexpr int STAGES = gradient_shared<NI>::STAGES, EACH = NI / 32;
    const int own = (int)threadIdx.x % 32;
    float sum[2][EACH] = {};
    float2 bias = {};
    hopper::ring<STAGES> r;
    for (int i = 0; i < count; i++, r.next()) {
        const float2 d = d_gate[i * ROWS + warp * 32 + own];
        bias.x += d.x;
        bias.y += d.y;
        hopper::barrier_wait(&s.full[r.slot], r.parity);
#pragma unroll 2
        for (int row = 0; row < 32; row++) {
            float x[EACH];
            load_columns<EACH>(x, s.x[r.slot], warp * 32 + row, EACH * own);
            const float gi = __shfl_sync(~0u, d.x, row), gf = __shfl_sync(~0u, d.y, row);
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                sum[0][j] = fmaf(gi, x[j], sum[0][j]);
                sum[1][j] = fmaf(gf, x[j], sum[1][j]);
            }
        }
        __syncwarp();
        if (own == 0) hopper::barrier_arrive(&s.empty[r.slot]);
    }
    bias = make_float2(kv_warp_sum(bias.x), kv_warp_sum(bias.y));
    float *other = s.gate + EACH * own;
    if (warp == 1) {
#pragma unroll
        for (int j = 0; j < EACH; j++) other[j] = sum[0][j], other[NI + j] = sum[1][j];
        if (own == 0) s.gate[2 * NI] = bias.x, s.gate[2 * NI + 1] = bias.y;
    }
    asm volatile("bar.sync 1, 64;" ::: "memory");
    if (warp == 1) return;
    out += EACH * own;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        out[j] = sum[0][j] + other[j];
        out[NI + j] = sum[1][j] + other[NI + j];
    }
    if (own == 0) {
        out[2 * NI] = bias.x + s.gate[2 * NI];
        out[2 * NI + 1] = bias.y + s.gate[2 * NI + 1];
    }
}

// Sum of a 64 x N part of the gradient, rows of operand A at `unit`, into the block's partial.
template <int N>
__device__ __forceinline__ void store_part(const float (&x)[N / 2], float *out, int unit,
                                           int column, int ld) {
    const int own = (int)threadIdx.x % 32;
    float *to = out + (int64_t)(unit + (int)threadIdx.x % 128 / 32 * 16 + own / 4) * ld + column +
                2 * (own % 4);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int j = 0; j < N / 8; j++)
            *reinterpret_cast<float2 *>(to + 8 * r * ld + 8 * j) =
                make_float2(x[4 * j + 2 * r], x[4 * j + 2 * r + 1]);
}

// Three groups of 64 projections for two warpgroups: each sums one group, and its half of the features for the group between.
template <int NI>
__global__ __launch_bounds__(THREADS,
                             1) void gradient_kernel(const __grid_constant__ CUtensorMap xm,
                                                     const __grid_constant__ CUtensorMap dm,
                                                     const token_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ __align__(1024) char raw[];
    gradient_shared<NI> &s = *reinterpret_cast<gradient_shared<NI> *>(raw);
    constexpr int STAGES = gradient_shared<NI>::STAGES, PARTS = NI / 128, HALF = NI / 2;
    const int lane = (int)blockIdx.z, block = (int)blockIdx.y, team = uniform(threadIdx.x / 128);
    const bool gates = a.d_gate && block == 0;
    const share work((a.n_row - a.first_row) / ROWS, (int)gridDim.x, (int)blockIdx.x);
    const int64_t count = 2 * COLUMNS * NI + (a.d_gate ? 2 * NI + 2 : 0);
    float *out = a.partial + ((int64_t)lane * gridDim.x + blockIdx.x) * count;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++)
            barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], gates ? 10 : 8);
        barrier_init_fence();
    }
    __syncthreads();
    if (team == 2) {
        registers_shrink<56>();
        const int thread = (int)threadIdx.x % 128 - 32;
        if (gates && thread >= 0 && thread < 64)
            gate_gradient<NI>(s,
                              a.d_gate + (int64_t)lane * a.n_row + a.first_row + work.first * ROWS,
                              work.count, thread / 32, out + 2 * COLUMNS * NI);
        if (thread != -32) return;
        ring<STAGES> r;
        for (int i = 0; i < work.count; i++, r.next()) {
            const int row = a.first_row + (work.first + i) * ROWS;
            barrier_wait(&s.empty[r.slot], r.parity ^ 1);
            barrier_expect(&s.full[r.slot], ROWS * (NI + COLUMNS) * 2);
            load_tile(s.x[r.slot], &xm, row, lane, &s.full[r.slot]);
            load_tile(s.d[r.slot], &dm, row, lane, &s.full[r.slot], block * (COLUMNS / 64));
        }
        return;
    }
    registers_grow<224>();
    float own[PARTS][64] = {}, between[HALF / 2] = {};
    ring<STAGES> r;
    for (int i = 0; i < work.count; i++, r.next()) {
        const uint32_t slot = r.slot;
        barrier_wait(&s.full[slot], r.parity);
        const uint64_t dd = tile_n_major(s.d[slot], 0), xd = tile_n_major(s.x[slot], ROWS * 128),
                       mine = dd + (uint64_t)(team * 2 * ROWS * 128 >> 4),
                       middle = dd + (ROWS * 128 >> 4),
                       half = xd + (uint64_t)(team * (HALF / 64) * ROWS * 128 >> 4);
        mma_begin();
#pragma unroll
        for (int k = 0; k < ROWS / 16; k++) {
#pragma unroll
            for (int h = 0; h < PARTS; h++)
                mma<bf16, 128>::template ss<1, 1>(own[h], mine + step_n_major(k),
                                                  xd + (h * 2 * ROWS * 128 >> 4) + step_n_major(k),
                                                  1);
            mma<bf16, HALF>::template ss<1, 1>(between, middle + step_n_major(k),
                                               half + step_n_major(k), 1);
        }
        mma_commit();
        mma_wait<0>();
#pragma unroll
        for (int h = 0; h < PARTS; h++) pin(own[h]);
        pin(between);
        if (threadIdx.x % 32 == 0) barrier_arrive(&s.empty[slot]);
    }
#pragma unroll
    for (int h = 0; h < PARTS; h++)
        store_part<128>(own[h], out, block * COLUMNS + team * 128, 128 * h, NI);
    store_part<HALF>(between, out, block * COLUMNS + 64, team * HALF, NI);
#endif
}

token_args arguments(const kv_gpu_net *net) {
    token_args a = {};
    a.token = net->at<int32_t>(NET_TOKEN);
    a.n_param = net->layout.n_param;
    a.n_row = net->n_row;
    return a;
}

kv_status feature_map(const kv_gpu_net *net, CUtensorMap *x) {
    const int wide = net->wide();
    return kv_tile_map_of(net->at<bf16>(net->spec.n_feature ? NET_F : NET_X), KV_BF16, net->n_row,
                          wide, wide, net->n_lane, (int64_t)net->n_row * wide, ROWS, wide, x);
}

template <int NI> kv_status project(kv_gpu_net *net, const float *param) {
    kv_gpu *g = net->gpu;
    CUtensorMap x, w;
    token_args a = arguments(net);
    a.project = net->at<bf16>(NET_PROJECT);
    a.pre = net->at<float2>(NET_PRE);
    a.gate_w = net->spec.hidden_gate ? nullptr : param + net->layout.part[KV_NET_GATE_I_W].at;
    KV_RETURN(feature_map(net, &x));
    KV_RETURN(kv_tile_map_of(net->part<bf16>(KV_NET_PHI_Q), KV_BF16, 2 * COLUMNS, NI, NI,
                             net->n_lane, net->n_packed, COLUMNS, NI, &w));
    KV_RETURN(kv_allow_shared(g, project_kernel<NI>, sizeof(project_shared<NI>)));
    const dim3 grid((unsigned)max(1, g->sm_count / 2 / net->n_lane), 2, (unsigned)net->n_lane);
    project_kernel<NI><<<grid, ALL_THREADS, sizeof(project_shared<NI>), g->stream>>>(x, w, a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

template <int NI> kv_status gradients(kv_gpu_net *net, float *grad) {
    kv_gpu *g = net->gpu;
    CUtensorMap x, d;
    const int parts = max(1, g->sm_count / 2 / net->n_lane), np = 2 * COLUMNS;
    const bool gates = !net->spec.hidden_gate;
    // The projections, both gates' weights and both biases follow each other.
    const int64_t count = np * NI + (gates ? 2 * NI + 2 : 0);
    token_args a = arguments(net);
    a.first_row = net->slack;
    a.d_gate = gates ? net->at<float2>(NET_D_GATE) : nullptr;
    KV_RETURN(net->reserve(NET_PARTIAL, (size_t)(net->n_lane * parts * count) * 4));
    a.partial = net->at<float>(NET_PARTIAL);
    KV_RETURN(feature_map(net, &x));
    KV_RETURN(kv_tile_map_of(net->at<bf16>(NET_D_NARROW), KV_BF16, net->n_row, np, np, net->n_lane,
                             (int64_t)net->n_row * np, ROWS, COLUMNS, &d));
    KV_RETURN(kv_allow_shared(g, gradient_kernel<NI>, sizeof(gradient_shared<NI>)));
    gradient_kernel<NI><<<dim3((unsigned)parts, 2, (unsigned)net->n_lane), THREADS,
                          sizeof(gradient_shared<NI>), g->stream>>>(x, d, a);
    KV_CUDA(cudaGetLastError());
    return kv_fused_total(net, a.partial, parts, count, net->layout.part[KV_NET_PHI_Q].at, grad);
}

} // namespace

kv_status kv_fused_project(kv_gpu_net *net, const float *param) {
    return (net->wide() == 256 ? project<256> : project<128>)(net, param);
}
kv_status kv_fused_project_backward(kv_gpu_net *net, float *grad) {
    return (net->wide() == 256 ? gradients<256> : gradients<128>)(net, grad);
}
