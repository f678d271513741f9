// The memory's readout, chunk after chunk of a segment: scores, and all of the backward pass that does not need the gradient at the
// score but is proportional to it: gradient at num (slope), at the queries, silu(h), each for a gradient of 1.
#include "kernels/fused_memory.cuh"

namespace {

using namespace fused;

struct output_shared {
    struct {
        alignas(1024) uint16_t k[TILE];
        alignas(1024) uint16_t v[TILE];
        alignas(1024) uint16_t memory[D * D]; // at the chunk's start
    } chunk[2];                               // in turn
    alignas(1024) uint16_t q[2][HALF];        // of each warpgroup
    struct {
        key_lines lines;
        uint64_t full, empty, written, seen;
    } turn[2];
    alignas(16) float readout[D];
    uint64_t q_full[2], q_empty[2];
};

__device__ __forceinline__ void feed(output_shared &s, const segment &g, const CUtensorMap *qm,
                                     const CUtensorMap *km, const CUtensorMap *vm,
                                     const memory_args &a) {
    using namespace hopper;
    ring<2> r;
    for (int i = 0; i < g.count; i++, r.next()) {
        const int chunk = g.chunk(i, false), row = g.lane * a.n_row + chunk * CHUNK;
        for (int w = 0; w < 2; w++) {
            barrier_wait(&s.q_empty[w], (i & 1) ^ 1);
            barrier_expect(&s.q_full[w], HALF * 2);
            load_tile(s.q[w], qm, row - a.delay + 64 * w, 0, &s.q_full[w]);
        }
        auto &to = s.chunk[r.slot];
        auto &turn = s.turn[r.slot];
        barrier_wait(&turn.empty, r.parity ^ 1);
        barrier_expect(&turn.full, 2 * TILE * 2 + lines_bytes(turn.lines));
        load_tile(to.k, km, row, 0, &turn.full);
        load_tile(to.v, vm, row, 0, &turn.full);
        load_lines(&turn.lines, a, g.lane, chunk, &turn.full);
    }
}

// Of the thread's two rows, from num: the norm, the score, silu(h) into memory, and the gradient at num (maths.md 6.6) as operand and
// into memory.
__device__ __forceinline__ void read_out(const float (&num)[64], const memory_args &a, int lane,
                                         int in_lane, const float *readout, const int (&token)[2],
                                         const float (&floor)[2], uint32_t (&slope)[32]) {
    float inverse[2], along[2] = {}, score[2] = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float size = 0;
#pragma unroll
        for (int j = 0; j < 16; j++)
            size = fmaf(num[4 * j + 2 * r], num[4 * j + 2 * r],
                        fmaf(num[4 * j + 2 * r + 1], num[4 * j + 2 * r + 1], size));
        size = kv_quad_sum(size);
        // A row that reads for no token has neither.
        inverse[r] =
            token[r] < 0 ? 0.0f : rsqrtf(fmaf(size, 1.0f / D, 1e-6f * floor[r] * floor[r]));
    }
    const uint32_t row = (uint32_t)(lane * a.n_row + in_lane);
    const int any = __any_sync(~0u, token[0] >= 0 || token[1] >= 0);
#pragma unroll
    for (int part = 0; part < 4; part++) {
        uint32_t y[2][4] = {};
        // Branches also keep ptxas from mixing the parts, for which registers would not do.
        if (again(any)) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = 4 * part + i;
                const float2 w = *reinterpret_cast<const float2 *>(readout + 8 * j);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float value[2], d[2];
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        const float h = num[4 * j + 2 * r + c] * inverse[r], by = c ? w.y : w.x;
                        silu_half(0.5f * h, &value[c], &d[c]);
                        score[r] = fmaf(value[c], by, score[r]);
                        d[c] *= by;
                        along[r] = fmaf(d[c], h, along[r]);
                    }
                    y[r][i] = pair(value[0], value[1]);
                    slope[2 * j + r] = pair(d[0], d[1]);
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) slope[8 * part + i] = 0;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) store_quad(y[r], a.head + (row + 8 * r) * D + 32 * part);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = kv_quad_sum(score[r]);
        if ((int)threadIdx.x % 4 != 0 || token[r] < 0) continue;
        float *to = &a.rhat[(int64_t)lane * a.n_token + token[r]];
        *to = a.add ? *to + sum : sum;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        // (slope - mean(slope h) h) / divisor, h = num / divisor
        const float total = kv_quad_sum(along[r]), by = inverse[r],
                    mean = total * (1.0f / D) * by * by;
        // q~.dq~ = num.slope, as num is linear in q~. With the slope as it was rounded: what rounding adds here and in k~.dk~ cancels in
        // the sums that the gates get.
        float product = 0;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const float2 x = wide_pair(slope[2 * j + r]);
            const float n0 = num[4 * j + 2 * r], n1 = num[4 * j + 2 * r + 1];
            slope[2 * j + r] = pair(fmaf(by, x.x, -mean * n0), fmaf(by, x.y, -mean * n1));
            const float2 used = wide_pair(slope[2 * j + r]);
            product = fmaf(used.x, n0, fmaf(used.y, n1, product));
        }
        product = kv_quad_sum(product);
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            const uint32_t word[4] = {slope[2 * j + r], slope[2 * j + 2 + r], slope[2 * j + 4 + r],
                                      slope[2 * j + 6 + r]};
            store_quad(word, a.slope + (row + 8 * r) * D + 8 * j);
        }
        if (threadIdx.x % 4 == 0) a.along[row + 8 * r] = product;
    }
    hopper::pin(slope);
}

// What the thread's two rows read of the memory at the chunk's start.
__device__ __forceinline__ void load_carried(const memory_args &a, const segment &g, int chunk,
                                             int line, float start, float (&carried)[2]) {
    const kv_chunk_lines &lines = lines_of(a, g, chunk);
#pragma unroll
    for (int r = 0; r < 2; r++) carried[r] = kv_exp2(lines.ahead[line + 8 * r] + start);
}

__global__ __launch_bounds__(THREADS, 1) void output_kernel(const __grid_constant__ CUtensorMap qm,
                                                            const __grid_constant__ CUtensorMap km,
                                                            const __grid_constant__ CUtensorMap vm,
                                                            const memory_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ __align__(1024) char raw[];
    output_shared &s = *reinterpret_cast<output_shared *>(raw);
    const int team = uniform(threadIdx.x / 128);
    const segment g(a);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(&s.turn[i].full, 1), barrier_init(&s.turn[i].empty, 8);
            barrier_init(&s.turn[i].written, 8), barrier_init(&s.turn[i].seen, 8);
            barrier_init(&s.q_full[i], 1), barrier_init(&s.q_empty[i], 4);
        }
        barrier_init_fence();
    }
    kv_follow();
    if (threadIdx.x < D) s.readout[threadIdx.x] = a.readout[g.lane * a.n_param + threadIdx.x];
    __syncthreads();
    if (team == 2) {
        registers_shrink<24>();
        if (threadIdx.x == 256) feed(s, g, &qm, &km, &vm, a);
        return;
    }
    registers_grow<240>();
    const int line = (int)(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4);
    float memory[64];
    load_memory(memory, a.segment + g.index() * (D * D));
    snapshot(memory, s.chunk[0].memory);
    publish(&s.turn[0].written);
    for (int i = 0; i < g.count; i++) {
        const int chunk = g.chunk(i, false), slot = i & 1;
        auto &now = s.chunk[slot];
        auto &turn = s.turn[slot];
        uint32_t weight[32];
        float num[64], floor[2];
        int token[2];
        const int in_lane = again(chunk) * CHUNK + again(line);
        {
            // Scalars of rows are asked for well ahead of their use here and below: they come from far.
            const kv_chunk_lines &lines = lines_of(a, g, chunk);
            const float ahead[2] = {lines.ahead[line], lines.ahead[line + 8]};
            barrier_wait(&s.q_full[team], i & 1);
            barrier_wait(&turn.full, i >> 1 & 1);
            {
                float x[64];
                {
                    uint32_t update[32], q[32];
                    load_operand(s.q[team], q);
                    load_update(now.k, turn.lines, update);
                    times_all(memory, turn.lines.fade);
                    multiply<1>(memory, update, now.v, true);
                    multiply<0>(x, q, now.k, false);
                    mma_wait<1>();
                    pin(memory);
                }
                // The next chunk's memory, while this chunk's is in use.
                if (turn.lines.closes) times_all(memory, 0);
                if (i + 1 < g.count) {
                    if (i > 0) barrier_wait(&s.turn[slot ^ 1].seen, (i - 1) >> 1 & 1);
                    snapshot(memory, s.chunk[slot ^ 1].memory);
                    publish(&s.turn[slot ^ 1].written);
                }
                finish(x);
                weigh<true>(x, ahead, turn.lines.back, nullptr, line, weight);
            }
            barrier_wait(&turn.written, i >> 1 & 1);
            uint32_t q[32]; // again: registers are few
            load_operand(s.q[team], q);
            multiply<1>(num, q, now.memory, false);
            leave(&s.q_empty[team]); // behind the products, which wait for the operand
            float carried[2];
            load_carried(a, g, chunk, line, turn.lines.start, carried);
            for (int r = 0; r < 2; r++) {
                token[r] = a.read[in_lane + 8 * r];
                floor[r] = lines.floor[line + 8 * r];
            }
            finish(num);
            times_rows(num, carried[0], carried[1]);
        }
        multiply<1>(num, weight, now.v, true);
        finish(num);
        uint32_t slope[32];
        read_out(num, a, g.lane, in_lane, s.readout + threadIdx.x % 4 * 2, token, floor, slope);
        {
            float x[64];
            multiply<0>(x, slope, now.v, false);
            const kv_chunk_lines &again_lines = lines_of(a, g, chunk);
            const float ahead[2] = {again_lines.ahead[line], again_lines.ahead[line + 8]};
            finish(x);
            weigh<true>(x, ahead, turn.lines.back, nullptr, line, weight);
        }
        float dq[64];
        multiply<0>(dq, slope, now.memory, false);
        float carried[2];
        load_carried(a, g, chunk, line, turn.lines.start, carried);
        finish(dq);
        leave(&turn.seen);
        times_rows(dq, carried[0], carried[1]);
        multiply<1>(dq, weight, now.k, true);
        finish(dq);
        leave(&turn.empty);
        store_rows(dq, true, true, a.d_project + (row_of(a, g, chunk, again(line)) - a.delay) * NP,
                   NP);
    }
#endif
}

} // namespace

kv_status fused::launch_output(const kv_gpu *g, dim3 grid, const CUtensorMap &q_half,
                               const CUtensorMap &k, const CUtensorMap &v, const memory_args &a) {
    KV_RETURN(kv_allow_shared(g, output_kernel, sizeof(output_shared)));
    return kv_net_launch(g, output_kernel, grid, THREADS, sizeof(output_shared), q_half, k, v, a);
}
