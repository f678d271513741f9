// Projections and gates of a recurrent scorer over all rows, and the gradients of their weights: two products with the features
// (or the input) as streamed operand, the gates' thin ones beside them by mma.sync, their fp32 operand in two bf16 parts.
#include "kernels/fused.cuh"
#include "kernels/portable.cuh"

namespace {

using namespace fused;
using bf16 = __nv_bfloat16;

constexpr int COLUMNS = 192;     // projections of a block: half of the three times 128
constexpr int ALL_THREADS = 512; // four warpgroups

struct token_args {
    // [2][NI] of each lane, lanes n_param apart; null: gates read something else
    const float *gate_w;
    const int32_t *token;
    const float2 *d_gate;
    // [lane][row] gradient at the score that the row reads; the query's row lies `delay` before
    const float *up;
    bf16 *project;
    float2 *pre;
    float *partial;
    int64_t n_param;
    int n_row, first_row, delay; // rows before first_row hold nothing
};

// ---- forward: q~, k~, v~ of every row, pre-activations of its gates without their biases ----

template <int NI> struct project_shared {
    static constexpr int STAGES = NI == 256 ? 4 : 8;
    alignas(1024) uint16_t w[COLUMNS * NI];
    alignas(1024) uint16_t x[STAGES][ROWS * NI];
    uint64_t w_full, full[STAGES], empty[STAGES];
};

// fp32 numbers as operand of thin products: bf16 parts that add up to 2^-17. `part` 0: the larger ones of a and b, 1: the rest.
__device__ __forceinline__ uint32_t split(float a, float b, int part) {
    const float ha = __bfloat162float(__float2bfloat16(a)),
                hb = __bfloat162float(__float2bfloat16(b));
    return part ? pair(a - ha, b - hb) : pair(ha, hb);
}

// A warp has 16 rows of the tile. Columns of the thin operand: input gate, what rounding left of it, forget gate, its rest.
template <int NI>
__device__ __forceinline__ void project_gates(project_shared<NI> &s, const token_args &a, int lane,
                                              const share &work) {
    constexpr int STAGES = project_shared<NI>::STAGES;
    const int own = (int)threadIdx.x % 32, first = (int)threadIdx.x % 128 / 32 * 16, t = own % 4,
              column = own / 4;
    const float *from = a.gate_w + lane * a.n_param + column / 2 * NI + 2 * t;
    uint32_t w[NI / 16][2] = {};
    if (column < 4)
#pragma unroll
        for (int k = 0; k < NI / 16; k++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                w[k][h] = split(from[16 * k + 8 * h], from[16 * k + 8 * h + 1], column % 2);
    const uint32_t at = fragment_at((uint32_t)(first + own % 16), (uint32_t)own / 16);
    hopper::ring<STAGES> r;
    for (int i = 0; i < work.count; i++, r.next()) {
        const uint32_t tile = hopper::shared_address(s.x[r.slot]);
        hopper::barrier_wait(&s.full[r.slot], r.parity);
        float sum[2][4] = {};
#pragma unroll
        for (int k = 0; k < NI / 16; k++) {
            uint32_t x[4];
            load_matrices<false>(x, tile + (at ^ (k % 4 * 32)) + k / 4 * ROWS * 128);
            portable::mma16(sum[k % 2], x, w[k][0], w[k][1], bf16());
        }
        // Bulk copies must not overtake the loads of the last fragments, which may still be on their way.
        hopper::proxy_fence();
        __syncwarp();
        if (own == 0) hopper::barrier_arrive(&s.empty[r.slot]);
        if (t >= 2) continue;
        float *to = reinterpret_cast<float *>(a.pre + (int64_t)lane * a.n_row + a.first_row +
                                              (work.first + i) * ROWS + first + column);
        to[t] = sum[0][0] + sum[1][0] + (sum[0][1] + sum[1][1]);
        to[16 + t] = sum[0][2] + sum[1][2] + (sum[0][3] + sum[1][3]);
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
        init_ring(s.full, s.empty, 1, gates ? 8 : 4);
        barrier_init_fence();
    }
    __syncthreads();
    kv_follow();
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
    alignas(8) uint32_t gate[4][4][32]; // of each warp: gradients of the gates, pairs of rows
    float2 bias[32];                    // their sums over rows, in parts
    uint64_t full[STAGES], scaled[STAGES], empty[STAGES];
};

// Rows of the queries' gradients, the first 128 columns of a tile, times `up` of rows thread / 8 + 16 j.
__device__ __forceinline__ void scale_queries(uint16_t *tile, const float (&up)[4]) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        uint4 *at = reinterpret_cast<uint4 *>(tile) + threadIdx.x % 128 + 128 * n;
        uint4 x = *at;
        uint32_t *word = reinterpret_cast<uint32_t *>(&x);
#pragma unroll
        for (int i = 0; i < 4; i++) word[i] = scale_pair(word[i], up[n % 4], up[n % 4]);
        *at = x;
        if (n % 2) asm volatile("" ::: "memory"); // few registers: two at a time
    }
}

// The third warpgroup: its first thread loads the tiles. Where the block has the queries, their rows are scaled, and with `gates`
// their gradients are multiplied with the features: gradients of the gates' weights, of which a warp has a quarter of the columns,
// and biases. row: the first one. Positions are computed again in every round: registers are few.
template <int NI, class F>
__device__ __forceinline__ void feed(gradient_shared<NI> &s, const token_args &a, int64_t row,
                                     bool queries, bool gates, int count, float *out, F load) {
    constexpr int STAGES = gradient_shared<NI>::STAGES, PAIRS = NI / 64; // 16 columns each
    const int thread = (int)threadIdx.x % 128;
    if (!queries && thread >= 32) return;
    if (thread == 0)
        for (int i = 0; i < min(STAGES, count); i++) load(i, i);
    float sum[PAIRS][4] = {}, up[4];
    if (thread < 32) s.bias[thread] = make_float2(0, 0);
    const auto take = [&](int i) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            up[j] = a.up[row + a.delay + i * ROWS + again(thread) / 8 + 16 * j];
    };
    if (queries && a.up) take(0);
    hopper::ring<STAGES> r, before;
    for (int i = 0; i < count; i++, r.next()) {
        if (queries) {
            hopper::barrier_wait(&s.full[r.slot], r.parity);
            if (a.up) scale_queries(s.d[r.slot], up);
            hopper::proxy_fence();
            __syncwarp();
            if (again(thread) % 32 == 0) hopper::barrier_arrive(&s.scaled[r.slot]);
            if (a.up && i + 1 < count) take(i + 1);
        }
        if (gates) {
            const int warp = again(thread) / 32, own = again(thread) % 32, t = own % 4,
                      gate = own / 4; // column of the thin operand, as in project_gates
            // Of rows 2 own and 2 own + 1.
            const float4 d = reinterpret_cast<const float4 *>(a.d_gate + row + i * ROWS)[own];
            __syncwarp();
            if (!warp)
                s.bias[own] = make_float2(s.bias[own].x + (d.x + d.z), s.bias[own].y + (d.y + d.w));
#pragma unroll
            for (int g = 0; g < 4; g++)
                s.gate[warp][g][own] = split(g < 2 ? d.x : d.y, g < 2 ? d.z : d.w, g % 2);
            __syncwarp();
            // x transposed: rows own % 8 and 8 (own / 16) of a k-step, columns 8 (own / 8) on of the warp's 16 in a pair.
            const uint32_t at = fragment_at((uint32_t)(own % 8 + own / 16 * 8),
                                            (uint32_t)(own / 8 % 2 + NI / 4 * warp % 64 / 8)),
                           tile = hopper::shared_address(s.x[r.slot]) +
                                  (uint32_t)(NI / 4 * warp / 64 * ROWS * 128);
#pragma unroll 1
            for (int k = 0; k < ROWS / 16; k++) {
                uint32_t part[2] = {};
                if (gate < 4) {
                    part[0] = s.gate[warp][gate][8 * k + t];
                    part[1] = s.gate[warp][gate][8 * k + 4 + t];
                }
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    uint32_t x[4];
                    load_matrices<true>(x, tile + (at ^ (p * 32)) + k * 16 * 128);
                    portable::mma16(sum[p], x, part[0], part[1], bf16());
                }
            }
            __syncwarp();
        }
        if (queries) {
            hopper::proxy_fence(); // as in project_gates
            __syncwarp();
            if (again(thread) % 32 == 0) hopper::barrier_arrive(&s.empty[r.slot]);
        }
        // The slot before: the products may still be at this one, while the next one is scaled.
        if (again(thread) == 0 && i && i - 1 + STAGES < count) {
            hopper::barrier_wait(&s.empty[before.slot], before.parity);
            load(i - 1 + STAGES, before.slot);
        }
        before = r;
        __syncwarp();
    }
    if (!gates) return;
    const int warp = thread / 32, own = thread % 32, gate = own % 4;
    if (gate < 2)
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            float *to = out + gate * NI + NI / 4 * warp + 16 * p + own / 4;
            to[0] = sum[p][0] + sum[p][1];
            to[8] = sum[p][2] + sum[p][3];
        }
    if (warp) return;
    const float in = kv_warp_sum(s.bias[own].x), keep = kv_warp_sum(s.bias[own].y);
    if (own == 0) out[2 * NI] = in, out[2 * NI + 1] = keep;
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
    const bool queries = block == 0, gates = a.d_gate && queries;
    const share work((a.n_row - a.first_row) / ROWS, (int)gridDim.x, (int)blockIdx.x);
    const int64_t count = 2 * COLUMNS * NI + (a.d_gate ? 2 * NI + 2 : 0);
    float *out = a.partial + ((int64_t)lane * gridDim.x + blockIdx.x) * count;
    if (threadIdx.x == 0) {
        init_ring(s.full, s.empty, 1, queries ? 12 : 8);
        for (int i = 0; i < STAGES; i++) barrier_init(&s.scaled[i], 4);
        barrier_init_fence();
    }
    __syncthreads();
    kv_follow();
    if (team == 2) {
        registers_shrink<56>();
        const auto load = [&](int i, uint32_t slot) {
            const int row = a.first_row + (work.first + i) * ROWS;
            barrier_expect(&s.full[slot], ROWS * (NI + COLUMNS) * 2);
            load_tile(s.x[slot], &xm, row, lane, &s.full[slot]);
            load_tile(s.d[slot], &dm, row, lane, &s.full[slot], block * (COLUMNS / 64));
        };
        feed<NI>(s, a, (int64_t)lane * a.n_row + a.first_row + work.first * ROWS, queries, gates,
                 work.count, out + 2 * COLUMNS * NI, load);
        return;
    }
    registers_grow<224>();
    float own[PARTS][64] = {}, between[HALF / 2] = {};
    ring<STAGES> r;
    for (int i = 0; i < work.count; i++, r.next()) {
        const uint32_t slot = r.slot;
        barrier_wait(queries ? &s.scaled[slot] : &s.full[slot], r.parity);
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
    const int unit = block * COLUMNS + (int)threadIdx.x % 128 / 32 * 16;
#pragma unroll
    for (int h = 0; h < PARTS; h++)
        store_sums<128>(own[h], out + (int64_t)(unit + team * 128) * NI + 128 * h, NI);
    store_sums<HALF>(between, out + (int64_t)(unit + 64) * NI + team * HALF, NI);
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
    return kv_net_launch(g, project_kernel<NI>, grid, ALL_THREADS, sizeof(project_shared<NI>), x, w,
                         a);
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
    a.delay = net->delay();
    a.up = net->spec.n_feature ? nullptr : net->at<float>(NET_UP);
    a.d_gate = gates ? net->at<float2>(NET_D_GATE) : nullptr;
    KV_RETURN(net->reserve(NET_PARTIAL, (size_t)(net->n_lane * parts * count) * 4));
    a.partial = net->at<float>(NET_PARTIAL);
    KV_RETURN(feature_map(net, &x));
    KV_RETURN(kv_tile_map_of(net->at<bf16>(NET_D_NARROW), KV_BF16, net->n_row, np, np, net->n_lane,
                             (int64_t)net->n_row * np, ROWS, COLUMNS, &d));
    KV_RETURN(kv_allow_shared(g, gradient_kernel<NI>, sizeof(gradient_shared<NI>)));
    KV_RETURN(kv_net_launch(g, gradient_kernel<NI>, dim3((unsigned)parts, 2, (unsigned)net->n_lane),
                            THREADS, sizeof(gradient_shared<NI>), x, d, a));
    return kv_fused_total(net, a.partial, parts, count, net->layout.part[KV_NET_PHI_Q].at, grad);
}

} // namespace

kv_status kv_fused_project(kv_gpu_net *net, const float *param) {
    return (net->wide() == 256 ? project<256> : project<128>)(net, param);
}
kv_status kv_fused_project_backward(kv_gpu_net *net, float *grad) {
    return (net->wide() == 256 ? gradients<256> : gradients<128>)(net, grad);
}
