// The recurrent memory of the fused passes: what its kernels share (fused_memory.cu says how they work together).
#ifndef KV_KERNELS_FUSED_MEMORY_CUH
#define KV_KERNELS_FUSED_MEMORY_CUH

#include "kernels/fused.cuh"

namespace fused {

constexpr int D = 128, CHUNK = KV_CHUNK, TILE = CHUNK * D; // keys, values; rows; elements of a tile
constexpr int NP = 3 * D;                                  // columns of the projections
constexpr float LOG2_SCALE = -3.5f;                        // log2 of D^-1/2
static_assert(CHUNK == 128, "a warpgroup owns half of the chunk's rows in tiles of 64");

struct memory_args {
    const double2 *from;  // b - mu, i - b
    const float4 *factor; // fresh, carried, exp(-mu)
    const int32_t *read, *edge;
    const float *fade, *readout, *e;
    float *segment, *span; // of all segments
    float *rhat, *partial;
    __nv_bfloat16 *delta, *d_project; // [lane][row][D], [lane][row][NP]
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

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
// Ordinary writes to shared memory before it are seen by products behind it.
__device__ __forceinline__ void meet_writes() {
    hopper::proxy_fence();
    meet();
}

// Pair of columns 8 j + 2 (lane % 4) of a tile's row that does not depend on j: row and row + 8 lie 1024 bytes apart.
struct tile_row {
    uint32_t at;
    __device__ tile_row(const void *tile, int row)
        : at(hopper::shared_address(tile) +
             (uint32_t)again(row * 128 + row % 8 * 16 + (int)threadIdx.x % 4 * 4)) {}
    __device__ uint32_t address(int j) const {
        return (at ^ (uint32_t)(j % 8 * 16)) + (uint32_t)(j / 8 * 128 * 128);
    }
    __device__ float2 load(int j) const {
        uint32_t x;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address(j)) : "memory");
        return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&x));
    }
    __device__ void store(int j, int down, uint32_t x) const {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(address(j) + down * 128), "r"(x) : "memory");
    }
};

// Rows of a tile times the factors of rows thread / 8 + 32 i, in place.
__device__ __forceinline__ void scale_rows(uint16_t *tile, const float (&by)[4]) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        uint4 *at = reinterpret_cast<uint4 *>(tile) + threadIdx.x + 256 * n;
        uint4 x = *at;
        uint32_t *word = reinterpret_cast<uint32_t *>(&x);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&word[i]));
            word[i] = pair(v.x * by[n % 4], v.y * by[n % 4]);
        }
        *at = x;
    }
}
template <bool CARRIED>
__device__ __forceinline__ void row_factors(const memory_args &a, int64_t row, float (&by)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 f = a.factor[row + threadIdx.x / 8 + 32 * i];
        by[i] = CARRIED ? f.y : f.x;
    }
}

// The warpgroup's 64 rows of the memory as a tile, what it keeps of it times `fade`, and X^T Y added: x, y [CHUNK][D].
__device__ __forceinline__ void snapshot(const float (&memory)[64], uint16_t *tile) {
    const tile_row t(tile, (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int j = 0; j < 16; j++)
            t.store(j, 8 * r, pair(memory[4 * j + 2 * r], memory[4 * j + 2 * r + 1]));
}
__device__ __forceinline__ void fade_memory(float (&memory)[64], float fade) {
#pragma unroll
    for (int i = 0; i < 64; i++) memory[i] *= fade;
}
__device__ __forceinline__ void times_rows(float (&x)[64], float by, float below) {
#pragma unroll
    for (int j = 0; j < 64; j++) x[j] *= j / 2 % 2 ? below : by;
}
__device__ __forceinline__ void add_product(float (&memory)[64], const uint16_t *x,
                                            const uint16_t *y, int team) {
    using namespace hopper;
    const uint64_t xd = tile_n_major(x + team * CHUNK * 64, 0), yd = tile_n_major(y, CHUNK * 128);
    mma_begin();
#pragma unroll
    for (int k = 0; k < CHUNK / 16; k++)
        mma<__nv_bfloat16, D>::ss<1, 1>(memory, xd + step_n_major(k), yd + step_n_major(k), 1);
    mma_commit();
}
// out (+)= rows of x at the warpgroup times y^T (TB 0) or y (TB 1).
template <int TB>
__device__ __forceinline__ void tile_rows(float (&out)[64], const uint16_t *x, const uint16_t *y,
                                          int team) {
    using namespace hopper;
    const uint64_t xd = tile_k_major(x + team * 64 * 64),
                   yd = TB ? tile_n_major(y, 128 * 128) : tile_k_major(y);
    mma_begin();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        mma<__nv_bfloat16, 128>::ss<0, TB>(out, xd + step_k_major(k, 128),
                                           yd + (TB ? step_n_major(k) : step_k_major(k, 128)),
                                           k > 0);
    mma_commit();
}
template <int TB>
__device__ __forceinline__ void operand_rows(float (&out)[64], const uint32_t (&x)[32],
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

// Products of 64 rows with 128, weighted by the decay between them (`ahead` includes the scale D^-1/2), as operand. QUERY: rows are queries, ahead is the rows' own and
// back of the columns, in shared memory; else the other way round. `line`: first row of the thread in the chunk.
template <bool QUERY>
__device__ __forceinline__ void weigh(const float (&x)[64], const float (&own)[2],
                                      const float *other, int line, uint32_t (&out)[32]) {
    const int column = 2 * ((int)threadIdx.x % 4), first = line / 16 * 16; // of the warp
    line = again(line);
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const bool none = QUERY ? 8 * j > first + 15 : 8 * j + 7 < first,
                   all = QUERY ? 8 * j + 7 <= first : 8 * j >= first + 15;
        if (none) {
            out[2 * j] = out[2 * j + 1] = 0;
            continue;
        }
        const float2 o = *reinterpret_cast<const float2 *>(other + 8 * j + column);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = line + 8 * r, c = 8 * j + column;
            const bool s0 = all || (QUERY ? c <= row : row <= c),
                       s1 = all || (QUERY ? c + 1 <= row : row <= c + 1);
            const float y0 = x[4 * j + 2 * r] * kv_exp2(own[r] + o.x),
                        y1 = x[4 * j + 2 * r + 1] * kv_exp2(own[r] + o.y);
            out[2 * j + r] = pair(s0 ? y0 : 0.0f, s1 ? y1 : 0.0f);
        }
    }
    hopper::pin(out); // before the next product's accumulators need registers
}

// Sum over 128 columns of the accumulators of row r times a tile's row.
__device__ __forceinline__ float dot_row(const float (&x)[64], int r, uint16_t *tile, int row) {
    const tile_row t(tile, row);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const float2 y = t.load(j);
        sum = fmaf(x[4 * j + 2 * r], y.x, fmaf(x[4 * j + 2 * r + 1], y.y, sum));
    }
    return kv_quad_sum(sum);
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

// What the passes launch. a: arguments; grid: segments of a lane, lanes.
kv_status launch_output(kv_gpu *g, dim3 grid, bool grad, const CUtensorMap &q, const CUtensorMap &k,
                        const CUtensorMap &v, const memory_args &a);
kv_status launch_reverse(kv_gpu *g, dim3 grid, const CUtensorMap &q, const CUtensorMap &k,
                         const CUtensorMap &v, const CUtensorMap &delta, const memory_args &a);

} // namespace fused

#endif
