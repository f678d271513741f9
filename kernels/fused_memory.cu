// The recurrent memory, 128 keys by 128 values, over segments of chunks (maths.md 6.5-6.7).
//
// A block takes a segment of some chunks of one lane and keeps the memory, or its gradient, in registers from chunk to chunk. First
// every segment from an empty memory, one scan over the segments, then every segment again from what it really starts with: states
// of single chunks never leave the chip. The forward output is formed again in the backward pass for the same reason. Of a chunk's
// 128 rows each of two warpgroups owns 64 as queries, or as keys where time runs backwards, and 64 keys of the memory.
#include "kernels/fused_memory.cuh"

namespace {

using namespace fused;
using bf16 = __nv_bfloat16;

// ---- what a segment adds to an empty memory; REVERSE: to the memory's gradient at its start ----

struct segment_shared {
    static constexpr int STAGES = 3;
    alignas(1024) uint16_t x[STAGES][TILE];
    alignas(1024) uint16_t y[STAGES][TILE];
    uint64_t full[STAGES], empty[STAGES];
};

// x: keys, y: values; or queries (rows shifted by the delay), and gradients at num.
template <bool REVERSE>
__global__ __launch_bounds__(THREADS, 1) void segment_kernel(const __grid_constant__ CUtensorMap xm,
                                                             const __grid_constant__ CUtensorMap ym,
                                                             const memory_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ __align__(1024) char raw[];
    segment_shared &s = *reinterpret_cast<segment_shared *>(raw);
    constexpr int STAGES = segment_shared::STAGES;
    const int team = uniform(threadIdx.x / 128);
    const segment g(a);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], 8);
        barrier_init_fence();
    }
    __syncthreads();
    ring<STAGES> r;
    if (team == 2) {
        registers_shrink<40>();
        if (threadIdx.x != 256) return;
        for (int i = 0; i < g.count; i++, r.next()) {
            const int row = g.lane * a.n_row + g.chunk(i, REVERSE) * CHUNK;
            barrier_wait(&s.empty[r.slot], r.parity ^ 1);
            barrier_expect(&s.full[r.slot], 2 * TILE * 2);
            load_tile(s.x[r.slot], &xm, row - (REVERSE ? a.delay : 0), 0, &s.full[r.slot]);
            load_tile(s.y[r.slot], &ym, row, 0, &s.full[r.slot]);
        }
        return;
    }
    registers_grow<232>();
    float memory[64] = {}, left = 1;
    for (int i = 0; i < g.count; i++, r.next()) {
        const int chunk = g.chunk(i, REVERSE);
        const bool edge = a.edge[chunk] & (REVERSE ? 2 : 1);
        const float fade = edge ? 0.0f : a.fade[(int64_t)g.lane * a.n_chunk + chunk];
        float by[4];
        row_factors<REVERSE>(a, (int64_t)g.lane * a.n_row + chunk * CHUNK, by);
        left *= fade;
        fade_memory(memory, fade);
        barrier_wait(&s.full[r.slot], r.parity);
        scale_rows(s.y[r.slot], by);
        meet_writes();
        add_product(memory, s.x[r.slot], s.y[r.slot], team);
        finish(memory);
        if (threadIdx.x % 32 == 0) barrier_arrive(&s.empty[r.slot]);
    }
    const int own = (int)threadIdx.x % 32,
              row = team * 64 + (int)threadIdx.x % 128 / 32 * 16 + own / 4;
    float *out = a.segment + g.index() * (D * D);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < 16; j++)
            *reinterpret_cast<float2 *>(out + (row + 8 * h) * D + 8 * j + 2 * (own % 4)) =
                make_float2(memory[4 * j + 2 * h], memory[4 * j + 2 * h + 1]);
    if (threadIdx.x == 0) a.span[g.index()] = left;
#endif
}

// What segments add becomes what they start with.
template <bool REVERSE>
__global__ void combine_kernel(float *segment, const float *span, int count) {
    constexpr int AHEAD = 16;
    float *x =
        segment + (int64_t)blockIdx.y * count * (D * D) + blockIdx.x * blockDim.x + threadIdx.x;
    span += (int64_t)blockIdx.y * count;
    float memory = 0;
    for (int done = 0; done < count; done += AHEAD) {
        float fresh[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int c = REVERSE ? count - 1 - done - j : done + j;
            if (done + j < count) fresh[j] = x[(int64_t)c * (D * D)];
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int c = REVERSE ? count - 1 - done - j : done + j;
            if (done + j >= count) break;
            x[(int64_t)c * (D * D)] = memory;
            memory = fmaf(span[c], memory, fresh[j]);
        }
    }
}

// ---- passes ----

struct passes {
    kv_gpu_net *net;
    memory_args a;
    int segments;
    CUtensorMap q, k, v;

    kv_status map(const bf16 *data, int ld, CUtensorMap *out) const {
        return kv_tile_map_of(data, KV_BF16, net->rows(), ld, D, 1, net->rows() * ld, CHUNK, D,
                              out);
    }
    kv_status begin(const float *param) {
        const int chunks = net->n_chunk - net->slack / CHUNK;
        a = {};
        a.from = net->at<double2>(NET_FROM);
        a.factor = net->at<float4>(NET_SCALE);
        a.read = net->at<int32_t>(NET_READ);
        a.edge = net->at<int32_t>(NET_EDGE);
        a.fade = net->at<float>(NET_FADE);
        a.readout = param + net->layout.part[KV_NET_READOUT].at;
        a.n_param = net->layout.n_param;
        a.n_row = net->n_row;
        a.n_token = net->n_token;
        a.n_chunk = net->n_chunk;
        a.first_chunk = net->slack / CHUNK;
        a.each = max(4, kv_div_up(chunks * net->n_lane, net->gpu->sm_count));
        a.delay = net->delay();
        a.add = net->spec.n_mlp > 0;
        segments = max(1, kv_div_up(chunks, a.each));
        const size_t count = (size_t)net->n_lane * (size_t)segments;
        KV_RETURN(net->reserve(NET_SEGMENT, count * D * D * 4));
        KV_RETURN(net->reserve(NET_SPAN, count * 4));
        a.segment = net->at<float>(NET_SEGMENT);
        a.span = net->at<float>(NET_SPAN);
        const bf16 *project = net->at<bf16>(NET_PROJECT);
        KV_RETURN(map(project, NP, &q));
        KV_RETURN(map(project + D, NP, &k));
        return map(project + 2 * D, NP, &v);
    }
    dim3 grid() const { return dim3((unsigned)segments, (unsigned)net->n_lane); }

    template <bool REVERSE>
    kv_status segment_sums(const CUtensorMap &x, const CUtensorMap &y) const {
        kv_gpu *g = net->gpu;
        KV_RETURN(kv_allow_shared(g, segment_kernel<REVERSE>, sizeof(segment_shared)));
        segment_kernel<REVERSE><<<grid(), THREADS, sizeof(segment_shared), g->stream>>>(x, y, a);
        KV_CUDA(cudaGetLastError());
        combine_kernel<REVERSE><<<dim3(D * D / 256, (unsigned)net->n_lane), 256, 0, g->stream>>>(
            a.segment, a.span, segments);
        KV_CUDA(cudaGetLastError());
        return KV_OK;
    }
};

} // namespace

kv_status kv_fused_memory_forward(kv_gpu_net *net, const float *param, float *rhat) {
    passes p = {};
    p.net = net;
    KV_RETURN(kv_net_levels(net, param));
    KV_RETURN(p.begin(param));
    p.a.rhat = rhat;
    // Tokens whose window never passes are not read for: their score is their own.
    if (!p.a.add)
        KV_CUDA(cudaMemsetAsync(rhat, 0, (size_t)net->n_lane * (size_t)net->n_token * 4,
                                net->gpu->stream));
    KV_RETURN(p.segment_sums<false>(p.k, p.v));
    return launch_output(net->gpu, p.grid(), false, p.q, p.k, p.v, p.a);
}

kv_status kv_fused_memory_backward(kv_gpu_net *net, const float *param, const float *e,
                                   float *grad) {
    kv_gpu *g = net->gpu;
    passes p = {};
    const size_t rows = (size_t)net->rows(), lanes = (size_t)net->n_lane,
                 pitch = rows / lanes * NP * 2, tail = (size_t)net->delay() * NP * 2,
                 head = (size_t)net->slack * NP * 2;
    CUtensorMap delta;
    p.net = net;
    KV_RETURN(p.begin(param));
    KV_RETURN(net->reserve(NET_DELTA, rows * D * 2));
    KV_RETURN(net->reserve(NET_D_NARROW, rows * NP * 2));
    KV_RETURN(net->reserve(NET_DIFFERENCE, rows * sizeof(double)));
    KV_RETURN(net->reserve(NET_D_GATE, rows * sizeof(float2)));
    KV_RETURN(net->reserve(NET_D_SEGMENT, net->array[NET_SEGMENT]->bytes));
    KV_RETURN(net->reserve(NET_PARTIAL, lanes * (size_t)p.segments * D * 4));
    p.a.e = e;
    p.a.delta = net->at<bf16>(NET_DELTA);
    p.a.d_project = net->at<bf16>(NET_D_NARROW);
    p.a.difference = net->at<double>(NET_DIFFERENCE);
    p.a.d_gate = net->at<float2>(NET_D_GATE);
    p.a.partial = net->at<float>(NET_PARTIAL);
    // Rows that no chunk writes: before the tokens, and at the end, where nothing reads for a token any more.
    if (head) {
        KV_CUDA(cudaMemset2DAsync(p.a.d_project, pitch, 0, head, lanes, g->stream));
        KV_CUDA(cudaMemset2DAsync(p.a.difference, rows / lanes * 8, 0, (size_t)net->slack * 8,
                                  lanes, g->stream));
        KV_CUDA(cudaMemset2DAsync(p.a.d_gate, rows / lanes * 8, 0, (size_t)net->slack * 8, lanes,
                                  g->stream));
    }
    if (tail)
        KV_CUDA(cudaMemset2DAsync(net->array[NET_D_NARROW]->data + pitch - tail, pitch, 0, tail,
                                  lanes, g->stream));
    KV_RETURN(launch_output(g, p.grid(), true, p.q, p.k, p.v, p.a));
    KV_RETURN(
        kv_fused_total(net, p.a.partial, p.segments, D, net->layout.part[KV_NET_READOUT].at, grad));
    p.a.segment = net->at<float>(NET_D_SEGMENT);
    KV_RETURN(p.map(p.a.delta, D, &delta));
    KV_RETURN(p.segment_sums<true>(p.q, delta));
    KV_RETURN(launch_reverse(g, p.grid(), p.q, p.k, p.v, delta, p.a));
    return kv_net_gate_gradients(net);
}
