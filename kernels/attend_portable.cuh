// Attention forward by mma.sync: one block per (64 queries, query head).
#ifndef KV_KERNELS_ATTEND_PORTABLE_CUH
#define KV_KERNELS_ATTEND_PORTABLE_CUH

#include "kernels/attend.cuh"
#include "kernels/portable.cuh"

namespace attend {

// What a block works on: 64 queries of one head, long lists first, and tiles of the keys on their list, in `stages` buffers each.
template <class T, int D> struct query_block {
    static constexpr int tile = portable::tile_elements<T>(D), stages = portable::stages<T>();
    const T *k, *v;     // of the KV head
    T *sq, *sk, *sv;    // shared: [64], [stages][64] rows
    int head, u, tiles; // u: query of the thread's first row
    key_list keys;

    // Sends for the queries.
    __device__ query_block(char *shared, const T *q, const T *all_k, const T *all_v,
                           const attend_args &a) {
        const int block = (int)(gridDim.x - 1 - blockIdx.x), u0 = block * portable::ROWS;
        head = (int)blockIdx.y;
        const int kv = head / (a.n_q_head / a.n_kv_head);
        const size_t plane = (size_t)a.n_token * D;
        k = all_k + (size_t)kv * plane;
        v = all_v + (size_t)kv * plane;
        sq = reinterpret_cast<T *>(shared);
        sk = sq + tile;
        sv = sk + stages * tile;
        u = u0 + (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4;
        keys = keys_of(a, kv, block);
        tiles = (keys.count + portable::COLUMNS - 1) / portable::COLUMNS;
        portable::load_rows<T, D>(sq, q + (size_t)head * plane,
                                  [&](int r) { return u0 + r < a.n_token ? u0 + r : -1; });
    }
    // Sends for tile j of keys and values.
    __device__ void load(int j) const {
        const auto row = [&](int r) { return key(j, r); };
        portable::load_rows<T, D>(sk + j % stages * tile, k, row);
        portable::load_rows<T, D>(sv + j % stages * tile, v, row);
    }
    __device__ int key(int j, int r) const { return keys.key(j * portable::COLUMNS + r); }
};

template <class T, int D>
__global__ __launch_bounds__(portable::THREADS, 1) void attend_portable(const T *q, const T *k,
                                                                        const T *v, bool exact,
                                                                        attend_args a) {
    using namespace portable;
    extern __shared__ __align__(16) char shared[];
    __shared__ alignas(16) int2 limit[2][COLUMNS];
    const query_block<T, D> b(shared, q, k, v, a);
    constexpr int tile = b.tile, stage_count = b.stages;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, u = b.u, tiles = b.tiles;
    auto load_keys = [&](int j) {
        b.load(j);
        if (threadIdx.x < COLUMNS)
            limit[j % stage_count][threadIdx.x] = b.keys.limits(b.key(j, (int)threadIdx.x));
    };
    if (stage_count == 2 && tiles > 0) load_keys(0);
    copy_commit();
    attend_row row[2] = {start(KV_LOG2E), start(KV_LOG2E)};
    float o[D / 2] = {};
    for (int j = 0; j < tiles; j++) {
        const int ahead = stage_count == 2 ? j + 1 : j, stage = j % stage_count;
        if (ahead < tiles) load_keys(ahead);
        copy_commit();
        copy_wait<stage_count - 1>();
        __syncthreads();
        float x[COLUMNS / 2];
        product<T, D>(x, b.sq + warp * 16 * row_stride<T>(D), b.sk + stage * tile);
        to_logits(x, a.scale, a.softcap);
        uint32_t inside[2];
        hide(x, inside, limit[stage] + 2 * (lane % 4), u, a);
        weigh(x, row[0], 0, KV_LOG2E, KV_MIXED, inside[0]);
        weigh(x, row[1], 1, KV_LOG2E, KV_MIXED, inside[1]);
        fade_rows(o, row[0].fade, row[1].fade);
        accumulate<T, D>(o, x, b.sv + stage * tile, exact);
        __syncthreads();
    }
    finish(row[0], o, 0, a, b.head, u);
    finish(row[1], o, 1, a, b.head, u + 8);
}

} // namespace attend

#endif
