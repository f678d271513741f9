// The recurrent memory, 128 keys by 128 values, over segments of chunks (maths.md 6.5-6.7).
//
// A block takes a segment of some chunks of one lane and keeps the memory, or its gradient, in registers from chunk to chunk. First
// every segment from an empty memory, one scan over the segments, then every segment again from what it really starts with: states
// of single chunks never leave the chip. Of a chunk's 128 rows each of two warpgroups owns 64 as queries, or as keys where time runs
// backwards, and 64 keys of the memory; each brings its part of the memory to the next chunk first and tells the other by a barrier
// that only the next chunk waits for, so that one can work on sums while the products of the other run.
//
// Everything of the backward pass is proportional to the gradient e of a row's score. The forward pass, which has all that is needed
// at hand, leaves the gradient at num and at the query for e = 1; the backward pass multiplies by e where it reads them.
#include <type_traits>

#include "kernels/fused_memory.cuh"

namespace {

using namespace fused;
using bf16 = __nv_bfloat16;

// ---- what a segment adds to an empty memory, or to the memory's gradient at its start ----

template <class L> struct segment_shared {
    static constexpr int STAGES = 3;
    alignas(1024) uint16_t x[STAGES][TILE];
    alignas(1024) uint16_t y[STAGES][TILE];
    L lines[STAGES];
    uint64_t full[STAGES], empty[STAGES];
};

// L key_lines: x are keys, y values; query_lines: queries (rows shifted by the delay), and gradients at num.
template <class L>
__global__ __launch_bounds__(THREADS, 1) void segment_kernel(const __grid_constant__ CUtensorMap xm,
                                                             const __grid_constant__ CUtensorMap ym,
                                                             const memory_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    constexpr bool REVERSE = std::is_same<L, query_lines>::value;
    extern __shared__ __align__(1024) char raw[];
    segment_shared<L> &s = *reinterpret_cast<segment_shared<L> *>(raw);
    constexpr int STAGES = segment_shared<L>::STAGES;
    const int team = uniform(threadIdx.x / 128);
    const segment g(a);
    if (threadIdx.x == 0) {
        init_ring(s.full, s.empty, 1, 8);
        barrier_init_fence();
    }
    __syncthreads();
    kv_follow();
    ring<STAGES> r;
    if (team == 2) {
        registers_shrink<40>();
        if (threadIdx.x != 256) return;
        for (int i = 0; i < g.count; i++, r.next()) {
            const int chunk = g.chunk(i, REVERSE), row = g.lane * a.n_row + chunk * CHUNK;
            barrier_wait(&s.empty[r.slot], r.parity ^ 1);
            barrier_expect(&s.full[r.slot], 2 * TILE * 2 + lines_bytes(s.lines[0]));
            load_tile(s.x[r.slot], &xm, row - (REVERSE ? a.delay : 0), 0, &s.full[r.slot]);
            load_tile(s.y[r.slot], &ym, row, 0, &s.full[r.slot]);
            load_lines(&s.lines[r.slot], a, g.lane, chunk, &s.full[r.slot]);
        }
        return;
    }
    registers_grow<232>();
    float memory[64] = {}, left = 1;
    for (int i = 0; i < g.count; i++, r.next()) {
        barrier_wait(&s.full[r.slot], r.parity);
        const L &lines = s.lines[r.slot];
        uint32_t update[32];
        load_update(s.x[r.slot], lines, update);
        times_all(memory, lines.fade);
        multiply<1>(memory, update, s.y[r.slot], true);
        const float stays = (REVERSE ? lines.opens : lines.closes) ? 0.0f : 1.0f;
        left *= lines.fade * stays;
        finish(memory);
        if (stays == 0) times_all(memory, 0);
        leave(&s.empty[r.slot]);
    }
    store_sums<D>(memory, a.segment + g.index() * (D * D) + (int)threadIdx.x / 32 * 16 * D, D);
    if (threadIdx.x == 0) a.span[g.index()] = left;
#endif
}

// What segments add becomes what they start with.
template <bool REVERSE>
__global__ void combine_kernel(float *segment, const float *span, int count) {
    constexpr int AHEAD = 16;
    kv_follow();
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

// ---- what the backward pass needs before its segments ----

constexpr int PARTS = 64;   // shares of a lane's rows
constexpr int EXTRA = ROWS; // values of `up` behind the last row that are read but not used

// e of every row that is read, the readout's gradient, the sum over rows of e silu(h), in parts, and zeros in rows that no segment
// writes: before the tokens, and for queries at the end, where nothing reads for a token any more. A thread has 8 of 128 columns.
__global__ __launch_bounds__(256) void prepare_kernel(const memory_args a) {
    __shared__ float part[16][D];
    kv_follow();
    const int lane = (int)blockIdx.y, column = (int)threadIdx.x % 16 * 8,
              group = (int)threadIdx.x / 16, each = (a.n_row + PARTS - 1) / PARTS,
              end = min(a.n_row, ((int)blockIdx.x + 1) * each);
    const uint4 none = {};
    float sum[8] = {};
    constexpr int AT_ONCE = 4; // rows whose loads are under way together
    for (int first = (int)blockIdx.x * each + group; first < end; first += 16 * AT_ONCE) {
        const int64_t row = (int64_t)lane * a.n_row + first;
        int t[AT_ONCE];
        float up[AT_ONCE];
        uint4 y[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int r = first + 16 * j;
            t[j] = r < a.first_chunk * CHUNK || r >= end ? -1 : a.read[r];
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const uint4 *from =
                reinterpret_cast<const uint4 *>(a.head + (row + 16 * j) * D + column);
            y[j] = t[j] < 0 ? none : *from;
            up[j] = t[j] < 0 ? 0.0f : a.e[(int64_t)lane * a.n_token + t[j]];
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const uint32_t word[4] = {y[j].x, y[j].y, y[j].z, y[j].w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 v = wide_pair(word[i]);
                sum[2 * i] = fmaf(up[j], v.x, sum[2 * i]);
                sum[2 * i + 1] = fmaf(up[j], v.y, sum[2 * i + 1]);
            }
            const int r = first + 16 * j;
            if (r >= end) continue;
            const bool before = r < a.first_chunk * CHUNK;
            uint4 *d = reinterpret_cast<uint4 *>(a.d_project + (row + 16 * j) * NP + column);
            if (before || r >= a.n_row - a.delay) d[0] = none;
            if (before) d[D / 8] = d[2 * D / 8] = none;
            if (column != 0) continue;
            a.up[row + 16 * j] = up[j];
            if (before) a.difference[row + 16 * j] = 0, a.d_gate[row + 16 * j] = make_float2(0, 0);
        }
    }
    if (blockIdx.x == 0 && blockIdx.y == 0)
        for (int i = (int)threadIdx.x; i < a.delay + EXTRA; i += 256)
            a.up[(int64_t)gridDim.y * a.n_row + i] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) part[group][column + i] = sum[i];
    __syncthreads();
    if (threadIdx.x >= D) return;
    float total = 0;
    for (int i = 0; i < 16; i++) total += part[i][threadIdx.x];
    a.partial[((int64_t)lane * PARTS + blockIdx.x) * D + threadIdx.x] = total;
}

// Gradients at queries times e, where more than the projections' weights read them. A thread has 8 of 128 columns.
__global__ void scale_kernel(const memory_args a, int64_t rows) {
    kv_follow();
    const int64_t row = blockIdx.x * (int64_t)16 + threadIdx.x / 16;
    if (row >= rows) return;
    const float up = a.up[row + a.delay];
    uint4 *at = reinterpret_cast<uint4 *>(a.d_project + row * NP + threadIdx.x % 16 * 8);
    const uint4 x = *at;
    *at = make_uint4(scale_pair(x.x, up, up), scale_pair(x.y, up, up), scale_pair(x.z, up, up),
                     scale_pair(x.w, up, up));
}

// ---- passes ----

struct passes {
    kv_gpu_net *net;
    memory_args a;
    int segments;
    CUtensorMap q, k, v, q_half, k_half, v_half;

    kv_status map(const bf16 *data, int ld, int rows, CUtensorMap *out) const {
        return kv_tile_map_of(data, KV_BF16, net->rows(), ld, D, 1, net->rows() * ld, rows, D, out);
    }
    kv_status begin(const float *param) {
        const int chunks = net->n_chunk - net->slack / CHUNK;
        const size_t rows = (size_t)net->rows();
        a = {};
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
        KV_RETURN(net->reserve(NET_SLOPE, rows * D * 2));
        KV_RETURN(net->reserve(NET_HEAD, rows * D * 2));
        KV_RETURN(net->reserve(NET_ALONG, rows * 4));
        KV_RETURN(net->reserve(NET_UP, (rows + (size_t)a.delay + EXTRA) * 4));
        KV_RETURN(net->reserve(NET_D_NARROW, rows * NP * 2));
        a.lines = net->at<kv_chunk_lines>(NET_LINES);
        a.read = net->at<int32_t>(NET_READ);
        a.segment = net->at<float>(NET_SEGMENT);
        a.span = net->at<float>(NET_SPAN);
        a.slope = net->at<bf16>(NET_SLOPE);
        a.head = net->at<bf16>(NET_HEAD);
        a.along = net->at<float>(NET_ALONG);
        a.up = net->at<float>(NET_UP);
        a.d_project = net->at<bf16>(NET_D_NARROW);
        const bf16 *project = net->at<bf16>(NET_PROJECT);
        const struct {
            CUtensorMap *whole, *half;
        } all[3] = {{&q, &q_half}, {&k, &k_half}, {&v, &v_half}};
        for (int i = 0; i < 3; i++) {
            KV_RETURN(map(project + i * D, NP, CHUNK, all[i].whole));
            KV_RETURN(map(project + i * D, NP, CHUNK / 2, all[i].half));
        }
        return KV_OK;
    }
    dim3 grid() const { return dim3((unsigned)segments, (unsigned)net->n_lane); }
    template <class L> kv_status segment_sums(const CUtensorMap &x, const CUtensorMap &y) const {
        kv_gpu *g = net->gpu;
        constexpr bool REVERSE = std::is_same<L, query_lines>::value;
        KV_RETURN(kv_allow_shared(g, segment_kernel<L>, sizeof(segment_shared<L>)));
        KV_RETURN(kv_net_launch(g, segment_kernel<L>, grid(), THREADS, sizeof(segment_shared<L>), x,
                                y, a));
        return kv_net_launch(g, combine_kernel<REVERSE>, dim3(D * D / 256, (unsigned)net->n_lane),
                             256, 0, a.segment, a.span, segments);
    }
};

} // namespace

kv_status kv_fused_memory_forward(kv_gpu_net *net, const float *param, float *rhat) {
    passes p = {};
    p.net = net;
    // Tokens whose window never passes are not read for: their score is their own.
    KV_RETURN(kv_net_levels(net, param, true, net->spec.n_mlp ? nullptr : rhat));
    KV_RETURN(p.begin(param));
    p.a.rhat = rhat;
    KV_RETURN(p.segment_sums<key_lines>(p.k, p.v));
    return launch_output(net->gpu, p.grid(), p.q_half, p.k, p.v, p.a);
}

kv_status kv_fused_memory_backward(kv_gpu_net *net, const float *param, const float *e,
                                   float *grad) {
    kv_gpu *g = net->gpu;
    passes p = {};
    const size_t rows = (size_t)net->rows();
    CUtensorMap slope;
    p.net = net;
    KV_RETURN(p.begin(param));
    KV_RETURN(net->reserve(NET_DIFFERENCE, rows * sizeof(double)));
    KV_RETURN(net->reserve(NET_D_GATE, rows * sizeof(float2)));
    KV_RETURN(net->reserve(NET_PARTIAL, (size_t)net->n_lane * PARTS * D * 4));
    p.a.e = e;
    p.a.difference = net->at<double>(NET_DIFFERENCE);
    p.a.d_gate = net->at<float2>(NET_D_GATE);
    p.a.partial = net->at<float>(NET_PARTIAL);
    KV_RETURN(kv_net_launch(g, prepare_kernel, dim3(PARTS, (unsigned)net->n_lane), 256, 0, p.a));
    KV_RETURN(
        kv_fused_total(net, p.a.partial, PARTS, D, net->layout.part[KV_NET_READOUT].at, grad));
    KV_RETURN(p.map(p.a.slope, D, CHUNK, &slope));
    KV_RETURN(p.segment_sums<query_lines>(p.q, slope));
    KV_RETURN(launch_reverse(g, p.grid(), p.q, slope, p.k_half, p.v_half, p.a));
    if (net->spec.n_feature)
        KV_RETURN(kv_net_launch(g, scale_kernel, dim3((unsigned)((rows + 15) / 16)), 256, 0, p.a,
                                (int64_t)rows));
    return kv_net_gate_gradients(net);
}
