// The recurrent memory of the fused passes: what its kernels share (fused_memory.cu says how they work together).
#ifndef KV_KERNELS_FUSED_MEMORY_CUH
#define KV_KERNELS_FUSED_MEMORY_CUH

#include "kernels/fused.cuh"

namespace fused {

constexpr int D = 128, CHUNK = KV_CHUNK, TILE = CHUNK * D; // keys, values; rows; elements of a tile
constexpr int HALF = TILE / 2;                             // the rows of a warpgroup
constexpr int NP = 3 * D;                                  // columns of the projections
static_assert(CHUNK == 128, "a warpgroup owns half of the chunk's rows in tiles of 64");

struct memory_args {
    const kv_chunk_lines *lines; // [lane][chunk]
    const int32_t *read;
    const float *readout, *e;
    float *segment, *span; // of all segments
    float *rhat, *partial, *along, *up;
    __nv_bfloat16 *slope, *head, *d_project; // [lane][row][D], same, [lane][row][NP]
    double *difference;
    float2 *d_gate;
    int64_t n_param;
    int n_row, n_token, n_chunk, first_chunk, each, delay; // each: chunks of a segment
    bool add;
};

// A block's chunks of its lane, in the order of its pass.
struct segment {
    int lane, first, count;
    __device__ explicit segment(const memory_args &a) : lane((int)blockIdx.y) {
        first = a.first_chunk + (int)blockIdx.x * a.each;
        count = max(0, min(a.each, a.n_chunk - first));
    }
    __device__ int chunk(int i, bool reverse) const {
        return reverse ? first + count - 1 - i : first + i;
    }
    __device__ int64_t index() const { return (int64_t)lane * gridDim.x + blockIdx.x; }
};

// What a segment's pass reads of kv_chunk_lines beside its tiles: of the keys, or of the queries.
struct alignas(16) key_lines {
    float fade, start;
    int32_t opens, closes;
    float back[CHUNK], fresh[CHUNK];
};
struct alignas(16) query_lines {
    float ahead[CHUNK];
    float fade, start;
    int32_t opens, closes;
    float up[CHUNK]; // from another array
};
__device__ __forceinline__ uint32_t lines_bytes(const key_lines &) { return sizeof(key_lines); }
__device__ __forceinline__ uint32_t lines_bytes(const query_lines &) { return sizeof(query_lines); }
__device__ __forceinline__ void load_lines(key_lines *to, const memory_args &a, int lane, int chunk,
                                           uint64_t *full) {
    hopper::load_bytes(to, &a.lines[(int64_t)lane * a.n_chunk + chunk].fade, sizeof *to, full);
}
__device__ __forceinline__ void load_lines(query_lines *to, const memory_args &a, int lane,
                                           int chunk, uint64_t *full) {
    hopper::load_bytes(to, &a.lines[(int64_t)lane * a.n_chunk + chunk], offsetof(query_lines, up),
                       full);
    hopper::load_bytes(to->up, a.up + (int64_t)lane * a.n_row + chunk * CHUNK, sizeof to->up, full);
}
// Found again at every use instead of kept.
__device__ __forceinline__ const kv_chunk_lines &lines_of(const memory_args &a, const segment &g,
                                                          int chunk) {
    return a.lines[g.lane * a.n_chunk + again(chunk)];
}
__device__ __forceinline__ int64_t row_of(const memory_args &a, const segment &, int chunk,
                                          int line) {
    return (int64_t)((int)blockIdx.y * a.n_row + again(chunk) * CHUNK + line);
}
// What a row brings into the memory at the chunk's end, or into its gradient at the chunk's start; of two rows.
__device__ __forceinline__ float2 brings(const key_lines &s, int row) {
    return *reinterpret_cast<const float2 *>(s.fresh + row);
}
__device__ __forceinline__ float2 brings(const query_lines &s, int row) {
    const float2 ahead = *reinterpret_cast<const float2 *>(s.ahead + row),
                 up = *reinterpret_cast<const float2 *>(s.up + row);
    return make_float2(kv_exp2(ahead.x + s.start) * up.x, kv_exp2(ahead.y + s.start) * up.y);
}

// A barrier whose count is the warps that arrive: `leave` after reading, `publish` after writing what products read.
__device__ __forceinline__ void leave(uint64_t *b) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::barrier_arrive(b);
}
__device__ __forceinline__ void publish(uint64_t *b) {
    hopper::proxy_fence();
    leave(b);
}

// Rows of a warpgroup, tile [64][D], as operand of k-step k alone.
__device__ __forceinline__ void load_operand(const uint16_t *tile, int k, uint32_t *x) {
    const uint32_t thread = (uint32_t)again((int)threadIdx.x);
    const uint32_t at = fragment_at(thread % 128 / 32 * 16 + thread % 16, thread % 32 / 16);
    load_matrices<false>(x, hopper::shared_address(tile) + (at ^ (k % 4 * 32)) + k / 4 * 64 * 128);
}
// The warpgroup's 64 columns of a tile [CHUNK][D], rows times what they bring, as operand.
template <class L>
__device__ __forceinline__ void load_update(const uint16_t *tile, const L &lines,
                                            uint32_t (&x)[32]) {
    const uint32_t thread = (uint32_t)again((int)threadIdx.x);
    const uint32_t at =
        hopper::shared_address(tile) + thread / 128 * CHUNK * 128 +
        fragment_at(thread % 8 + thread % 32 / 16 * 8, thread % 128 / 32 * 2 + thread / 8 % 2);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        load_matrices<true>(x + 4 * k, at + k * 16 * 128);
        const float2 a = brings(lines, (int)(16 * k + thread % 4 * 2)),
                     b = brings(lines, (int)(16 * k + 8 + thread % 4 * 2));
        x[4 * k] = scale_pair(x[4 * k], a.x, a.y);
        x[4 * k + 1] = scale_pair(x[4 * k + 1], a.x, a.y);
        x[4 * k + 2] = scale_pair(x[4 * k + 2], b.x, b.y);
        x[4 * k + 3] = scale_pair(x[4 * k + 3], b.x, b.y);
    }
    hopper::pin(x);
}
// The warpgroup's 64 rows of the memory into the tile of products.
__device__ __forceinline__ void snapshot(const float (&memory)[64], uint16_t *tile) {
    const uint32_t thread = (uint32_t)again((int)threadIdx.x);
    const uint32_t base = hopper::shared_address(tile),
                   at = fragment_at(thread / 32 * 16 + thread % 16, thread % 32 / 16);
#pragma unroll
    for (int j = 0; j < 8; j++)
        store_matrices(
            base + (at ^ (j % 4 * 32)) + j / 4 * D * 128, pair(memory[8 * j], memory[8 * j + 1]),
            pair(memory[8 * j + 2], memory[8 * j + 3]), pair(memory[8 * j + 4], memory[8 * j + 5]),
            pair(memory[8 * j + 6], memory[8 * j + 7]));
}
__device__ __forceinline__ void times_all(float (&x)[64], float by) {
#pragma unroll
    for (int i = 0; i < 64; i++) x[i] *= by;
}
__device__ __forceinline__ void times_rows(float (&x)[64], float by, float below) {
#pragma unroll
    for (int j = 0; j < 64; j++) x[j] *= j / 2 % 2 ? below : by;
}

// out (+)= operand times y^T (TB 0) or y (TB 1), y [128][128]. Issues a group of products.
template <int TB>
__device__ __forceinline__ void multiply(float (&out)[64], const uint32_t (&x)[32],
                                         const uint16_t *y, bool add) {
    using namespace hopper;
    const uint64_t yd = TB ? tile_n_major(y, 128 * 128) : tile_k_major(y);
    mma_begin();
#pragma unroll
    for (int k = 0; k < 8; k++)
        mma<__nv_bfloat16, 128>::rs<TB>(
            out, x + 4 * k, yd + (TB ? step_n_major(k) : step_k_major(k, 128)), add || k > 0);
    mma_commit();
}
__device__ __forceinline__ void finish(float (&x)[64]) {
    hopper::mma_wait<0>();
    hopper::pin(x);
}

// Products of the warpgroup's 64 rows with 128, weighted by the decay between them, as operand. QUERY: rows are queries, own is
// `ahead` of the thread's two rows and other `back` of the columns; else the other way round, and columns count `up` times. `line`:
// first row of the thread in the chunk.
template <bool QUERY>
__device__ __forceinline__ void weigh(const float (&x)[64], const float (&own)[2],
                                      const float *other, const float *up, int line,
                                      uint32_t (&out)[32]) {
    const int column = 2 * ((int)threadIdx.x % 4), first = hopper::uniform(line / 16 * 16), // warp
        below = line - column;
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const bool none = QUERY ? 8 * j > first + 15 : 8 * j + 7 < first,
                   all = QUERY ? 8 * j + 7 <= first : 8 * j >= first + 15;
        if (none) {
            out[2 * j] = out[2 * j + 1] = 0;
            continue;
        }
        const float2 o = *reinterpret_cast<const float2 *>(other + 8 * j + column);
        float2 by = {};
        if (!QUERY) by = *reinterpret_cast<const float2 *>(up + 8 * j + column);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int past = below + 8 * (r - j); // row - column
            const bool s0 = all || (QUERY ? past >= 0 : past <= 0),
                       s1 = all || (QUERY ? past >= 1 : past <= 1);
            float y0 = x[4 * j + 2 * r] * kv_exp2(own[r] + o.x),
                  y1 = x[4 * j + 2 * r + 1] * kv_exp2(own[r] + o.y);
            if (!QUERY) y0 *= by.x, y1 *= by.y;
            out[2 * j + r] = pair(s0 ? y0 : 0.0f, s1 ? y1 : 0.0f);
        }
    }
    hopper::pin(out); // before the next product's accumulators need registers
}

__device__ __forceinline__ void load_memory(float (&memory)[64], const float *from) {
    const int own = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16 + own / 4;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const float2 x =
                *reinterpret_cast<const float2 *>(from + (row + 8 * r) * D + 8 * j + 2 * (own % 4));
            memory[4 * j + 2 * r] = x.x;
            memory[4 * j + 2 * r + 1] = x.y;
        }
}

// What the passes launch. a: arguments; grid: segments of a lane, lanes. q, v, k of a chunk's half where they are operands (half).
kv_status launch_output(const kv_gpu *g, dim3 grid, const CUtensorMap &q_half, const CUtensorMap &k,
                        const CUtensorMap &v, const memory_args &a);
kv_status launch_reverse(const kv_gpu *g, dim3 grid, const CUtensorMap &q, const CUtensorMap &slope,
                         const CUtensorMap &k_half, const CUtensorMap &v_half,
                         const memory_args &a);

} // namespace fused

#endif
