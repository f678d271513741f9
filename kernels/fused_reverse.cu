// The memory's gradient, chunk after chunk of a segment backwards in time: gradients at keys and values, and k~.dk~ of the gates.
#include "kernels/fused_memory.cuh"

namespace {

using namespace fused;

struct reverse_shared {
    alignas(1024) uint16_t q[2][TILE];
    alignas(1024) uint16_t slope[2][TILE];
    alignas(1024) uint16_t own[2][HALF];     // of each warpgroup: values, then keys of its rows
    alignas(1024) uint16_t memory[2][D * D]; // its gradient at the end of chunks in turn
    query_lines lines[2];
    uint64_t full[2], empty[2], own_full[2], own_empty[2], written[2], seen[2];
};

__device__ __forceinline__ void feed(reverse_shared &s, const segment &g, const CUtensorMap *qm,
                                     const CUtensorMap *sm, const CUtensorMap *km,
                                     const CUtensorMap *vm, const memory_args &a) {
    using namespace hopper;
    const auto load_own = [&](int i, int row, const CUtensorMap *map) {
        for (int w = 0; w < 2; w++) {
            barrier_wait(&s.own_empty[w], (i & 1) ^ 1);
            barrier_expect(&s.own_full[w], HALF * 2);
            load_tile(s.own[w], map, row + 64 * w, 0, &s.own_full[w]);
        }
    };
    ring<2> r;
    for (int i = 0; i < g.count; i++, r.next()) {
        const int chunk = g.chunk(i, true), row = g.lane * a.n_row + chunk * CHUNK;
        barrier_wait(&s.empty[r.slot], r.parity ^ 1);
        barrier_expect(&s.full[r.slot], 2 * TILE * 2 + lines_bytes(s.lines[0]));
        load_tile(s.q[r.slot], qm, row - a.delay, 0, &s.full[r.slot]);
        load_tile(s.slope[r.slot], sm, row, 0, &s.full[r.slot]);
        load_lines(&s.lines[r.slot], a, g.lane, chunk, &s.full[r.slot]);
        load_own(2 * i, row, vm);
        load_own(2 * i + 1, row, km);
    }
}

// x . y of the thread's two rows, y: rows of the warpgroup, tile [64][D].
__device__ __forceinline__ void dot_rows(const float (&x)[64], const uint16_t *y, float (&sum)[2]) {
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        uint32_t part[4];
        load_operand(y, k, part);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 b = wide_pair(part[i]);
            const int at = 8 * k + i / 2 * 4 + i % 2 * 2;
            sum[i % 2] = fmaf(x[at], b.x, fmaf(x[at + 1], b.y, sum[i % 2]));
        }
    }
    sum[0] = kv_quad_sum(sum[0]);
    sum[1] = kv_quad_sum(sum[1]);
}

__global__ __launch_bounds__(THREADS, 1) void reverse_kernel(const __grid_constant__ CUtensorMap qm,
                                                             const __grid_constant__ CUtensorMap sm,
                                                             const __grid_constant__ CUtensorMap km,
                                                             const __grid_constant__ CUtensorMap vm,
                                                             const memory_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ __align__(1024) char raw[];
    reverse_shared &s = *reinterpret_cast<reverse_shared *>(raw);
    const int team = uniform(threadIdx.x / 128);
    const segment g(a);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], 8);
            barrier_init(&s.own_full[i], 1), barrier_init(&s.own_empty[i], 4);
            barrier_init(&s.written[i], 8), barrier_init(&s.seen[i], 8);
        }
        barrier_init_fence();
    }
    __syncthreads();
    kv_follow();
    if (team == 2) {
        registers_shrink<40>();
        if (threadIdx.x == 256) feed(s, g, &qm, &sm, &km, &vm, a);
        return;
    }
    registers_grow<232>();
    const int line = (int)(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4);
    float memory[64];
    load_memory(memory, a.segment + g.index() * (D * D));
    snapshot(memory, s.memory[0]);
    publish(&s.written[0]);
    for (int i = 0; i < g.count; i++) {
        const int chunk = g.chunk(i, true), slot = i & 1;
        const query_lines &at = s.lines[slot];
        uint32_t weight[32];
        {
            float dk[64];
            // Asked for ahead of their use, here and below: they come from far.
            const kv_chunk_lines &lines = lines_of(a, g, chunk);
            const float back[2] = {lines.back[line], lines.back[line + 8]};
            barrier_wait(&s.full[slot], i >> 1 & 1);
            {
                float x[64];
                {
                    uint32_t update[32], v[32];
                    barrier_wait(&s.own_full[team], 0);
                    load_operand(s.own[team], v);
                    load_update(s.q[slot], at, update);
                    times_all(memory, at.fade);
                    multiply<1>(memory, update, s.slope[slot], true);
                    multiply<0>(x, v, s.slope[slot], false);
                    mma_wait<1>();
                    pin(memory);
                }
                // The gradient at the next chunk's end, while this chunk's is in use.
                if (at.opens) times_all(memory, 0);
                if (i + 1 < g.count) {
                    if (i > 0) barrier_wait(&s.seen[slot ^ 1], (i - 1) >> 1 & 1);
                    snapshot(memory, s.memory[slot ^ 1]);
                    publish(&s.written[slot ^ 1]);
                }
                finish(x);
                weigh<false>(x, back, at.ahead, at.up, line, weight);
            }
            barrier_wait(&s.written[slot], i >> 1 & 1);
            uint32_t v[32]; // again: registers are few
            load_operand(s.own[team], v);
            multiply<0>(dk, v, s.memory[slot], false);
            leave(&s.own_empty[team]); // behind the products, which wait for the operand
            const float fresh[2] = {lines.fresh[line], lines.fresh[line + 8]};
            const int64_t row = row_of(a, g, chunk, line);
            const float q_along[2] = {a.along[row], a.along[row + 8]};
            finish(dk);
            times_rows(dk, fresh[0], fresh[1]);
            multiply<1>(dk, weight, s.q[slot], true);
            finish(dk);
            barrier_wait(&s.own_full[team], 1);
            float along[2];
            dot_rows(dk, s.own[team], along);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (threadIdx.x % 4 != 0) continue;
                a.difference[row + 8 * r] =
                    (double)(at.up[line + 8 * r] * q_along[r]) - (double)along[r];
                a.d_gate[row + 8 * r].x = along[r];
            }
            store_rows(dk, true, true, a.d_project + row_of(a, g, chunk, line) * NP + D, NP);
            {
                // Long since full; but without a branch here ptxas loads the operand while dk still has its registers.
                barrier_wait(&s.own_full[team], 1);
                float x[64];
                uint32_t k[32];
                load_operand(s.own[team], k);
                multiply<0>(x, k, s.q[slot], false);
                const kv_chunk_lines &again_lines = lines_of(a, g, chunk);
                const float again_back[2] = {again_lines.back[line], again_lines.back[line + 8]};
                finish(x);
                weigh<false>(x, again_back, at.ahead, at.up, line, weight);
            }
            float dv[64];
            uint32_t k[32];
            load_operand(s.own[team], k);
            multiply<1>(dv, k, s.memory[slot], false);
            leave(&s.own_empty[team]);
            const kv_chunk_lines &again_lines = lines_of(a, g, chunk);
            const float still[2] = {again_lines.fresh[line], again_lines.fresh[line + 8]};
            finish(dv);
            leave(&s.seen[slot]);
            times_rows(dv, still[0], still[1]);
            multiply<1>(dv, weight, s.slope[slot], true);
            finish(dv);
            leave(&s.empty[slot]);
            store_rows(dv, true, true, a.d_project + row_of(a, g, chunk, line) * NP + 2 * D, NP);
        }
    }
#endif
}

} // namespace

kv_status fused::launch_reverse(const kv_gpu *g, dim3 grid, const CUtensorMap &q,
                                const CUtensorMap &slope, const CUtensorMap &k_half,
                                const CUtensorMap &v_half, const memory_args &a) {
    KV_RETURN(kv_allow_shared(g, reverse_kernel, sizeof(reverse_shared)));
    return kv_net_launch(g, reverse_kernel, grid, THREADS, sizeof(reverse_shared), q, slope, k_half,
                         v_half, a);
}
