// The memory's readout, chunk after chunk of a segment: scores; GRAD: gradients at num and at the queries, and e silu(h) summed for the
// readout's gradient.
#include "kernels/fused_memory.cuh"

namespace {

using namespace fused;

struct forward_shared {
    static constexpr int STAGES = 2;
    struct {
        alignas(1024) uint16_t q[TILE];
        alignas(1024) uint16_t k[TILE];
        alignas(1024) uint16_t v[TILE];
    } tile[STAGES];
    alignas(1024) uint16_t memory[D * D];
    alignas(16) float back[CHUNK], carried[CHUNK];
    alignas(16) float readout[D];
    uint64_t full[STAGES], empty[STAGES];
};

// A thread's two rows.
struct query_rows {
    float ahead[2], floor[2], e[2], inverse[2];
    int token[2];
};

template <bool GRAD>
__device__ __forceinline__ query_rows load_queries(const memory_args &a, int lane, int in_lane) {
    query_rows q;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t row = (int64_t)lane * a.n_row + in_lane + 8 * r;
        q.token[r] = a.read[in_lane + 8 * r];
        q.ahead[r] = q.token[r] < 0 ? -INFINITY : fmaf(KV_LOG2E, (float)a.from[row].x, LOG2_SCALE);
        q.floor[r] = a.factor[row].z;
        q.e[r] = 0;
        if (GRAD && q.token[r] >= 0) q.e[r] = a.e[(int64_t)lane * a.n_token + q.token[r]];
    }
    return q;
}

// Root-mean-square norm and score of the thread's rows.
__device__ __forceinline__ void normalise(const float (&num)[64], query_rows *q) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float size = 0;
#pragma unroll
        for (int j = 0; j < 16; j++)
            size = fmaf(num[4 * j + 2 * r], num[4 * j + 2 * r],
                        fmaf(num[4 * j + 2 * r + 1], num[4 * j + 2 * r + 1], size));
        q->inverse[r] =
            rsqrtf(fmaf(kv_quad_sum(size), 1.0f / D, 1e-6f * q->floor[r] * q->floor[r]));
    }
}
__device__ __forceinline__ void write_scores(const float (&num)[64], const query_rows &q,
                                             const float *readout, const memory_args &a, int lane) {
    float sum[2] = {};
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const float2 w = *reinterpret_cast<const float2 *>(readout + 8 * j);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float half = 0.5f * q.inverse[r];
            sum[r] = fmaf(silu_half(half * num[4 * j + 2 * r]), w.x, sum[r]);
            sum[r] = fmaf(silu_half(half * num[4 * j + 2 * r + 1]), w.y, sum[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float score = kv_quad_sum(sum[r]);
        if (threadIdx.x % 4 != 0 || q.token[r] < 0) continue;
        float *to = &a.rhat[(int64_t)lane * a.n_token + q.token[r]];
        *to = a.add ? *to + score : score;
    }
}

// Gradient at num through silu and the norm as operand (maths.md 6.6); e silu(h) added up by column over the warp's rows, of which
// thread (g, t) of 8 x 4 ends up with the columns 8 g + 2 t + {0, 1} of either half.
__device__ __forceinline__ void at_num(const float (&num)[64], const query_rows &q,
                                       const float *readout, uint32_t (&delta)[32],
                                       float (&d_readout)[4]) {
    float along[2] = {};
#pragma unroll
    for (int part = 0; part < 2; part++) {
        float column[16];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int j = 8 * part + i;
            const float2 w = *reinterpret_cast<const float2 *>(readout + 8 * j);
            column[2 * i] = column[2 * i + 1] = 0;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float slope[2];
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const float h = num[4 * j + 2 * r + c] * q.inverse[r];
                    float y, d;
                    silu_half(0.5f * h, &y, &d);
                    column[2 * i + c] = fmaf(q.e[r], y, column[2 * i + c]);
                    slope[c] = (c ? w.y : w.x) * d;
                    along[r] = fmaf(slope[c], h, along[r]);
                }
                delta[2 * j + r] = pair(slope[0], slope[1]);
            }
        }
#pragma unroll
        for (int half = 8; half >= 2; half /= 2) {
            const bool high = threadIdx.x & (2 * half);
#pragma unroll
            for (int i = 0; i < half; i++) {
                const float sent = high ? column[i] : column[i + half],
                            kept = high ? column[i + half] : column[i];
                column[i] = kept + __shfl_xor_sync(~0u, sent, 2 * half);
            }
        }
        d_readout[2 * part] += column[0];
        d_readout[2 * part + 1] += column[1];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        // e / divisor (slope - mean(slope h) h), h = num / divisor
        const float by = q.e[r] * q.inverse[r],
                    mean = kv_quad_sum(along[r]) * (1.0f / D) * q.inverse[r] * by;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const float2 g =
                __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&delta[2 * j + r]));
            delta[2 * j + r] = pair(fmaf(by, g.x, -mean * num[4 * j + 2 * r]),
                                    fmaf(by, g.y, -mean * num[4 * j + 2 * r + 1]));
        }
    }
    hopper::pin(delta);
}

template <bool GRAD>
__global__ __launch_bounds__(THREADS, 1) void forward_kernel(const __grid_constant__ CUtensorMap qm,
                                                             const __grid_constant__ CUtensorMap km,
                                                             const __grid_constant__ CUtensorMap vm,
                                                             const memory_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ __align__(1024) char raw[];
    forward_shared &s = *reinterpret_cast<forward_shared *>(raw);
    constexpr int STAGES = forward_shared::STAGES;
    const int team = uniform(threadIdx.x / 128);
    const segment g(a);
    if (threadIdx.x < D) s.readout[threadIdx.x] = a.readout[g.lane * a.n_param + threadIdx.x];
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], 8);
        barrier_init_fence();
    }
    __syncthreads();
    ring<STAGES> ring;
    if (team == 2) {
        registers_shrink<40>();
        if (threadIdx.x != 256) return;
        for (int i = 0; i < g.count; i++, ring.next()) {
            const int row = g.lane * a.n_row + g.chunk(i, false) * CHUNK;
            uint64_t *full = &s.full[ring.slot];
            barrier_wait(&s.empty[ring.slot], ring.parity ^ 1);
            barrier_expect(full, 3 * TILE * 2);
            load_tile(s.tile[ring.slot].q, &qm, row - a.delay, 0, full);
            load_tile(s.tile[ring.slot].k, &km, row, 0, full);
            load_tile(s.tile[ring.slot].v, &vm, row, 0, full);
        }
        return;
    }
    registers_grow<232>();
    const int own = (int)threadIdx.x % 32,
              line = (int)threadIdx.x / 32 * 16 + own / 4; // row of the chunk
    float memory[64], d_readout[4] = {};
    load_memory(memory, a.segment + g.index() * (D * D));
    for (int i = 0; i < g.count; i++, ring.next()) {
        const int chunk = g.chunk(i, false);
        const int64_t row = (int64_t)g.lane * a.n_row + chunk * CHUNK;
        auto &t = s.tile[ring.slot];
        query_rows q = load_queries<GRAD>(a, g.lane, chunk * CHUNK + line);
        const bool edge = a.edge[chunk] & 1;
        const float fade = edge ? 0.0f : a.fade[(int64_t)g.lane * a.n_chunk + chunk];
        if (threadIdx.x < CHUNK) {
            s.back[threadIdx.x] = KV_LOG2E * (float)a.from[row + threadIdx.x].y;
            s.carried[threadIdx.x] = a.factor[row + threadIdx.x].y;
        }
        fade_memory(memory, edge ? 0.0f : 1.0f);
        snapshot(memory, s.memory);
        meet_writes();
        barrier_wait(&s.full[ring.slot], ring.parity);
        uint32_t weight[32];
        float num[64];
        {
            float x[64];
            tile_rows<0>(x, t.q, t.k, team);
            finish(x);
            weigh<true>(x, q.ahead, s.back, line, weight);
        }
        tile_rows<1>(num, t.q, s.memory, team);
        finish(num);
        times_rows(num, s.carried[line], s.carried[line + 8]);
        operand_rows<1>(num, weight, t.v, true);
        finish(num);
        normalise(num, &q);
        const float *readout = s.readout + 2 * (own % 4);
        float dq[64];
        if constexpr (GRAD) {
            uint32_t delta[32];
            at_num(num, q, readout, delta, d_readout);
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int j = 0; j < 16; j += 4) {
                    const uint32_t word[4] = {delta[2 * j + r], delta[2 * j + 2 + r],
                                              delta[2 * j + 4 + r], delta[2 * j + 6 + r]};
                    store_quad(word, a.delta + (row + line + 8 * r) * D + 8 * j);
                }
            float x[64];
            operand_rows<0>(x, delta, t.v, false);
            finish(x);
            weigh<true>(x, q.ahead, s.back, line, weight);
            operand_rows<0>(dq, delta, s.memory, false);
            finish(dq);
            times_rows(dq, s.carried[line], s.carried[line + 8]);
            operand_rows<1>(dq, weight, t.k, true);
            finish(dq);
        }
        float by[4];
        row_factors<false>(a, row, by);
        meet(); // nobody needs plain keys any more
        scale_rows(t.k, by);
        fade_memory(memory, fade);
        meet_writes();
        add_product(memory, t.k, t.v, team);
        if constexpr (GRAD) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float along = dot_row(dq, r, t.q, line + 8 * r);
                if (own % 4 == 0) a.difference[row + line + 8 * r] = (double)along;
            }
            store_rows(dq, true, true, a.d_project + (row + line - a.delay) * NP, NP);
        } else {
            write_scores(num, q, readout, a, g.lane);
        }
        finish(memory);
        if (own == 0) barrier_arrive(&s.empty[ring.slot]);
    }
    if constexpr (GRAD) {
        // Sums of the eight warps, in the place of the memory's tile.
        float *sum = reinterpret_cast<float *>(s.memory);
        const int thread = again((int)threadIdx.x);
        meet();
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[thread / 32 * D + i / 2 * 64 + thread % 32 * 2 + i % 2] = d_readout[i];
        meet();
        if (threadIdx.x < D) {
            float total = 0;
            for (int w = 0; w < 8; w++) total += sum[w * D + threadIdx.x];
            a.partial[g.index() * D + threadIdx.x] = total;
        }
    }
#endif
}

template <bool GRAD>
kv_status launch(kv_gpu *g, dim3 grid, const CUtensorMap &q, const CUtensorMap &k,
                 const CUtensorMap &v, const memory_args &a) {
    KV_RETURN(kv_allow_shared(g, forward_kernel<GRAD>, sizeof(forward_shared)));
    forward_kernel<GRAD><<<grid, THREADS, sizeof(forward_shared), g->stream>>>(q, k, v, a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

} // namespace

kv_status fused::launch_output(kv_gpu *g, dim3 grid, bool grad, const CUtensorMap &q,
                               const CUtensorMap &k, const CUtensorMap &v, const memory_args &a) {
    return (grad ? launch<true> : launch<false>)(g, grid, q, k, v, a);
}
