// The memory's gradient, chunk after chunk of a segment backwards in time: gradients at keys and values, and k~.dk~ of the gates.
#include "kernels/fused_memory.cuh"

namespace {

using namespace fused;

struct reverse_shared {
    static constexpr int SLOTS = 6;
    alignas(1024) uint16_t tile[SLOTS][TILE]; // v, k, q, delta of a chunk, one after the other
    alignas(1024) uint16_t memory[D * D];
    alignas(16) float ahead[CHUNK];
    uint64_t full[SLOTS], empty[SLOTS];
};

__global__ __launch_bounds__(THREADS, 1) void reverse_kernel(const __grid_constant__ CUtensorMap qm,
                                                             const __grid_constant__ CUtensorMap km,
                                                             const __grid_constant__ CUtensorMap vm,
                                                             const __grid_constant__ CUtensorMap dm,
                                                             const memory_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ __align__(1024) char raw[];
    reverse_shared &s = *reinterpret_cast<reverse_shared *>(raw);
    constexpr int SLOTS = reverse_shared::SLOTS;
    const int team = uniform(threadIdx.x / 128);
    const segment g(a);
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], 8);
        barrier_init_fence();
    }
    __syncthreads();
    ring<SLOTS> r;
    if (team == 2) {
        registers_shrink<40>();
        if (threadIdx.x != 256) return;
        for (int i = 0; i < 4 * g.count; i++, r.next()) {
            const int row = g.lane * a.n_row + g.chunk(i / 4, true) * CHUNK;
            barrier_wait(&s.empty[r.slot], r.parity ^ 1);
            barrier_expect(&s.full[r.slot], TILE * 2);
            const CUtensorMap *map = i % 4 == 0 ? &vm : i % 4 == 1 ? &km : i % 4 == 2 ? &qm : &dm;
            load_tile(s.tile[r.slot], map, row - (i % 4 == 2 ? a.delay : 0), 0, &s.full[r.slot]);
        }
        return;
    }
    registers_grow<232>();
    const int own = (int)threadIdx.x % 32, line = (int)threadIdx.x / 32 * 16 + own / 4;
    float memory[64];
    load_memory(memory, a.segment + g.index() * (D * D));
    const auto take = [&]() {
        const uint32_t slot = r.slot;
        barrier_wait(&s.full[slot], r.parity);
        r.next();
        return slot;
    };
    const auto leave = [&](uint32_t slot) {
        if (own == 0) barrier_arrive(&s.empty[slot]);
    };
    for (int i = 0; i < g.count; i++) {
        const int chunk = g.chunk(i, true);
        const int64_t row = (int64_t)g.lane * a.n_row + chunk * CHUNK;
        const bool edge = a.edge[chunk] & 2;
        const float fade = edge ? 0.0f : a.fade[(int64_t)g.lane * a.n_chunk + chunk];
        float back[2], fresh[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            back[h] = KV_LOG2E * (float)a.from[row + line + 8 * h].y;
            fresh[h] = a.factor[row + line + 8 * h].x;
        }
        if (threadIdx.x < CHUNK)
            s.ahead[threadIdx.x] =
                a.read[chunk * CHUNK + threadIdx.x] < 0
                    ? -INFINITY
                    : fmaf(KV_LOG2E, (float)a.from[row + threadIdx.x].x, LOG2_SCALE);
        fade_memory(memory, edge ? 0.0f : 1.0f);
        snapshot(memory, s.memory);
        meet_writes();
        const uint32_t v_slot = take(), k_slot = take(), q_slot = take(), d_slot = take();
        uint16_t *v = s.tile[v_slot], *k = s.tile[k_slot], *q = s.tile[q_slot], *d = s.tile[d_slot];
        uint32_t weight[32];
        {
            float x[64], dk[64];
            tile_rows<0>(x, v, d, team);
            finish(x);
            weigh<false>(x, back, s.ahead, line, weight);
            tile_rows<0>(dk, v, s.memory, team);
            finish(dk);
            leave(v_slot);
            times_rows(dk, fresh[0], fresh[1]);
            operand_rows<1>(dk, weight, q, true);
            finish(dk);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float along = dot_row(dk, h, k, line + 8 * h);
                const int64_t at = row + line + 8 * h;
                if (own % 4 != 0) continue;
                a.difference[at] -= (double)along;
                a.d_gate[at].x = along;
            }
            store_rows(dk, true, true, a.d_project + (row + line) * NP + D, NP);
        }
        {
            float x[64], dv[64];
            tile_rows<0>(x, k, q, team);
            finish(x);
            weigh<false>(x, back, s.ahead, line, weight);
            tile_rows<1>(dv, k, s.memory, team);
            finish(dv);
            leave(k_slot);
            times_rows(dv, fresh[0], fresh[1]);
            operand_rows<1>(dv, weight, d, true);
            finish(dv);
            store_rows(dv, true, true, a.d_project + (row + line) * NP + 2 * D, NP);
        }
        float by[4];
        row_factors<true>(a, row, by);
        meet(); // nobody needs plain gradients any more
        scale_rows(d, by);
        fade_memory(memory, fade);
        meet_writes();
        add_product(memory, q, d, team);
        finish(memory);
        leave(q_slot);
        leave(d_slot);
    }
#endif
}

} // namespace

kv_status fused::launch_reverse(kv_gpu *g, dim3 grid, const CUtensorMap &q, const CUtensorMap &k,
                                const CUtensorMap &v, const CUtensorMap &delta,
                                const memory_args &a) {
    KV_RETURN(kv_allow_shared(g, reverse_kernel, sizeof(reverse_shared)));
    reverse_kernel<<<grid, THREADS, sizeof(reverse_shared), g->stream>>>(q, k, v, delta, a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}
